"""Clipping, capped weights, noise and summable vectors, in every precision."""

import copy
import math
from functools import partial
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedprompt import Weighted, weighted_mean
from fedprompt.privacy import cap_weight, clip_norm, from_sum, gaussian_noise, to_summable
from known import known
from same import assert_identical
from tolerance import assert_near

at_least_float32 = partial(torch.promote_types, torch.float32)
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def payload(generator, *, scale=1.0, dtype=torch.float32, garbage=float("nan")):
    """Make a payload of three names. One row is unknown and contains garbage.

    The weights belong to the whole parameter, to its rows, or to its single numbers.
    """
    rows = torch.randn(4, 3, generator=generator)
    rows[1] = garbage
    return {
        name: Weighted((scale * value).to(dtype), torch.tensor(weight))
        for name, value, weight in (
            ("whole", torch.randn(2, 5, generator=generator), 7.0),
            ("rows", rows, [2.0, 0.0, 900.0, 0.5]),
            ("entries", torch.randn(3, generator=generator), [1.0, 3.0, 0.0]),
        )
    }


def numbers(sent, center=None):
    """Return every known number in float64, minus the center."""
    return torch.cat(
        [
            (entry.value.double() - (center[name].double() if center else 0.0))[known(entry)]
            for name, entry in sent.items()
        ]
    )


def length(sent, center=None):
    return math.sqrt(math.fsum(number**2 for number in numbers(sent, center).tolist()))


def payload_of(*values, weight=1.0, dtype=torch.float64):
    return {"a": Weighted(torch.tensor(values, dtype=dtype), torch.tensor(weight, dtype=dtype))}


# Clipping.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [None, 0, 1, 300])
@settings(deadline=None, max_examples=6)
@given(seed=st.integers(0, 2**32), max_norm=st.floats(1e-3, 30))
def test_no_payload_is_longer_than_the_bound_in_its_own_precision(dtype, offset, seed, max_norm):
    """Rounding shrinks a number by at most a few units in the last place."""
    generator = torch.Generator().manual_seed(seed)
    sent, center = payload(generator, scale=3.0, dtype=dtype), None
    if offset is not None:
        draws = payload(generator, dtype=dtype).items()
        center = {name: (value.nan_to_num() + offset).to(dtype) for name, (value, _) in draws}
        sent = {name: Weighted(value + center[name], w) for name, (value, w) in sent.items()}
    before = copy.deepcopy((sent, center))
    clipped = clip_norm(sent, max_norm=max_norm, center=center)
    assert_identical((sent, center), before)
    assert length(clipped, center) <= max_norm
    if length(sent, center) <= max_norm * (1 - 1e-9):
        assert_identical(numbers(clipped), numbers(sent))
    shrunk = min(1.0, max_norm / length(sent, center)) * numbers(sent, center)
    unit = 4 * torch.finfo(dtype).eps * (numbers(sent).abs() + (offset or 0) + 1)
    assert ((numbers(clipped, center) - shrunk).abs() <= unit + 2**-39 * shrunk.abs()).all()
    for name, entry in clipped.items():
        assert entry.value.dtype == dtype
        assert_identical(entry.weight, sent[name].weight)
        assert_identical(entry.value[~known(entry)], torch.zeros_like(entry.value[~known(entry)]))
    assert_identical(clip_norm(clipped, max_norm=max_norm, center=center), clipped)


