"""Figures of the accuracy matrix, against double loops over exact fractions."""

from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedprompt.metrics import (
    Summary,
    client_spread,
    global_accuracy,
    last_and_best,
    local_accuracy,
    negative_effect,
    pooled_local_accuracy,
    worst_local_accuracy,
)

Counts = tuple[list[list[int]], list[int]]

# Three clients on three test sets of 10, 20 and 50 samples.
ACCURACY = torch.tensor([[0.9, 0.5, 0.1], [0.2, 0.7, 0.4], [0.3, 0.6, 0.8]], dtype=torch.float64)
SIZES = torch.tensor([10, 20, 50])


@st.composite
def correct_counts(draw: st.DrawFn, *, clients: int | None = None) -> Counts:
    """Draw numbers of correct predictions (clients, tests) and sizes of the test sets."""
    sizes = draw(st.lists(st.integers(1, 50), min_size=1, max_size=5))
    rows = draw(st.integers(1, 5)) if clients is None else clients or len(sizes)
    return [[draw(st.integers(0, size)) for size in sizes] for _ in range(rows)], sizes


def as_tensors(counts: Counts) -> tuple[Tensor, Tensor]:
    correct, sizes = counts
    return torch.tensor(correct, dtype=torch.float64) / torch.tensor(sizes), torch.tensor(sizes)


def test_every_figure_by_hand() -> None:
    # Own: .9, .7, .8. On all 80 samples: (9 + 10 + 5) / 80, (2 + 14 + 20) / 80, (3 + 12 + 40) / 80
    # = .3, .45, .6875.
    assert local_accuracy(ACCURACY) == pytest.approx(0.8, abs=1e-12)
    assert worst_local_accuracy(ACCURACY) == pytest.approx(0.7, abs=1e-12)
    assert pooled_local_accuracy(ACCURACY, SIZES) == pytest.approx((9 + 14 + 40) / 80, abs=1e-12)
    assert global_accuracy(ACCURACY, SIZES) == pytest.approx((0.3 + 0.45 + 0.6875) / 3, abs=1e-12)
    assert client_spread(ACCURACY, SIZES) == pytest.approx(
        (0.3, (0.3 + 0.45 + 0.6875) / 3, 0.6875), abs=1e-12
    )
    # Without sizes: rows average to .5, 1.3 / 3, 1.7 / 3.
    assert global_accuracy(ACCURACY) == pytest.approx(0.5, abs=1e-12)
    assert client_spread(ACCURACY) == pytest.approx((1.3 / 3, 0.5, 1.7 / 3), abs=1e-12)


@settings(max_examples=50, deadline=None)
@given(correct_counts())
def test_global_accuracy_and_spread_are_fractions_of_all_samples(counts: Counts) -> None:
    correct, sizes = counts
    accuracy, num_examples = as_tensors(counts)
    each = [Fraction(sum(row), sum(sizes)) for row in correct]
    average = float(sum(each) / len(each))
    assert global_accuracy(accuracy, num_examples) == pytest.approx(average, abs=1e-12)
    assert client_spread(accuracy, num_examples) == pytest.approx(
        (float(min(each)), average, float(max(each))), abs=1e-12
    )


@settings(max_examples=50, deadline=None)
@given(correct_counts(clients=0))
def test_local_accuracies_are_fractions_of_own_samples(counts: Counts) -> None:
    correct, sizes = counts
    accuracy, num_examples = as_tensors(counts)
    own = [Fraction(correct[client][client], size) for client, size in enumerate(sizes)]
    if len(sizes) > 1:
        assert local_accuracy(accuracy) == pytest.approx(float(sum(own) / len(own)), abs=1e-12)
    pooled = Fraction(sum(correct[client][client] for client in range(len(sizes))), sum(sizes))
    assert pooled_local_accuracy(accuracy, num_examples) == pytest.approx(float(pooled), abs=1e-12)
    assert worst_local_accuracy(accuracy) == pytest.approx(float(min(own)), abs=1e-12)
    # Law M-b: the worst is not above the mean. With equal sizes both means agree.
    assert worst_local_accuracy(accuracy) <= local_accuracy(accuracy) + 1e-12
    equal = torch.full_like(num_examples, 7)
    assert pooled_local_accuracy(accuracy, equal) == pytest.approx(
        local_accuracy(accuracy), abs=1e-12
    )


