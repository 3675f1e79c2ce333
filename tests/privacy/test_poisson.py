"""Poisson sampling: examples are drawn independently."""

import torch
from scipy.stats import binom, chi2

from fedprompt.privacy import poisson_batch


def check_poisson(draw, seed):
    """Sizes are binomial, and examples are drawn uniformly and independently."""
    examples, rate, times = 40, 0.3, 3000
    generator = torch.Generator().manual_seed(seed)
    taken = torch.zeros(times, examples, dtype=torch.float64)
    for row in taken:
        indices = draw(examples, rate=rate, generator=generator)
        assert indices.tolist() == sorted(set(indices.tolist()))
        row[indices] = 1
    sizes = taken.sum(1)
    spread = (times - 1) * sizes.var().item() / (examples * rate * (1 - rate))
    low, high = chi2.ppf([1e-4, 1 - 1e-4], times - 1)
    assert low < spread < high, "the size of a batch"
    low, high = binom.ppf([1e-5, 1 - 1e-5], times, rate)
    assert bool(((low <= taken.sum(0)) & (taken.sum(0) <= high)).all()), "chance of each example"
    low, high = binom.ppf([1e-5, 1 - 1e-5], times, rate**2)
    together = (taken[:, 0::2] * taken[:, 1::2]).sum(0)
    assert bool(((low <= together) & (together <= high)).all()), "pairs"


def test_examples_are_drawn_independently():
    check_poisson(poisson_batch, 0)


def test_the_largest_and_a_tiny_rate(generator):
    assert poisson_batch(5, rate=1, generator=generator).tolist() == [0, 1, 2, 3, 4]
    assert poisson_batch(5, rate=1e-12, generator=generator).shape == (0,)
    assert poisson_batch(5, rate=0.5, generator=generator).dtype == torch.int64