def test_clipping_moves_payloads_towards_the_center():
    """By hand, a change of (3, -4) from (1, 1) shrinks to (0.6, -0.8)."""
    center = {"a": torch.ones(2, dtype=torch.float64)}
    clipped = clip_norm(payload_of(4.0, -3.0), max_norm=1.0, center=center)["a"].value
    assert_near(clipped, torch.tensor([1.6, 0.2], dtype=torch.float64), dtype=torch.float32)
    still = clip_norm(payload_of(1.0, 1.0), max_norm=1e-9, center=center)["a"].value
    assert_identical(still, center["a"])
    with_a_graph = {"a": Weighted(torch.tensor([3.0, 4.0], requires_grad=True), torch.tensor(1.0))}
    assert clip_norm(with_a_graph, max_norm=1.0)["a"].value.norm() <= 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_number_is_clipped_to_the_bound_up_to_a_few_units_in_the_last_place(dtype):
    for center, max_norm in product([0.0, -1.0, 300.0], torch.linspace(0.01, 7, 16).tolist()):
        origin = torch.tensor([center], dtype=dtype)
        sent = {"a": Weighted(origin + 20, torch.tensor(1.0))}
        clipped = clip_norm(sent, max_norm=max_norm, center={"a": origin})["a"].value
        largest = torch.maximum(clipped.abs(), origin.abs())
        unit = torch.nextafter(largest, torch.full_like(largest, torch.inf)) - largest
        change = clipped.double().item() - center
        assert max(0.0, max_norm * (1 - 2**-39) - 3 * unit.item()) <= change <= max_norm


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_weights_are_capped_and_a_cap_is_never_rounded_up(dtype, generator):
    sent = payload(generator)
    capped = cap_weight(sent, max_weight=5)
    weights = {"whole": 5.0, "rows": [2.0, 0.0, 5.0, 0.5], "entries": [1.0, 3.0, 0.0]}
    for name, (value, weight) in capped.items():
        assert weight.tolist() == weights[name]
        assert_identical(value, sent[name].value)
    sent = payload_of(0.0, 0.0, weight=[60_000.0, 1.0], dtype=dtype)
    for max_weight in (1000.7, 1001.0, 0.1, 1e300):
        large, small = cap_weight(sent, max_weight=max_weight)["a"].weight.tolist()
        lowest = min(max_weight, sent["a"].weight[0].item()) * (1 - 2 * torch.finfo(dtype).eps)
        assert lowest <= large <= max_weight
        assert small <= min(max_weight, 1.0)


# Sensitivity and noise.


