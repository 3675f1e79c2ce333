"""Finite entries of any magnitude give finite aggregates, against exact fractions."""

from fractions import Fraction
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedprompt as fp
from tolerance import assert_near

MOST = torch.finfo(torch.float64).max

# Powers of two, from those whose products underflow up to the largest.
EXPONENTS = st.sampled_from([-300, -40, 0, 1, 40, 500, 900, 1000, 1022, 1023])


def sent(value, weight):
    """One row with one coordinate, in float64."""
    return fp.Weighted(*(torch.tensor([number], dtype=torch.float64) for number in (value, weight)))


def one_teacher(entries, *, smoothing=0.0):
    """The teacher of clients of width 4 among themselves."""
    return fp.heterogeneous_means(entries, [4 for _ in entries], smoothing=smoothing)[4]


MEANS = {
    "weighted_mean": fp.weighted_mean,
    "heterogeneous_means": one_teacher,
    "trimmed_mean": partial(fp.robust.trimmed_mean, fraction=0),
}
AGGREGATORS = {
    **MEANS,
    "heterogeneous_means smoothing=1": partial(one_teacher, smoothing=1.0),
    "heterogeneous_means smoothing=1e308": partial(one_teacher, smoothing=1e308),
    "trimmed_mean fraction=0.2": partial(fp.robust.trimmed_mean, fraction=0.2),
    "weighted_median": fp.robust.weighted_median,
}


def exact_mean(numbers):
    """The weighted mean in fractions, which neither round nor overflow."""
    total = sum(Fraction(weight) for _, weight in numbers)
    return sum(Fraction(value) * Fraction(weight) for value, weight in numbers) / total


@st.composite
def extreme_numbers(draw):
    """Draw signed values and positive weights with very different magnitudes."""

    def number():
        return draw(st.floats(0.5, 1.0)) * 2.0 ** draw(EXPONENTS)

    return [
        (draw(st.sampled_from([-1, 1])) * number(), number())
        for _ in range(draw(st.integers(1, 5)))
    ]


@pytest.mark.parametrize("name", MEANS)
@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([(1.0, 40.0), (1e300, 1e300)], 1e300),
        ([(1e300, 1e300), (-1e300, 1e300), (3e300, 1e300)], 1e300),
        ([(MOST, 0.3), (MOST, 0.3), (MOST, 0.3)], MOST),
        ([(MOST, 5e-324)], MOST),
        # The quotient of the rounded sums is 2**1024, once as float64 and once from wide sums.
        ([(MOST, 0.1), (MOST, 0.5)], MOST),
        ([(-MOST, 0.1), (-MOST, 0.5)], -MOST),
        ([(MOST, 1.1), (MOST, 1.2)], MOST),
        ([(-MOST, 1.1), (-MOST, 1.2)], -MOST),
        ([(1.0, 1.7e308), (3.0, 1.7e308)], 2.0),
        ([(1e-300, 1.7e308), (3e-300, 1.7e308)], 2e-300),
        ([(1.0, 1.0), (MOST, 1e308), (-MOST, 1e308)], 1e-308),
    ],
)
def test_a_mean_of_finite_entries_is_finite_and_right(name, numbers, expected):
    result = MEANS[name]([sent(*pair) for pair in numbers])
    largest = max(abs(Fraction(value)) for value, _ in numbers)
    assert abs(Fraction(result.value.item()) - Fraction(expected)) <= largest / 10**12
    if len({value < 0 for value, _ in numbers}) == 1:
        assert result.value.item() == pytest.approx(expected, rel=1e-12, abs=0)
    total = min(sum(Fraction(weight) for _, weight in numbers), Fraction(MOST))
    assert result.weight.item() == pytest.approx(float(total))


@pytest.mark.parametrize("name", MEANS)
@settings(deadline=None, max_examples=40)
@given(numbers=extreme_numbers())
def test_means_of_any_magnitude_agree_with_fractions(name, numbers):
    result = MEANS[name]([sent(*pair) for pair in numbers]).value.item()
    largest = max(abs(Fraction(value)) for value, _ in numbers)
    # Products below 2**-1022 are lost, relative to weights of at least 2**-301.
    smallest_step = Fraction(2) ** -300
    assert abs(Fraction(result) - exact_mean(numbers)) <= largest / 10**12 + smallest_step


