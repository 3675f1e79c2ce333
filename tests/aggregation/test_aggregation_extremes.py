"""Entries of any magnitude give right aggregates, against exact fractions, or are refused."""

from fractions import Fraction
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedprompt as fp

MOST = torch.finfo(torch.float64).max

# Powers of two, from those whose products underflow up to the largest.
EXPONENTS = st.sampled_from([-300, -40, 0, 1, 40, 500, 900, 1000, 1022, 1023])


def sent(value, weight):
    """One row with one coordinate, in float64."""
    return fp.Weighted(*(torch.tensor([number], dtype=torch.float64) for number in (value, weight)))


def one_teacher(entries, *, smoothing=0.0):
    """The teacher of clients of width 4 among themselves."""
    return fp.heterogeneous_means(entries, [4 for _ in entries], smoothing=smoothing)[4]


SUMS = {
    "weighted_mean": fp.weighted_mean,
    "heterogeneous_means": one_teacher,
    "heterogeneous_means smoothing=1": partial(one_teacher, smoothing=1.0),
}
AGGREGATORS = {
    **SUMS,
    "trimmed_mean": partial(fp.robust.trimmed_mean, fraction=0),
    "trimmed_mean fraction=0.2": partial(fp.robust.trimmed_mean, fraction=0.2),
    "weighted_median": fp.robust.weighted_median,
}


@st.composite
def extreme_numbers(draw):
    """Draw signed values and positive weights with very different magnitudes."""

    def number():
        return draw(st.floats(0.5, 1.0)) * 2.0 ** draw(EXPONENTS)

    return [
        (draw(st.sampled_from([-1, 1])) * number(), number())
        for _ in range(draw(st.integers(1, 5)))
    ]


@pytest.mark.parametrize("name", AGGREGATORS)
@settings(deadline=None, max_examples=40)
@given(numbers=extreme_numbers())
def test_an_aggregate_agrees_with_fractions_or_its_sum_is_beyond_float64(name, numbers):
    numbers = [(Fraction(value), Fraction(weight)) for value, weight in numbers]
    products = sum(abs(value) * weight for value, weight in numbers)
    total = sum(weight for _, weight in numbers)
    entries = [sent(float(value), float(weight)) for value, weight in numbers]
    if name in SUMS and max(products, total) > MOST:
        # Sums of both signs may stay within float64.
        beyond = abs(sum(value * weight for value, weight in numbers[:1])) > MOST or total > MOST
        if beyond:
            with pytest.raises(ValueError, match=r"`entries\[0\]|`entries"):
                SUMS[name](entries)
        return
    result = AGGREGATORS[name](entries)
    values = [value for value, _ in numbers] + ([Fraction(0)] if "smoothing" in name else [])
    slack = max(map(abs, values)) / 10**12 + Fraction(2) ** -300  # products below 2**-1022 are lost
    found = Fraction(result.value.item())
    assert min(values) - slack <= found <= max(values) + slack
    assert result.weight.item() == pytest.approx(float(min(total, Fraction(MOST))))
    if name in ("weighted_mean", "heterogeneous_means", "trimmed_mean"):
        mean = sum(value * weight for value, weight in numbers) / total
        assert abs(found - mean) <= slack


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("numbers", [[(2.0, MOST)], [(1.0, 1e308), (1.0, 1e308)]])
def test_a_sum_beyond_float64_is_refused_with_its_sender(name, numbers):
    rule = rf"^`entries\[{len(numbers) - 1}\]` must have sums of weights, and of weights times"
    with pytest.raises(ValueError, match=rule):
        SUMS[name]([sent(*pair) for pair in numbers])


def test_factors_may_not_make_a_sum_overflow():
    entries, payloads = [sent(1.0, 1e300)] * 2, [{"a": sent(1.0, 1e300)}]
    with pytest.raises(ValueError, match="`entries` must have sums of weights"):
        fp.heterogeneous_means(entries, [2, 4], similarity=lambda dim, other: 1e18)
    with pytest.raises(ValueError, match="`entries` must have sums of weights"):
        fp.aggregation.mixtures(payloads, torch.tensor([[1e18]]))
    with pytest.raises(ValueError, match=r"similarity\(2, 2\)` must be at most 1e\+18; got 1e\+19"):
        fp.heterogeneous_means(entries, [2, 4], similarity=lambda dim, other: 1e19)


@pytest.mark.parametrize("sign", [-1, 1])
def test_a_quotient_beyond_float64_is_the_largest_number(sign):
    """The rounded sums have the quotient 2**1024."""
    for name in SUMS.keys() - {"heterogeneous_means smoothing=1"}:
        assert SUMS[name]([sent(sign * MOST, 0.1), sent(sign * MOST, 0.5)]).value == sign * MOST


def test_the_middle_of_two_largest_numbers_is_the_largest_number():
    assert fp.robust.weighted_median([sent(MOST, 1.0), sent(MOST, 1.0)]).value.item() == MOST
    assert fp.robust.weighted_median([sent(MOST, 1.0), sent(-MOST, 1.0)]).value.item() == 0.0


@pytest.mark.parametrize("name", [name for name in AGGREGATORS if name not in SUMS])
def test_rows_next_to_an_extreme_one_are_bitwise_what_they_were_without_it(name, generator):
    values = torch.randn(4, 3, 2, generator=generator, dtype=torch.float64)
    weights = torch.rand(4, 3, generator=generator, dtype=torch.float64)
    expected = AGGREGATORS[name](list(map(fp.Weighted, values, weights)))
    values, weights = values.clone(), weights.clone()
    values[:, 1], weights[:, 1] = torch.tensor([1e308, -1e308], dtype=torch.float64), 1.7e308
    result = AGGREGATORS[name](list(map(fp.Weighted, values, weights)))
    for actual, tensor in zip(result, expected, strict=True):
        assert torch.equal(actual[[0, 2]], tensor[[0, 2]])
    assert (result.value[1] / 1e308).tolist() == pytest.approx([1.0, -1.0])


@pytest.mark.parametrize("name", AGGREGATORS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_total_weight_beyond_its_dtype_becomes_the_largest_of_that_dtype(name, dtype):
    """40000 + 40000 in float16 is 65504, the largest; its values are those of a mean by weight."""
    most = torch.finfo(dtype).max
    weight = torch.tensor([40000.0 if dtype == torch.float16 else 0.75 * most], dtype=dtype)
    entries = [fp.Weighted(torch.tensor([value], dtype=dtype), weight) for value in (1.0, 3.0)]
    result = AGGREGATORS[name](entries)
    assert result.weight.tolist() == [most]
    assert result.value.item() == pytest.approx(2.0, rel=1e-4)


@pytest.mark.parametrize("scale", [2.0**-400, 2.0**505, 2.0**600, 2.0**1020])
def test_krum_chooses_alike_at_every_scale(scale):
    """Scores by hand are in test_robust: 1.1 lies closest to its neighbors, then 1.0."""
    payloads = [
        {"part": sent(scale * value, weight)}
        for value, weight in ((1.0, 1.0), (1.1, 3.0), (1.3, 1.0), (9.0, 1e6), (0.7, 1.0))
    ]
    assert fp.robust.krum(payloads, num_byzantine=1)["part"].value.item() == scale * 1.1
    if scale < 2.0**1020:  # the sum of two by weight is within float64
        both = fp.robust.multi_krum(payloads, num_byzantine=1, num_selected=2)["part"]
        assert both.value.item() == pytest.approx(scale * (1.0 + 3 * 1.1) / 4)