def test_empty_test_sets_have_no_influence() -> None:
    sizes = torch.tensor([10, 0, 30])
    # (.9 * 10 + .8 * 30) / 40
    assert pooled_local_accuracy(ACCURACY, sizes) == pytest.approx(0.825, abs=1e-12)


def test_sums_are_computed_in_float64() -> None:
    # The exact value of float16 .3 is 0.300048828125; a float16 mean of 3000 of them would be off.
    accuracy = torch.full((1, 3000), 0.3, dtype=torch.float16)
    assert local_accuracy(accuracy) == pytest.approx(0.300048828125, abs=1e-12)
    assert global_accuracy(accuracy, torch.arange(3000)) == pytest.approx(0.300048828125, abs=1e-12)


def test_the_summary_has_the_mean_of_the_last_rounds_and_the_best_round() -> None:
    history = [0.1, 0.9, 0.4, 0.9, 0.6, 0.5]
    summary = last_and_best(history, last=3)
    assert isinstance(summary, Summary)
    assert summary.last_mean == pytest.approx((0.9 + 0.6 + 0.5) / 3, abs=1e-12)
    assert summary.best == 0.9
    assert summary.best_round == 1, "the first of equally good rounds"
    assert last_and_best(history, last=6).last_mean == pytest.approx(3.4 / 6, abs=1e-12)
    assert last_and_best(history, last=1) == (0.5, 0.9, 1)


LOCAL: list[Callable[[Tensor], float]] = [
    local_accuracy,
    worst_local_accuracy,
    lambda accuracy: pooled_local_accuracy(accuracy, SIZES),
]
GLOBAL: list[Callable[[Tensor], object]] = [
    lambda accuracy: global_accuracy(accuracy, SIZES),
    client_spread,
]


