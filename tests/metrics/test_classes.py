"""Accuracy of classes and means over them, against scikit-learn, statistics and loops."""

import statistics
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import balanced_accuracy_score, f1_score
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from fedprompt import metrics
from fedprompt.data import base_new_split
from fedprompt.metrics import (
    balanced_accuracy,
    class_accuracy,
    contingency_table,
    harmonic_mean,
    macro_f1,
)
from refusals import refused

# Harmonic mean.


@settings(deadline=None)
@given(st.lists(st.floats(0, 100), min_size=1, max_size=6))
def test_the_harmonic_mean_against_the_standard_library(accuracies: list[float]) -> None:
    expected = statistics.harmonic_mean(accuracies)
    assert harmonic_mean(*accuracies) == pytest.approx(expected, rel=1e-12, abs=1e-300)


def test_the_harmonic_mean_of_cocoop() -> None:
    """Averages over 11 data sets in Table 1 of the paper: base, new and their harmonic mean."""
    for base, new, both in ((69.34, 74.22, 71.70), (82.69, 63.22, 71.66), (80.47, 71.69, 75.83)):
        assert round(harmonic_mean(base, new), 2) == both


def test_an_accuracy_of_0_gives_0() -> None:
    assert harmonic_mean(0.9, 0.0, 0.8) == 0.0
    assert harmonic_mean(0) == 0.0


# Accuracy of each class.


