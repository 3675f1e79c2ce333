"""FLoRA: the weights take the product of the stacked factors, and clients begin anew."""

import pytest
import torch

import fedprompt as fp
from fedprompt.methods import flora
from low_rank import ONE_ROUND, RATE, initial, mean, trained
from tiny_federations import last, vit_federation

pytestmark = pytest.mark.usefixtures("float64")
RANKS = (2, 3)
SIZES = {0: 2, 2: 2, 4: 2}


def new_factors(federation, client, server_round):
    """Draw A (rank, 8) of both layers by the rule of PEFT, a uniform one, with B = 0."""
    draw = federation.data(client, server_round).stream("LoRA")
    rank, bound = RANKS[client % 2], 8**-0.5
    drawn = [torch.empty(rank, 8).uniform_(-bound, bound, generator=draw) for _ in range(2)]
    return [each for a in drawn for each in (a, torch.zeros(24, rank))]


def test_after_two_rounds_the_weights_have_the_products_of_the_stacks():
    federation = vit_federation(**ONE_ROUND | {"rounds": 2})
    model = last(flora, federation, learning_rate=RATE, rank=3, sizes=SIZES).of(0)
    head, changes = initial(federation)[:2], [0.0, 0.0]
    shares = [federation.num_examples(client) for client in range(5)]
    for server_round in range(2):
        now = {"server_round": server_round, "changes": changes}
        starts = [[*head, *new_factors(federation, client, server_round)] for client in range(5)]
        sent = [trained(federation, client, start, **now) for client, start in enumerate(starts)]
        head = mean(federation, [each[:2] for each in sent])
        for layer in (0, 1):
            pairs = [(each[2 + 2 * layer], each[3 + 2 * layer]) for each in sent]
            scaled = [share / sum(shares) * a for share, (a, _) in zip(shares, pairs, strict=True)]
            stack = torch.cat([b for _, b in pairs], dim=1)
            assert stack.shape == (24, 3 * 2 + 2 * 3)
            changes[layer] = changes[layer] + stack @ torch.cat(scaled)
    torch.testing.assert_close([model.head.weight.detach(), model.head.bias.detach()], head)
    for layer, block in enumerate(model.trunk.model.blocks):
        frozen = federation.trunk.model.blocks[layer].attn.qkv.weight
        assert changes[layer].abs().max() > 1e-3
        moved = block.attn.qkv.base_layer.weight.detach()
        torch.testing.assert_close(moved, frozen + changes[layer])
        assert not block.attn.qkv.lora_B["default"].weight.any()


def test_payloads_of_clients_have_their_ranks_and_no_weights():
    """Two layers of width 8 with A (rank, 8) and B (24, rank), and three classes."""
    method = flora(vit_federation(), rank=3, sizes=SIZES)
    forms = [method.form(client).values() for client in range(3)]
    numbers = [sum(entry.value.numel() for entry in form) for form in forms]
    assert numbers == [2 * (r * 8 + 24 * r) + 8 * 3 + 3 for r in (2, 3, 2)]


def test_a_codec_that_leaves_numbers_out_is_refused_with_the_codecs_that_do_not():
    with pytest.raises(
        ValueError, match="must say whether payloads are changes, because the codec leaves"
    ):
        fp.rounds.coded(flora(vit_federation()), fp.codecs.top_k(fraction=0.1))
