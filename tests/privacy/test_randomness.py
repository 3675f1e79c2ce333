"""Random numbers for privacy: no seed by default, by numpy from the same bits, constant memory."""

import math
import random
from functools import partial

import numpy as np
import pytest
import torch

import fedprompt.privacy._randomness as entropy
from fedprompt import Weighted
from fedprompt.privacy import gaussian_noise, noisy_mean, poisson_batch
from memory import peak_bytes
from same import assert_identical

SECRET = torch.linspace(-1, 1, 96, dtype=torch.float64)


def noisy(**options):
    """Return a clipped sum of 96 numbers with noise."""
    total = {"a": SECRET}
    return noisy_mean(total, multiplier=1.0, max_norm=2.0, expected_batch_size=1, **options)["a"]


def sent(**options):
    """Return the same numbers as an entry of a payload, with noise."""
    payload = {"a": Weighted(SECRET, SECRET.new_ones(()))}
    return gaussian_noise(payload, multiplier=1.0, sensitivity=2.0, **options)["a"].value


def drawn(**options):
    return poisson_batch(400, rate=0.5, **options)


PRIVATE = pytest.mark.parametrize("draw", [noisy, sent, drawn])


# Sources.


def stream(seed):
    return torch.Generator().manual_seed(seed)


@PRIVATE
def test_two_draws_differ_and_global_seeds_do_not_matter(draw):
    results = []
    for _ in range(3):
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002
        random.seed(0)
        before = torch.get_rng_state()
        results += [draw(), draw(generator=None)]
        assert torch.equal(torch.get_rng_state(), before)
    assert len({tuple(result.tolist()) for result in results}) == 6


@PRIVATE
def test_a_seeded_generator_repeats_a_study(draw):
    assert torch.equal(draw(generator=stream(5)), draw(generator=stream(5)))
    assert not torch.equal(draw(generator=stream(5)), draw(generator=stream(6)))
    copied = torch.Generator()
    copied.set_state(stream(5).get_state())  # the whole state, not only the seed
    assert torch.equal(draw(generator=copied), draw(generator=stream(5)))


@PRIVATE
def test_draws_do_not_depend_on_the_default_device(draw):
    with torch.device("meta"):
        for options in ({}, {"generator": stream(5)}):
            assert draw(**options).device == SECRET.device
    assert torch.equal(draw(**options | {"generator": stream(5)}), draw(generator=stream(5)))


# The distribution, computed by numpy from the same bits.


def bits_of(draw, count, width):
    """Return what the library keeps of `count` words: their low bits, as float64."""
    return (np.frombuffer(draw.bytes(8 * count), "<u8") & (2**width - 1)).astype(np.float64)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (2, 0, 3), (entropy.CHUNK + 1,)])
def test_deviates_are_those_of_box_and_muller(shape, monkeypatch):
    monkeypatch.setattr(entropy.os, "urandom", np.random.default_rng(0).bytes)
    numbers, draw = entropy.normal(shape, generator=None), np.random.default_rng(0)
    expected, count = [], math.prod(shape)
    for start in range(0, count, entropy.CHUNK):
        size = min(entropy.CHUNK, count - start)
        u, v = bits_of(draw, 2 * ((size + 1) // 2), 63).reshape(2, -1) / 2**63
        radius, angle = np.sqrt(-2 * np.log(u + 2.0**-64)), 2 * np.pi * v
        expected += [*radius * np.cos(angle), *radius * np.sin(angle)][:size]
    expected = torch.tensor(expected, dtype=torch.float64).reshape(shape)
    torch.testing.assert_close(numbers, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rate", [0.3, 1.0])
def test_examples_are_those_whose_uniform_number_is_below_the_rate(rate, monkeypatch):
    monkeypatch.setattr(entropy.os, "urandom", np.random.default_rng(0).bytes)
    count = 3 * entropy.CHUNK + 5
    uniform = bits_of(np.random.default_rng(0), count, 53) / 2**53
    assert poisson_batch(count, rate=rate).tolist() == np.flatnonzero(uniform < rate).tolist()
    seeded = torch.rand(400, generator=stream(0), dtype=torch.float64) < rate
    found = poisson_batch(400, rate=rate, generator=stream(0))
    assert_identical(found, seeded.nonzero()[:, 0])


def test_the_ends_of_the_random_bits_give_finite_deviates(monkeypatch):
    """By hand, the radius is sqrt(2 * 64 * ln 2) at the lowest bits, and 0 at the highest."""
    for byte, radius in ((b"\x00", math.sqrt(128 * math.log(2))), (b"\xff", 0.0)):
        monkeypatch.setattr(entropy.os, "urandom", lambda count, byte=byte: byte * count)
        numbers = entropy.normal((6,), generator=None)
        assert numbers[:3].tolist() == pytest.approx([radius] * 3, rel=1e-7, abs=0)
        assert torch.isfinite(numbers).all()
        assert poisson_batch(5, rate=1).tolist() == [0, 1, 2, 3, 4]
        few = poisson_batch(5, rate=2.0**-53).tolist()
        assert few == ([0, 1, 2, 3, 4] if byte == b"\x00" else [])


@pytest.mark.parametrize("count", [2**17, 2**21])
def test_memory_above_the_result_does_not_grow_with_its_size(count):
    draw = partial(entropy.normal, (count,), generator=None)
    assert peak_bytes(draw) - 8 * count <= 6 * 8 * entropy.CHUNK
    drawn = peak_bytes(partial(poisson_batch, count, rate=1e-3))
    assert drawn <= 6 * 8 * entropy.CHUNK + 16 * count * 2e-3