def drawn(seed: int, samples: int, num_classes: int) -> tuple[Tensor, Tensor]:
    """Draw labels of some classes, and logits that prefer the label."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(max(1, num_classes - 1), (samples,), generator=generator)
    logits = torch.randn(samples, num_classes, generator=generator)
    logits[torch.arange(samples), labels] += 1
    return logits, labels


def by_hand(logits: Tensor, labels: Tensor, num_classes: int) -> tuple[list[float], list[int]]:
    """Count, one sample after the other."""
    correct, total = [0] * num_classes, [0] * num_classes
    for row, label in zip(logits.tolist(), labels.tolist(), strict=True):
        total[label] += 1
        correct[label] += row.index(max(row)) == label
    return [hits / max(1, size) for hits, size in zip(correct, total, strict=True)], total


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 2**32), batch_size=st.integers(1, 30))
def test_every_sample_is_counted_in_its_class(seed, batch_size) -> None:
    logits, labels = drawn(seed, 29, 6)
    batches = DataLoader(TensorDataset(logits, labels), batch_size)
    accuracy, total = class_accuracy(lambda batch: batch, batches, num_classes=6)
    expected = by_hand(logits, labels, 6)
    torch.testing.assert_close(
        accuracy, torch.tensor(expected[0], dtype=torch.float64), rtol=0, atol=1e-15
    )
    assert total.tolist() == expected[1]


def test_base_and_new_accuracy_follow_from_one_entry() -> None:
    logits, labels = drawn(3, 40, 5)
    accuracy, total = class_accuracy(lambda batch: batch, [(logits, labels)], num_classes=5)
    hit = logits.argmax(1) == labels
    for half in base_new_split(5):
        expected = hit[torch.isin(labels, torch.from_numpy(half))].double().mean()
        own = accuracy[half] @ total[half] / total[half].sum()
        torch.testing.assert_close(own, expected, rtol=0, atol=1e-12)


def test_a_sample_with_nan_logits_is_an_error() -> None:
    """``argmax`` returns the place of NaN, so a diverged model would recognize some class."""
    logits = torch.tensor([[torch.nan, 0.0], [0.0, -torch.inf]])
    entry = class_accuracy(lambda batch: batch, [(logits, torch.zeros(2).long())], num_classes=2)
    assert entry.value.tolist() == [0.5, 0.0]


def test_no_graph_is_built_and_any_input_is_passed_on() -> None:
    weight = torch.ones(2, requires_grad=True)
    batches = [({"pixels": torch.eye(2)}, torch.tensor([0, 1], dtype=torch.uint8))]
    entry = class_accuracy(lambda batch: batch["pixels"] * weight, batches, num_classes=2)
    assert not entry.value.requires_grad
    assert entry.value.tolist() == [1.0, 1.0]


def test_without_batches_all_classes_are_unknown() -> None:
    entry = class_accuracy(lambda batch: batch, [], num_classes=2)
    assert entry.value.tolist() == entry.weight.tolist() == [0.0, 0.0]


# Means over classes, from a table.


def tables(seed: int, samples: int, num_classes: int) -> tuple[Tensor, Tensor, Tensor]:
    logits, labels = drawn(seed, samples, num_classes)
    predicted = logits.argmax(1)
    return contingency_table(predicted, labels, num_classes, num_classes), predicted, labels


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32), samples=st.integers(1, 40), num_classes=st.integers(1, 7))
def test_means_over_classes_against_scikit_learn(seed, samples, num_classes) -> None:
    table, predicted, labels = tables(seed, samples, num_classes)
    with warnings.catch_warnings():  # scikit-learn warns of predicted classes without samples
        warnings.simplefilter("ignore")
        balanced = balanced_accuracy_score(labels.numpy(), predicted.numpy())
        f1 = f1_score(labels.numpy(), predicted.numpy(), average="macro")
    assert balanced_accuracy(table) == pytest.approx(balanced, abs=1e-12)
    assert macro_f1(table) == pytest.approx(f1, abs=1e-12)


def test_means_over_classes_by_hand() -> None:
    # Rows are predictions. Recalls 3/4, 1/2 and 0/2; F1 2*3/(4+4), 2*1/(2+4), 0; class 3 is absent.
    table = torch.tensor([[3, 1, 0, 0], [1, 1, 2, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    assert balanced_accuracy(table) == pytest.approx((3 / 4 + 1 / 2 + 0) / 3, abs=1e-12)
    assert macro_f1(table) == pytest.approx((6 / 8 + 2 / 6 + 0) / 3, abs=1e-12)
    assert balanced_accuracy(table.T) != pytest.approx(balanced_accuracy(table), abs=1e-3)


def test_the_balanced_accuracy_is_the_plain_mean_of_class_accuracies() -> None:
    table, _, labels = tables(11, 60, 5)
    logits, _ = drawn(11, 60, 5)
    accuracy, total = class_accuracy(lambda batch: batch, [(logits, labels)], num_classes=5)
    assert balanced_accuracy(table) == pytest.approx(accuracy[total > 0].mean().item(), abs=1e-12)


def test_the_success_of_an_attack_counts_the_samples_of_other_classes() -> None:
    table, predicted, labels = tables(12, 60, 5)
    for target in range(5):
        others = [int(p) for p, c in zip(predicted, labels, strict=True) if c != target]
        expected = others.count(target) / len(others)
        assert metrics.attack_success(table, target=target) == pytest.approx(expected, abs=1e-12)


def test_balanced_weights_give_the_balanced_accuracy_of_each_client() -> None:
    """Against scikit-learn on own tests, which may overlap, and by hand for shares of classes."""
    draw = torch.Generator().manual_seed(3)
    labels, said = torch.randint(4, (2, 40), generator=draw)
    own = torch.rand(3, 40, generator=draw) < torch.tensor([[0.2], [0.5], [1.0]])
    own[0, labels == 2] = False
    found = (metrics.balanced_weights(own.long(), labels) * (said == labels)).sum(-1)
    for client, mask in enumerate(own):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of predicted classes without samples
            expected = balanced_accuracy_score(labels[mask], said[mask])
        assert found[client].item() == pytest.approx(expected, abs=1e-12)
    shares = torch.tensor([[3.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    found = metrics.balanced_weights(shares, torch.tensor([7, 7, 1]))
    assert found.tolist() == [[0.75, 0.25, 0.0], [0.0, 0.0, 0.0]]


def test_the_constant_is_the_most_frequent_training_class() -> None:
    """A tie, a client without images, and the counts of all clients."""
    counts, labels = torch.tensor([[1, 4, 4], [5, 0, 1], [0, 0, 0]]), torch.tensor([2, 0, 1, 0])
    third = [1 / 3] * 4
    expected = [[0, 0, 1, 0], [0, 1, 0, 1], third]
    assert metrics.most_frequent_class(counts, labels).tolist() == expected
    assert metrics.most_frequent_class(counts.sum(0), labels).tolist() == [0, 1, 0, 1]


PAIR = (torch.eye(2), torch.tensor([0, 1]))
FAR = (torch.eye(2), torch.tensor([0, 2]))
LABEL = torch.tensor([0])
LABELS = torch.tensor([0, 1])


def measured(*batches, predict=lambda batch: batch, num_classes=2):
    return class_accuracy(predict, batches, num_classes=num_classes)


test_wrong_calls_are_refused_by_name = refused(globals())("""
harmonic_mean() -> ValueError: `accuracies` must contain at least one number; got none.
harmonic_mean(0.5, -0.1) -> ValueError: `accuracies[1]` must be at least 0; got -0.1.
harmonic_mean(torch.nan) -> ValueError: `accuracies[0]` must be finite; got nan.
harmonic_mean([0.5, 0.6]) -> TypeError: `accuracies[0]` must be a number; got a list of length 2.
measured(PAIR, predict=lambda batch: batch.argmax(1)) -> TypeError: `predict` must return
measured(PAIR, predict=None) -> TypeError: `predict` must be a function; got None (NoneType).
class_accuracy(len, 3, num_classes=2) -> TypeError: `batches` must be
measured(PAIR, num_classes=3) -> ValueError: `predict(inputs)` must have shape (2, 3); got (2, 2)
measured(PAIR, FAR) -> ValueError: `batches[1][1]` must lie in [0, 2); got values from 0 to 2.
measured((torch.eye(2), torch.zeros(2))) -> TypeError: `batches[0][1]`
measured(torch.eye(2)) -> TypeError: `batches[0]` must be a pair
measured(num_classes=0) -> ValueError: `num_classes` must be at least 1; got 0.
contingency_table(LABEL, LABEL, 0, 1) -> ValueError: `num_groups` must be at least 1; got 0.
contingency_table(LABEL, LABEL, 1, 0) -> ValueError: `num_classes` must be at least 1; got 0.
balanced_accuracy(torch.ones(2, 3)) -> ValueError: `table` must have a row and a column for each
macro_f1(torch.ones(3)) -> ValueError: `table` must have shape (predicted, classes) without an
balanced_accuracy(torch.zeros(2, 2)) -> ValueError: `table` must count at least one sample; got none
macro_f1(torch.zeros(0, 0)) -> ValueError: `table` must have shape (predicted, classes) without an
balanced_accuracy(-torch.eye(2)) -> ValueError: `table` must be finite and at least 0; got -1.0.
balanced_accuracy(torch.eye(2).bool()) -> TypeError: `table` must be a tensor of real numbers
macro_f1(torch.eye(2).to_sparse()) -> TypeError: `table` must be a dense tensor
metrics.attack_success(torch.eye(2), target=2) -> ValueError: `target` must lie in [0, 2); got 2.
metrics.attack_success(torch.eye(2), target=-1) -> ValueError: `target` must be at least 0; got -1.
metrics.attack_success(torch.tensor([[3.0, 0.0], [0.0, 0.0]]), target=0) -> ValueError: `table` must
metrics.balanced_weights(-torch.eye(2), LABELS) -> ValueError: `weights` must be finite and at least
metrics.balanced_weights(torch.eye(2), LABEL) -> ValueError: `labels` must have one entry for each
metrics.balanced_weights(torch.eye(2), LABELS - 1) -> ValueError: `labels` must lie in [0,
metrics.most_frequent_class(-torch.eye(2), LABELS) -> ValueError: `counts` must be finite and at
metrics.most_frequent_class(torch.eye(1), LABELS) -> ValueError: `labels` must lie in [0, 1); got
macro_f1([[1]]) -> TypeError: `table` must be a tensor of real numbers (predicted, classes); got a
""")
