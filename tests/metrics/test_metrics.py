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
from refusals import number, refused_and_taken

Counts = tuple[list[list[int]], list[int]]

# Three clients on three test sets of 10, 20 and 50 samples.
ACCURACY = torch.tensor([[0.9, 0.5, 0.1], [0.2, 0.7, 0.4], [0.3, 0.6, 0.8]], dtype=torch.float64)
SIZES = torch.tensor([10, 20, 50])


def about(expected: object) -> object:
    return pytest.approx(expected, abs=1e-12)


@st.composite
def correct_counts(draw: st.DrawFn, *, square: bool) -> Counts:
    """Draw numbers of correct predictions (clients, tests) and sizes of the test sets."""
    sizes = draw(st.lists(st.integers(1, 50), min_size=1, max_size=5))
    rows = len(sizes) if square else draw(st.integers(1, 5))
    return [[draw(st.integers(0, size)) for size in sizes] for _ in range(rows)], sizes


def as_tensors(counts: Counts) -> tuple[Tensor, Tensor]:
    correct, sizes = counts
    return torch.tensor(correct, dtype=torch.float64) / torch.tensor(sizes), torch.tensor(sizes)


@settings(max_examples=50, deadline=None)
@given(correct_counts(square=False))
def test_global_accuracy_and_spread_are_fractions_of_all_samples(counts: Counts) -> None:
    correct, sizes = counts
    each = [Fraction(sum(row), sum(sizes)) for row in correct]
    average = float(sum(each) / len(each))
    assert global_accuracy(*as_tensors(counts)) == about(average)
    expected = float(min(each)), average, float(max(each))
    assert client_spread(*as_tensors(counts)) == about(expected)
    accuracy = as_tensors(counts)[0]
    rows = accuracy.mean(1)  # without sizes, test sets count equally
    assert client_spread(accuracy) == about(
        tuple(map(float, (rows.min(), rows.mean(), rows.max())))
    )
    assert global_accuracy(accuracy) == about(rows.mean().item())


@settings(max_examples=50, deadline=None)
@given(correct_counts(square=True))
def test_local_accuracies_are_fractions_of_own_samples(counts: Counts) -> None:
    correct, sizes = counts
    accuracy, num_examples = as_tensors(counts)
    own = [Fraction(correct[client][client], size) for client, size in enumerate(sizes)]
    if len(sizes) > 1:
        assert local_accuracy(accuracy) == about(float(sum(own) / len(own)))
    pooled = Fraction(sum(correct[client][client] for client in range(len(sizes))), sum(sizes))
    assert pooled_local_accuracy(accuracy, num_examples) == about(float(pooled))
    assert worst_local_accuracy(accuracy) == about(float(min(own)))
    equal = torch.full_like(num_examples, 7)
    assert pooled_local_accuracy(accuracy, equal) == about(local_accuracy(accuracy))


def test_empty_test_sets_have_no_influence() -> None:
    # (.9 * 10 + .8 * 30) / 40
    assert pooled_local_accuracy(ACCURACY, torch.tensor([10, 0, 30])) == about(0.825)


def test_sums_are_computed_in_float64() -> None:
    # The exact value of float16 .3 is 0.300048828125; a float16 mean of 3000 of them would be off.
    accuracy = torch.full((1, 3000), 0.3, dtype=torch.float16)
    assert local_accuracy(accuracy) == about(0.300048828125)
    assert global_accuracy(accuracy, torch.arange(3000)) == about(0.300048828125)


def test_the_summary_has_the_mean_of_the_last_rounds_and_the_first_best_round() -> None:
    history = [0.1, 0.9, 0.4, 0.9, 0.6, 0.5]
    summary = last_and_best(history, last=3)
    assert isinstance(summary, Summary)
    assert summary == (about((0.9 + 0.6 + 0.5) / 3), 0.9, 1)
    assert (summary.best, summary.best_round) == (0.9, 1)
    assert last_and_best(history, last=6).last_mean == about(3.4 / 6)


@pytest.mark.bad_input  # against the annotations, but right
def test_the_sum_of_narrow_numbers_does_not_overflow() -> None:
    narrow = np.full(2, 40000, dtype=np.uint16)
    assert last_and_best(narrow, last=np.uint8(2)) == (40000, 40000, 0)


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
    one = torch.tensor([[2.0]])
    assert negative_effect(one) == (torch.zeros(1, dtype=torch.float64), 0.0, 0.0)


ROWS = [ACCURACY.long(), [[0.5]], ACCURACY[0], ACCURACY[:0], ACCURACY + 0.2, ACCURACY - 0.2]
OWN = [*ROWS, ACCURACY[:2]], [ACCURACY, ACCURACY[:1], ACCURACY.round()]
EACH = ROWS, [ACCURACY, ACCURACY[:2], ACCURACY.round()]
WRONG_SIZES = [SIZES[:2], SIZES[None], -SIZES, 0 * SIZES, SIZES > 10, SIZES * 1j, [1, 2, 3]]
OF, COUNTED = {"accuracy": ACCURACY, "num_examples": SIZES}, [SIZES, SIZES.double(), 0 * SIZES + 1]
HISTORY = [5, "0.5", ACCURACY[0], [0.5, torch.nan], [0.5, "best"]], [[0.5], (1, 2.0)]
test_a_wrong_argument_is_refused_by_its_name_and_its_edge_is_taken = refused_and_taken([
    (local_accuracy, {}, {"accuracy": OWN}),
    (worst_local_accuracy, {}, {"accuracy": OWN}),
    (pooled_local_accuracy, OF, {"accuracy": OWN, "num_examples": ([*WRONG_SIZES, None], COUNTED)}),
    (global_accuracy, OF, {"accuracy": EACH, "num_examples": (WRONG_SIZES, [None, *COUNTED])}),
    (client_spread, OF, {"accuracy": EACH, "num_examples": (WRONG_SIZES, [None, *COUNTED])}),
    (last_and_best, {"history": [0.5, 0.6], "last": 1}, {"history": HISTORY, "last": number(1, 2)}),
    (negative_effect, {}, {"losses": (
        [*ROWS[:4], ACCURACY / 0], [ACCURACY, -ACCURACY])}),
])  # fmt: skip
