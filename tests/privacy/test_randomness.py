"""Random numbers for privacy: no searchable seed, correct distributions, constant memory."""

import math
import random
import tracemalloc
from functools import partial

import numpy as np
import pytest
import torch
from scipy.stats import binom, chi2, kstest, norm

import fedprompt.privacy._randomness as entropy
from fedprompt import Weighted
from fedprompt.privacy import gaussian_noise, noisy_mean, poisson_batch

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


# The attack on a seed. The default resists it.


def stream(seed):
    return torch.Generator().manual_seed(seed)


def found_by_search(release, seeds):
    """Return the seed whose noise correlates most with a release, and the correlation."""
    noise = torch.stack([torch.randn(96, generator=stream(s), dtype=torch.float64) for s in seeds])
    release, noise = release - release.mean(), noise - noise.mean(1, keepdim=True)
    match = (noise @ release) / (noise.norm(dim=1) * release.norm())
    return seeds[int(match.argmax())], float(match.max())


@pytest.mark.parametrize("draw", [noisy, sent])
def test_a_seed_can_be_searched_and_the_default_has_no_seed(draw):
    """Only the low 32 bits of a seed matter. A search over 2,000 stands for a search over all."""
    seed = 1234 + 7 * 2**32
    seeds = range(2000)
    found, match = found_by_search(draw(generator=stream(seed)), seeds)
    assert found == 1234
    assert match > 0.9
    noise = 2.0 * torch.randn(96, generator=stream(found), dtype=torch.float64)
    recovered = draw(generator=stream(seed)) - noise
    torch.testing.assert_close(recovered, SECRET, rtol=0, atol=1e-14)
    # The correlation of 96 independent numbers is a normal deviate divided by sqrt(96).
    limit = norm.isf(1e-6 / len(seeds)) / math.sqrt(96)
    assert found_by_search(draw(), seeds)[1] < limit < 0.75


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


@pytest.mark.bad_input
@PRIVATE
def test_a_generator_that_was_never_seeded_is_refused(draw):
    used = torch.Generator()
    torch.rand(5, generator=used)
    message = r"`generator` must be None \(the operating system's entropy\) or a seeded generator"
    for fresh in (torch.Generator(), used):
        with pytest.raises(ValueError, match=f"{message}; got a torch.Generator that was never"):
            draw(generator=fresh)
    for seed in (0, 1, 2**63 - 1):
        draw(generator=stream(seed))
    assert torch.Generator().initial_seed() == 67280421310721  # from the source of c10


@pytest.mark.bad_input
@PRIVATE
@pytest.mark.parametrize("wrong", [0, np.random.default_rng(0), "seed"])
def test_other_sources_are_refused_by_name(draw, wrong):
    with pytest.raises(TypeError, match=r"`generator` must be a torch\.Generator or None; got "):
        draw(generator=wrong)


@pytest.mark.bad_input
@PRIVATE
def test_a_generator_of_another_device_is_refused_by_name(draw):
    class Elsewhere(torch.Generator):
        device = torch.device("cuda:0")

    with pytest.raises(ValueError, match="`generator` must be on the CPU; got one on cuda:0"):
        draw(generator=Elsewhere())


# The distribution.

COUNT = 600_000


def test_deviates_are_normal_in_moments_and_tails():
    """Each line has a false alarm rate of 1e-7."""
    deviates = entropy.normal((COUNT,), generator=None)
    assert deviates.dtype == torch.float64
    assert kstest(deviates.numpy(), "norm").pvalue > 1e-7
    far = norm.isf(0.5e-7)
    # E x^2k is 1, 3, 15, 105, 945, 10395 for k = 1 ... 6, and Var x^k = E x^2k - (E x^k)^2.
    for power, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96), (6, 15, 10170)):
        error = (deviates**power).mean().item() - mean
        assert abs(error) < far * math.sqrt(variance / COUNT), power
    for sigmas in (1, 2, 3, 4, 4.5):
        for tail in (deviates > sigmas, deviates < -sigmas):
            low, high = binom.ppf([1e-7, 1 - 1e-7], COUNT, norm.sf(sigmas))
            assert low <= int(tail.sum()) <= high, sigmas