@pytest.mark.parametrize("name", AGGREGATORS)
@settings(deadline=None, max_examples=30)
@given(numbers=extreme_numbers())
def test_every_aggregate_lies_between_the_smallest_and_the_largest_value(name, numbers):
    result = AGGREGATORS[name]([sent(*pair) for pair in numbers])
    values = [value for value, _ in numbers] + ([0.0] if "smoothing" in name else [])
    slack = Fraction(1, 10**12) * max(abs(Fraction(value)) for value in values)
    assert Fraction(min(values)) - slack <= Fraction(result.value.item())
    assert Fraction(result.value.item()) <= Fraction(max(values)) + slack
    assert 0 < result.weight.item() <= MOST


def test_the_middle_of_two_largest_numbers_is_the_largest_number():
    assert fp.robust.weighted_median([sent(MOST, 1.0), sent(MOST, 1.0)]).value.item() == MOST
    assert fp.robust.weighted_median([sent(MOST, 1.0), sent(-MOST, 1.0)]).value.item() == 0.0


@pytest.mark.parametrize("name", AGGREGATORS)
def test_rows_next_to_an_extreme_one_are_bitwise_what_they_were_without_it(name, generator):
    values = torch.randn(4, 3, 2, generator=generator, dtype=torch.float64)
    weights = torch.rand(4, 3, generator=generator, dtype=torch.float64)
    expected = AGGREGATORS[name](list(map(fp.Weighted, values, weights)))
    values, weights = values.clone(), weights.clone()
    values[:, 1], weights[:, 1] = torch.tensor([1e308, -1e308], dtype=torch.float64), 1.7e308
    result = AGGREGATORS[name](list(map(fp.Weighted, values, weights)))
    for actual, tensor in zip(result, expected, strict=True):
        assert torch.equal(actual[[0, 2]], tensor[[0, 2]])
    if "1e308" not in name:
        assert_near(result.value[1] / 1e308, torch.tensor([1.0, -1.0], dtype=torch.float64))


def test_gradients_of_an_overflowing_sum_are_the_shares_of_the_weights():
    values = [torch.tensor(value).double().requires_grad_() for value in (1.0, 1e30)]
    weights = (torch.tensor(weight, dtype=torch.float64) for weight in (1e300, 3e300))
    fp.weighted_mean(map(fp.Weighted, values, weights)).value.backward()
    assert [value.grad.item() for value in values] == pytest.approx([0.25, 0.75], rel=1e-12)


@pytest.mark.parametrize("name", AGGREGATORS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_total_weight_beyond_its_dtype_becomes_the_largest_of_that_dtype(name, dtype):
    """40000 + 40000 in float16 is 65504, the largest; its values are those of a mean by weight."""
    most = torch.finfo(dtype).max
    weight = torch.tensor([40000.0 if dtype == torch.float16 else 0.75 * most], dtype=dtype)
    entries = [fp.Weighted(torch.tensor([value], dtype=dtype), weight) for value in (1.0, 3.0)]
    result = AGGREGATORS[name](entries)
    assert result.weight.tolist() == [most]
    if "smoothing" not in name:
        assert result.value.item() == pytest.approx(2.0, rel=1e-15)


def test_similarities_may_not_make_a_sum_overflow():
    entries = [sent(MOST, MOST), sent(MOST, MOST)]
    unequal = lambda dim, other: 1e18 if dim == other else 1e-18  # noqa: E731
    teachers = fp.heterogeneous_means(entries, [2, 4], smoothing=0, similarity=unequal)
    assert [teacher.value.item() for teacher in teachers.values()] == [MOST, MOST]
    with pytest.raises(ValueError, match=r"similarity\(2, 2\)` must be at most 1e\+18; got 1e\+19"):
        fp.heterogeneous_means(entries, [2, 4], similarity=lambda dim, other: 1e19)


# Krum.


@pytest.mark.parametrize("scale", [2.0**-400, 2.0**505, 2.0**600, 2.0**1020])
def test_krum_chooses_alike_at_every_scale(scale):
    """Scores by hand are in test_robust: 1.1 lies closest to its neighbors, then 1.0."""
    payloads = [
        {"part": sent(scale * value, weight)}
        for value, weight in ((1.0, 1.0), (1.1, 3.0), (1.3, 1.0), (9.0, 1e6), (0.7, 1.0))
    ]
    assert fp.robust.krum(payloads, num_byzantine=1)["part"].value.item() == scale * 1.1
    both = fp.robust.multi_krum(payloads, num_byzantine=1, num_selected=2)["part"]
    assert both.value.item() == pytest.approx(scale * (1.0 + 3 * 1.1) / 4)
