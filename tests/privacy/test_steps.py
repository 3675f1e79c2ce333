"""A step of DP-SGD moves by at most its sensitivity, and has the noise of the formula."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedprompt.privacy import clipped_sum, noisy_mean
from references.dpsgd import clipped_and_added
from same import assert_identical
from tolerance import assert_near

BATCH = 6


def drawn(seed, *, batch=5, scale=3.0, dtype=torch.float64):
    """Draw gradients of three names, with norms below and above 1. Two samples are opposed."""
    generator = torch.Generator().manual_seed(seed)
    sizes = scale * 10 ** (2 * torch.rand(batch, generator=generator, dtype=torch.float64) - 1.5)
    gradients = {}
    for name, shape in {"tokens": (2, 3), "weight": (4,), "scale": ()}.items():
        gradient = torch.randn(batch, *shape, generator=generator, dtype=torch.float64)
        gradient[1:2] = -gradient[:1]
        gradients[name] = (gradient * sizes.reshape(-1, *[1] * len(shape))).to(dtype)
    return gradients


def without(gradients, sample):
    return {
        name: torch.cat([gradient[:sample], gradient[sample + 1 :]])
        for name, gradient in gradients.items()
    }


def distance(first, second=None):
    """Return the norm of the difference over all names; without `second`, the norm of `first`."""
    numbers = torch.cat(
        [(first[name] - (second[name] if second else 0)).flatten() for name in first]
    )
    return math.sqrt(math.fsum(number**2 for number in numbers.tolist()))


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 2**32), max_norm=st.floats(1e-3, 30))
def test_a_sum_is_the_one_of_the_reference_and_one_sample_changes_it_by_at_most_the_bound(
    seed, max_norm
):
    gradients = drawn(seed)
    whole = clipped_sum(gradients, max_norm=max_norm)
    for name, tensor in clipped_and_added(gradients, max_norm).items():
        # The tolerance covers the margin for rounding, 2^-40 of each sample.
        torch.testing.assert_close(whole[name], tensor, rtol=0, atol=1e-11 * max_norm)
    for sample in range(5):
        rest = without(gradients, sample)
        assert distance(whole, clipped_sum(rest, max_norm=max_norm)) <= max_norm * (1 + 1e-12)
        others = {
            name: torch.cat([rest[name], -9 * gradient[sample : sample + 1]])
            for name, gradient in gradients.items()
        }
        assert distance(whole, clipped_sum(others, max_norm=max_norm)) <= 2 * max_norm * (1 + 1e-12)


@pytest.mark.parametrize("max_norm", [0.05, 2.5])
def test_noise_is_normal_with_the_deviation_of_the_formula(max_norm):
    """A step is the sum plus normal noise of deviation z C, divided by the expected batch B."""
    draws = [torch.Generator().manual_seed(3) for _ in range(2)]
    total = {"a": torch.full((9,), 3.0, dtype=torch.float64)}
    options = {"max_norm": max_norm, "expected_batch_size": 20, "generator": draws[0]}
    noise = torch.randn(9, generator=draws[1], dtype=torch.float64)
    noisy = noisy_mean(total, multiplier=0.7, **options)["a"]
    assert_near(noisy, (3.0 + 0.7 * max_norm * noise) / 20)
    assert_near(noisy_mean(total, multiplier=0.0, **options)["a"], total["a"] / 20)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_the_bound_holds_for_gradients_of_every_precision(dtype):
    """Without a margin for rounding, about half of these would exceed the bound."""
    for seed in range(40):
        total = clipped_sum(drawn(seed, batch=1, scale=300.0, dtype=dtype), max_norm=0.7)
        assert all(tensor.dtype == torch.float64 for tensor in total.values())
        assert 0.7 * (1 - 1e-11) <= distance(total) <= 0.7


@pytest.mark.parametrize("scale", [2.0**1000, 2.0**-700, 1.0])
def test_huge_and_tiny_gradients_are_clipped_by_their_norm(scale):
    """By hand, the samples have norms 5 and 1/2 over two names. Only the first is clipped."""
    gradients = {
        "a": torch.tensor([3.0, 0.3], dtype=torch.float64) * scale,
        "b": torch.tensor([[-4.0], [0.4]], dtype=torch.float64) * scale,
    }
    total = clipped_sum(gradients, max_norm=scale)
    sums = [total[name].item() / scale for name in "ab"]
    assert sums == pytest.approx([0.6 + 0.3, -0.8 + 0.4], rel=1e-11)


def test_inputs_are_not_changed(generator):
    gradients = drawn(0)
    before = copy.deepcopy(gradients)
    total = clipped_sum(gradients, max_norm=1.0)
    kept = copy.deepcopy(total)
    noisy_mean(total, multiplier=1.0, max_norm=1.0, expected_batch_size=5, generator=generator)
    assert_identical(gradients, before)
    assert_identical(total, kept)
