"""Figures of the accuracy matrix, against double loops over exact fractions."""

from fractions import Fraction
from itertools import combinations

import numpy as np
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
from refusals import refused

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


@pytest.mark.bad_input  # against the annotations, but right
def test_the_sum_of_narrow_numbers_does_not_overflow() -> None:
    narrow = np.full(2, 40000, dtype=np.uint16)
    assert last_and_best(narrow, last=np.uint8(2)) == (40000, 40000, 0)


# Negative effect.


def test_negative_effect_is_the_largest_rise_over_the_lowest_loss_before(generator):
    losses = torch.rand(12, 5, generator=generator, dtype=torch.float64)
    losses[:, 2] = torch.linspace(1, 0, 12)  # never rises
    effect = negative_effect(losses)
    pairs = [(earlier, later) for earlier, later in combinations(losses.tolist(), 2)]
    expected = [max(0.0, *(later[k] - earlier[k] for earlier, later in pairs)) for k in range(5)]
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


ROW = torch.full((1, 3), 0.5)
test_wrong_calls_are_refused_by_name = refused(globals())("""
local_accuracy(torch.tensor([[0.5, 1.25, 0.5]])) -> ValueError: `accuracy` must lie in [0, 1]; got
client_spread(torch.tensor([[0.5, -0.5, 0.5]])) -> ValueError: `accuracy` must lie in [0, 1]; got
worst_local_accuracy(ROW[0]) -> ValueError: `accuracy` must have shape (clients,
global_accuracy(ROW[:0]) -> ValueError: `accuracy` must have shape (clients, tests)
local_accuracy(ROW.long()) -> TypeError: `accuracy` must be a floating-point tensor
client_spread([[0.5, 0.5, 0.5]]) -> TypeError: `accuracy` must be a floating-point tensor
local_accuracy(ROW.expand(2, 3)) -> ValueError: `accuracy` must have as many rows as test sets, or
global_accuracy(ACCURACY, SIZES[:2]) -> ValueError: `num_examples` must have shape (3,)
client_spread(ACCURACY, SIZES[None]) -> ValueError: `num_examples` must have shape (3,)
pooled_local_accuracy(ACCURACY, -SIZES) -> ValueError: `num_examples` must be finite and at least
global_accuracy(ACCURACY, 0 * SIZES) -> ValueError: `num_examples` must count at least one sample;
global_accuracy(ACCURACY, SIZES > 10) -> TypeError: `num_examples` must be a tensor of real
client_spread(ACCURACY, SIZES * 1j) -> TypeError: `num_examples` must be a tensor of real numbers
global_accuracy(ACCURACY, [1, 2, 3]) -> TypeError: `num_examples` must be a tensor of real numbers
pooled_local_accuracy(ACCURACY, None) -> TypeError: `num_examples` must be a tensor of real numbers
last_and_best([0.5, 0.6], last=3) -> ValueError: `last` must be at most 2, the number of rounds; got
last_and_best([0.5], last=0) -> ValueError: `last` must be at least 1; got 0
last_and_best([0.5], last=1.0) -> TypeError: `last` must be an integer; got 1.0
last_and_best([0.5, torch.nan], last=1) -> ValueError: `history[1]` must be finite; got nan
last_and_best([0.5, 'best'], last=1) -> TypeError: `history[1]` must be a number; got 'best'
last_and_best(5, last=1) -> TypeError: `history` must be a sequence of numbers; got 5 (int)
last_and_best('0.5', last=1) -> TypeError: `history` must be a sequence of numbers; got '0.5' (str)
last_and_best(ROW[0], last=1) -> TypeError: `history` must be a sequence of numbers; got a
negative_effect(torch.ones(2, 2).long()) -> TypeError: `losses` must be a floating-point
negative_effect(torch.ones(3)) -> ValueError: `losses` must have shape (rounds, clients) without an
negative_effect(torch.ones(0, 3)) -> ValueError: got (0, 3)
negative_effect(ROW / 0) -> ValueError: `losses` must be finite; got 3
""")