def test_deviates_are_independent():
    """Both halves of a pair, neighbors, and their squares. The halves share a radius."""
    deviates = entropy.normal((COUNT,), generator=None)
    limit = norm.isf(0.5e-7)
    whole = deviates[: COUNT // entropy.CHUNK * entropy.CHUNK].reshape(-1, 2, entropy.CHUNK // 2)
    cosines, sines = whole[:, 0].flatten(), whole[:, 1].flatten()
    for first, second in ((cosines, sines), (deviates[1:], deviates[:-1])):
        assert abs((first * second).mean().item()) * math.sqrt(len(first)) < limit
        squares = (first.square() - 1) * (second.square() - 1) / 2
        assert abs(squares.mean().item()) * math.sqrt(len(first)) < limit
    assert len(deviates.unique()) == COUNT  # these numbers of 63 bits repeat with probability 2e-8
    angle = torch.atan2(sines, cosines) / (2 * math.pi) % 1
    assert kstest(angle.numpy(), "uniform").pvalue > 1e-7


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


def test_deviates_use_every_bit_they_draw(monkeypatch):
    """Each of the 53 highest bits changes the radius."""
    words = torch.zeros(2, dtype=torch.int64)
    monkeypatch.setattr(entropy.os, "urandom", lambda count: words.numpy().tobytes()[:count])
    seen = set()
    for bit in range(10, 63):
        words[0] = 2**bit
        seen.add(entropy.normal((1,), generator=None).item())
    assert len(seen) == 53


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (2, 0, 3), (entropy.CHUNK + 1,)])
def test_every_shape_is_filled(shape):
    numbers = entropy.normal(shape, generator=None)
    assert numbers.shape == shape
    assert len(set(numbers.flatten().tolist())) == numbers.numel()


@pytest.mark.parametrize("generator", [None, stream(0)], ids=["entropy", "seeded"])
def test_examples_are_drawn_independently(generator):
    """Sizes are binomial, and so are the numbers of draws of each example and of pairs."""
    times, examples, rate = 3000, 40, 0.3
    taken = torch.zeros(times, examples, dtype=torch.float64)
    for row in taken:
        indices = poisson_batch(examples, rate=rate, generator=generator)
        assert indices.dtype == torch.int64
        row[indices] = 1
    spread = (times - 1) * taken.sum(1).var().item() / (examples * rate * (1 - rate))
    low, high = chi2.ppf([1e-7, 1 - 1e-7], times - 1)
    assert low < spread < high
    together = (taken[:, 0::2] * taken[:, 1::2]).sum(0)
    for count, chance in ((taken.sum(0), rate), (together, rate**2)):
        low, high = binom.ppf([1e-8, 1 - 1e-8], times, chance)
        assert bool(((low <= count) & (count <= high)).all())


def test_a_draw_over_several_chunks_has_the_indices_of_all_chunks():
    count = 3 * entropy.CHUNK + 5
    assert torch.equal(poisson_batch(count, rate=1), torch.arange(count))
    size = len(poisson_batch(count, rate=0.1))
    low, high = binom.ppf([1e-7, 1 - 1e-7], count, 0.1)
    assert low <= size <= high


# Memory.


def peak_bytes(function):
    """Return the maximum number of allocated bytes, temporary tensors included."""
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True) as record:
        function()
    events = record.profiler.kineto_results.events()
    events = [event for event in events if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


@pytest.mark.parametrize("count", [2**17, 2**21])
def test_memory_above_the_result_does_not_grow_with_its_size(count):
    """Tensors are measured by the profiler, and bytes objects by `tracemalloc`."""
    draw = partial(entropy.normal, (count,), generator=None)
    assert peak_bytes(draw) - 8 * count <= 6 * 8 * entropy.CHUNK
    tracemalloc.start()
    draw()
    _, python = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert python <= 2.5 * 8 * entropy.CHUNK
    drawn = peak_bytes(partial(poisson_batch, count, rate=1e-3))
    assert drawn <= 6 * 8 * entropy.CHUNK + 16 * count * 2e-3
