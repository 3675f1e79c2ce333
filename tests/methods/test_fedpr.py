"""FedPR: from the second round on, prompts move in the null space of the prompts before."""

from itertools import pairwise

import torch

import fedprompt as fp
from fedprompt.methods.fedpr import _null_space, fedpr
from tiny_federations import after_rounds, vit_federation


def prompts_after_each_round(**values):
    federation = vit_federation(rounds=4)
    torch.manual_seed(federation.seed)
    start = federation.new_model().prompts.tokens.detach()
    rounds = after_rounds(fedpr, federation, **values)
    return [start, *(fp.snapshot(each.everyone)["prompts.tokens"] for each in rounds)]


def test_the_change_of_a_round_is_orthogonal_to_the_prompts_before():
    """Two prompts of width 8 have a null space of six dimensions, three quarters of the width."""
    found = prompts_after_each_round(share=0.75)
    products = [(after - before) @ before.mT for before, after in pairwise(found)]
    assert products[0].abs().max() > 1e-3
    for product in products[1:]:
        torch.testing.assert_close(product, torch.zeros_like(product), rtol=0, atol=1e-6)
    assert all((found[k] - found[k - 1]).norm() > 1e-2 for k in (2, 3, 4))


def test_directions_of_small_singular_values_are_kept():
    tokens = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))
    for layer, projection in zip(tokens, _null_space(tokens, 0.5), strict=True):
        right = torch.linalg.svd(layer.double()).Vh
        large, small = right[:4], right[4:]
        torch.testing.assert_close(projection.double() @ small.T, small.T, rtol=0, atol=1e-5)
        torch.testing.assert_close(projection.double() @ large.T, 0 * large.T, rtol=0, atol=1e-5)