@pytest.mark.bad_input
@pytest.mark.parametrize("reduce", LOCAL + GLOBAL)
@pytest.mark.parametrize(
    ("accuracy", "error", "message"),
    [
        (torch.tensor([[0.5, 1.25, 0.5]]), ValueError, r"`accuracy` must lie in \[0, 1\]; got"),
        (torch.tensor([[0.5, -0.5, 0.5]]), ValueError, r"`accuracy` must lie in \[0, 1\]; got"),
        (torch.tensor([[0.5, float("nan"), 0.5]]), ValueError, r"`accuracy` must lie in \[0,"),
        (torch.tensor([0.5, 0.5, 0.5]), ValueError, r"`accuracy` must have shape \(clients,"),
        (torch.zeros(0, 3), ValueError, r"`accuracy` must have shape \(clients, tests\).*; got"),
        (torch.tensor([[1, 0, 1]]), TypeError, "`accuracy` must be a floating-point tensor.*;"),
        ([[0.5, 0.5, 0.5]], TypeError, "`accuracy` must be a floating-point tensor.*; got .*list"),
    ],
)
def test_a_bad_accuracy_is_named(
    reduce: Callable, accuracy: object, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        reduce(accuracy)


@pytest.mark.bad_input
@pytest.mark.parametrize("reduce", LOCAL)
@pytest.mark.parametrize("clients", [2, 4])
def test_own_test_sets_need_as_many_rows_as_columns(
    reduce: Callable[[Tensor], float], clients: int
) -> None:
    with pytest.raises(
        ValueError,
        match=rf"`accuracy` must have as many rows as test sets, or one.*; got \({clients}, 3\)",
    ):
        reduce(torch.full((clients, 3), 0.5))


@pytest.mark.bad_input
@pytest.mark.parametrize("reduce", [global_accuracy, client_spread, pooled_local_accuracy])
@pytest.mark.parametrize(
    ("num_examples", "error", "message"),
    [
        (torch.tensor([1, 2]), ValueError, r"`num_examples` must have shape \(3,\).*; got \(2,\)"),
        (torch.tensor([[1, 2, 3]]), ValueError, r"`num_examples` must have shape \(3,\).*; got"),
        (torch.tensor([1, -2, 3]), ValueError, "`num_examples` must be finite, at least 0 and"),
        (torch.tensor([0, 0, 0]), ValueError, "`num_examples` must be finite, at least 0 and"),
        (torch.tensor([1, float("inf"), 1]), ValueError, "`num_examples` must be finite, .*;"),
        (torch.tensor([1, float("nan"), 1]), ValueError, "`num_examples` must be finite, .*;"),
        (torch.tensor([True, True, False]), TypeError, "`num_examples` must be a tensor of real"),
        (torch.tensor([1j, 1, 1]), TypeError, "`num_examples` must be a tensor of real numbers;"),
        ([1, 2, 3], TypeError, "`num_examples` must be a tensor of real numbers; got a list of"),
    ],
)
def test_bad_sizes_are_named(
    reduce: Callable, num_examples: object, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        reduce(ACCURACY, num_examples)


@pytest.mark.bad_input
def test_pooled_accuracy_needs_sizes() -> None:
    with pytest.raises(
        TypeError, match="`num_examples` must be a tensor of real numbers; got None"
    ):
        pooled_local_accuracy(ACCURACY, None)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("history", "last", "error", "message"),
    [
        ([0.5, 0.6], 3, ValueError, "`last` must be at most 2, the number of rounds; got 3"),
        ([], 1, ValueError, "`last` must be at most 0, the number of rounds; got 1"),
        ([0.5], 0, ValueError, "`last` must be at least 1; got 0"),
        ([0.5], 1.0, TypeError, "`last` must be an integer; got 1.0"),
        ([0.5, float("nan")], 1, ValueError, r"`history\[1\]` must be finite; got nan"),
        ([0.5, "best"], 1, TypeError, r"`history\[1\]` must be a number; got 'best'"),
        ([None], 1, TypeError, r"`history\[0\]` must be a number; got None"),
        (5, 1, TypeError, r"`history` must be a sequence of numbers; got 5 \(int\)"),
        ({0: 1.0}, 1, TypeError, r"`history` must be a sequence of numbers; got a dict of"),
        ("0.5", 1, TypeError, r"`history` must be a sequence of numbers; got '0.5' \(str\)"),
        (torch.tensor([0.5]), 1, TypeError, "`history` must be a sequence of numbers; got a"),
    ],
)
def test_last_and_best_names_a_bad_argument(
    history: list, last: object, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        last_and_best(history, last=last)


# Negative effect.


def test_negative_effect_is_the_largest_rise_over_the_lowest_loss_before(generator):
    losses = torch.rand(12, 5, generator=generator, dtype=torch.float64)
    losses[:, 2] = torch.linspace(1, 0, 12)  # never rises
    effect = negative_effect(losses)
    expected = [
        max(
            0.0,
            *(
                later[k] - earlier[k]
                for t, later in enumerate(losses.tolist())
                for earlier in losses.tolist()[:t]
            ),
        )
        for k in range(5)
    ]
    assert effect.clients.tolist() == pytest.approx(expected)
    assert effect.clients[2] == 0 < effect.clients[0]
    assert effect.average == pytest.approx(sum(expected) / 5)
    assert effect.highest == max(expected)


def test_negative_effect_by_hand():
    # The loss rises by 1 from 2, falls to 1 and rises by 3. The larger rise counts. An earlier
    # maximum above a later minimum does not.
    assert negative_effect(
        torch.tensor([[9.0], [2.0], [3.0], [1.0], [4.0], [0.0]])
    ).clients.tolist() == [3.0]
    assert negative_effect(torch.tensor([[2.0]])) == (torch.zeros(1, dtype=torch.float64), 0.0, 0.0)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("losses", "error", "message"),
    [
        ([1.0], TypeError, r"`losses` must be a floating-point tensor of shape \(rounds,"),
        (torch.ones(2, 2, dtype=torch.int64), TypeError, "`losses` must be a floating-point"),
        (torch.ones(3), ValueError, r"`losses` must have shape \(rounds, clients\) without an"),
        (torch.ones(0, 3), ValueError, r"got \(0, 3\)"),
        (torch.tensor([[1.0], [torch.nan]]), ValueError, "`losses` must be finite; got 1"),
    ],
)
def test_negative_effect_names_a_bad_argument(losses, error, message):
    with pytest.raises(error, match=message):
        negative_effect(losses)
