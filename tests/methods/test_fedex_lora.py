"""FedEx-LoRA: a round ends with the mean of the products, and the next one begins there."""

import pytest
import torch

from fedprompt.methods.fedex_lora import fedex_lora
from fedprompt.methods.fedlora import fedlora
from low_rank import ONE_ROUND, RATE, initial, mean, trained
from tiny_federations import last, parameters, vit_federation

pytestmark = pytest.mark.usefixtures("float64")


def test_after_two_rounds_the_weights_have_the_means_of_the_products():
    """Eq. 12 to 16, with the residual of each round in `changes`."""
    federation = vit_federation(**ONE_ROUND | {"rounds": 2})
    model = last(fedex_lora, federation, learning_rate=RATE).of(0)
    values, changes = initial(federation), [0.0, 0.0]
    for server_round in range(2):
        now = {"server_round": server_round, "changes": changes}
        sent = [trained(federation, client, values, **now) for client in range(5)]
        products = mean(federation, [[each[3] @ each[2], each[5] @ each[4]] for each in sent])
        values = mean(federation, sent)
        ours = values[3] @ values[2], values[5] @ values[4]
        changes = [c + p - own for c, p, own in zip(changes, products, ours, strict=True)]
    assert max(each.abs().max() for each in changes) > 1e-6
    for layer, block in enumerate(model.trunk.model.blocks):
        frozen = federation.trunk.model.blocks[layer].attn.qkv.weight
        qkv = block.attn.qkv
        torch.testing.assert_close(qkv.base_layer.weight.detach(), frozen + changes[layer])
        torch.testing.assert_close(qkv.lora_B["default"].weight.detach(), values[3 + 2 * layer])


def test_factors_and_head_of_one_round_are_those_of_fedlora_with_a_residual_of_rank_one():
    found = parameters(last(fedex_lora, vit_federation(**ONE_ROUND), residual_rank=1), 0)
    plain = parameters(last(fedlora, vit_federation(**ONE_ROUND)), 0)
    torch.testing.assert_close({name: found[name] for name in plain}, plain)
    frozen = vit_federation().trunk.model.blocks[0].attn.qkv.weight
    moved = found["tuned.blocks.0.attn.qkv.base_layer.weight"] - frozen
    assert torch.linalg.matrix_rank(moved, rtol=1e-6) == 1


def test_a_residual_without_rank_is_refused_before_any_client_trains():
    with pytest.raises(ValueError, match="`residual_rank` must be at least 1; got 0"):
        fedex_lora(vit_federation(), residual_rank=0)
