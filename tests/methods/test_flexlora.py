"""FlexLoRA: the mean of the products is divided by its singular values, and cut to each rank."""

import pytest
import torch

from fedprompt.methods import flexlora, flexlora_exact
from low_rank import ONE_ROUND, RANKS, RATE, SIZES, cut, mean, of_sizes, sent_by, trained
from tiny_federations import last, parameters, vit_federation

pytestmark = pytest.mark.usefixtures("float64")
FULL = {"learning_rate": RATE, "rank": 3, "sizes": SIZES}


def best(product, rank):
    """Return the best approximation of a rank, by the eigenvectors of its Gram matrix."""
    vectors = torch.linalg.eigh(product.T @ product).eigenvectors[:, -rank:]
    return product @ vectors @ vectors.T


def means(federation, sent, place):
    products = [[each[place + 1] @ each[place]] for each in sent]
    return mean(federation, products)[0]


def product_of(found, layer):
    b, a = (found[f"tuned.blocks.{layer}.attn.qkv.lora_{f}.default.weight"] for f in "BA")
    return b @ a


def test_each_client_has_the_best_approximation_of_the_mean_product_of_its_rank():
    federation = vit_federation(**ONE_ROUND)
    predictions = last(flexlora, federation, **FULL)
    sent = sent_by(federation, of_sizes(federation))
    head = mean(federation, [each[:2] for each in sent])
    for client, rank in enumerate(RANKS):
        found = parameters(predictions, client)
        torch.testing.assert_close([found["head.weight"], found["head.bias"]], head)
        for layer in (0, 1):
            assert found[f"tuned.blocks.{layer}.attn.qkv.lora_A.default.weight"].shape == (rank, 8)
            whole = means(federation, sent, 2 + 2 * layer)
            torch.testing.assert_close(product_of(found, layer), best(whole, rank))
            assert rank == 3 or (whole - best(whole, rank)).norm() > 1e-3 * whole.norm()


def test_of_the_exact_variant_all_clients_have_the_mean_of_the_whole_changes_after_two_rounds():
    """`changes` has what a client's frozen weights have beyond the network: mean less own start."""
    federation = vit_federation(**ONE_ROUND | {"rounds": 2})
    predictions = last(flexlora_exact, federation, **FULL)
    values, whole = of_sizes(federation), [torch.zeros(24, 8)] * 2
    for server_round in range(2):
        sent, own = [], []
        for client, rank in enumerate(RANKS):
            begin = cut(values, rank)
            changes = [whole[k] - begin[3 + 2 * k] @ begin[2 + 2 * k] for k in (0, 1)]
            own.append(changes)
            now = {"server_round": server_round, "changes": changes}
            sent.append(trained(federation, client, begin, **now))
        whole = [
            mean(
                federation,
                [[c[k] + s[3 + 2 * k] @ s[2 + 2 * k]] for c, s in zip(own, sent, strict=True)],
            )[0]
            for k in (0, 1)
        ]
        factors = [each for k in (0, 1) for each in divided(whole[k])]
        values = [*mean(federation, [each[:2] for each in sent]), *factors]
    for client in (0, 1, 2, 5):
        found = parameters(predictions, client)
        for layer, block in enumerate(federation.trunk.model.blocks):
            moved = found[f"tuned.blocks.{layer}.attn.qkv.base_layer.weight"]
            change = moved - block.attn.qkv.weight + product_of(found, layer)
            torch.testing.assert_close(change, whole[layer])


def divided(product):
    """Return A and B of rank 3 of a product."""
    left, scale, right = torch.linalg.svd(product, full_matrices=False)
    return right[:3], left[:, :3] * scale[:3]