@pytest.mark.parametrize("dtype", DTYPES)
def test_known_numbers_get_noise_in_float64_that_is_rounded_once(dtype, generator):
    """If noise were rounded before the addition, its grid would reveal the value."""
    sent = payload(generator, dtype=dtype)
    seeded = [torch.Generator().manual_seed(0) for _ in range(2)]
    noisy = gaussian_noise(sent, multiplier=0.3, sensitivity=0.7, generator=seeded[0])
    for name, entry in noisy.items():
        noise = torch.randn(entry.value.shape, generator=seeded[1], dtype=torch.float64)
        expected = (sent[name].known.double() + 0.3 * 0.7 * noise).to(at_least_float32(dtype))
        assert_identical(entry.value, torch.where(known(entry), expected, 0.0))
        assert_identical(entry.weight, sent[name].weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_below_the_spacing_of_the_numbers_is_refused(dtype):
    spacing = 2**20 * torch.finfo(dtype).eps
    large = payload_of(2.0**20, 2.0**20, dtype=dtype)
    gaussian_noise(large, multiplier=1.0, sensitivity=spacing)
    rule = r"`payload\['a'\]\.value` must be at most .* for noise of deviation"
    with pytest.raises(ValueError, match=rule):
        gaussian_noise(large, multiplier=0.99, sensitivity=spacing)
    quiet = gaussian_noise(large, multiplier=0, sensitivity=spacing)
    assert_identical(quiet["a"].value, large["a"].value)


def test_the_smallest_noise_is_the_smallest_normal_number_also_of_no_numbers():
    least = torch.finfo(torch.float32).tiny
    for sent in (payload_of(0.0, dtype=torch.float32), payload_of(dtype=torch.float32)):
        value = gaussian_noise(sent, multiplier=1.0, sensitivity=least)["a"].value
        assert value.shape == sent["a"].value.shape
        assert value.abs().lt(20 * least).all()


# Numbers whose squares, differences or products overflow float64.


@pytest.mark.parametrize("scale", [2.0**1000, 2.0**-700, 1.0])
def test_the_norm_of_huge_and_tiny_entries_is_exact(scale):
    """By hand, (3, 4) has norm 5 in any unit, and its double 10 around a center."""
    long, near = payload_of(3 * scale, -4 * scale), partial(torch.testing.assert_close, rtol=1e-11)
    unit = torch.tensor([0.6, -0.8], dtype=torch.float64)
    for max_norm in (1.0 * scale, 1e-3 * scale):
        near(clip_norm(long, max_norm=max_norm)["a"].value, unit * max_norm, atol=0)
    assert_identical(clip_norm(long, max_norm=5 * scale)["a"].value, long["a"].value)
    center = {"a": -long["a"].value}
    moved = clip_norm(long, max_norm=scale, center=center)["a"].value
    near(moved, torch.tensor([-2.4, 3.2], dtype=torch.float64) * scale, atol=0)


def test_changes_from_huge_centers_are_clipped_by_their_norm():
    """The change of 3e308 overflows float64. Half of it leads to 0, up to rounding."""
    center = {"a": torch.tensor([-1.5e308], dtype=torch.float64)}
    clipped = clip_norm(payload_of(1.5e308), max_norm=1.5e308, center=center)["a"].value
    assert abs(clipped.item()) < 1e-11 * 1.5e308
    assert clip_norm(payload_of(1.5e308), max_norm=1.0, center=center)["a"].value.item() == -1.5e308
    center = {"a": torch.tensor([1e200, 0.0], dtype=torch.float64)}
    clipped = clip_norm(payload_of(1e200, 1e-5), max_norm=1e-6, center=center)["a"].value
    assert clipped.tolist() == pytest.approx([1e200, 1e-6], rel=1e-11)


@pytest.mark.parametrize(
    ("dtype", "weight"), [(torch.float16, 4e4), (torch.bfloat16, 3e38), (torch.float32, 3e38)]
)
def test_the_mean_of_a_vector_is_weighted_mean_where_the_total_does_not_fit(dtype, weight):
    sent = [
        payload_of(1.0, 2.0, weight=weight, dtype=dtype),
        payload_of(3.0, 5.0, weight=weight / 2, dtype=dtype),
    ]
    sent.append(sent[0])
    actual = from_sum(sum(to_summable(one) for one in sent), like=sent[0])["a"]
    assert actual.weight.item() == torch.finfo(dtype).max
    assert_identical(actual, weighted_mean([one["a"] for one in sent]))


# Payloads as one vector.


@pytest.mark.parametrize("seed", range(4))
def test_the_sum_of_vectors_gives_the_weighted_mean(seed):
    """Four clients, each with other unknown rows."""
    generator = torch.Generator().manual_seed(seed)
    sent = []
    for number in range(1, 5):
        drawn = payload(generator, scale=number).items()
        keep = {name: torch.rand(w.shape, generator=generator) > 0.3 for name, (_, w) in drawn}
        sent.append({name: Weighted(v, w * number * keep[name]) for name, (v, w) in drawn})
    before = copy.deepcopy(sent)
    result = from_sum(vector := sum(map(to_summable, sent)), like=sent[0])
    assert list(result) == list(sent[0])
    for name, entry in result.items():
        direct = weighted_mean(one[name] for one in sent)
        for actual, expected in zip(entry, direct, strict=True):
            assert_near(actual, expected)
            assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    kept = vector.clone()
    for tensor in (*result["rows"], *cap_weight(sent[0], max_weight=9)["rows"]):
        tensor.zero_()
    assert_identical([vector, sent], [kept, before])  # no memory is shared


def test_the_vector_by_hand():
    """Names are in alphabetical order. Each has its weighted values, then its weights."""
    sent = {
        "b": Weighted(torch.tensor(8.0), torch.tensor(0.5)),
        "a": Weighted(torch.tensor([[3.0, 4.0], [torch.nan, 1.0]]), torch.tensor([2.0, 0.0])),
    }
    assert to_summable(sent).tolist() == [6.0, 8.0, 0.0, 0.0, 2.0, 0.0, 4.0, 0.5]
    assert_identical(to_summable(dict(reversed(sent.items()))), to_summable(sent))
    assert_identical(from_sum(torch.zeros(8), like=sent)["a"].value, torch.zeros(2, 2))
