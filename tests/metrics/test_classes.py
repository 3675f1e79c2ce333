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
from fedprompt.metrics import (
    balanced_accuracy,
    class_accuracy,
    contingency_table,
    harmonic_mean,
    macro_f1,
)
from refusals import number, refused, refused_and_taken

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
    assert harmonic_mean(0.9, 0.0, 0.8) == harmonic_mean(0) == 0.0


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
LABELS = torch.tensor([0, 1])
TABLE = torch.tensor([[3, 1], [0, 2]])
WRONG_TABLES = [
    *(torch.ones(2, 3), torch.ones(3), torch.zeros(2, 2), torch.zeros(0, 0), -torch.eye(2), [[1]]),
    *(torch.eye(2).bool(), torch.eye(2).to_sparse(), torch.eye(2) / 0),
]
TABLES = WRONG_TABLES, [TABLE, TABLE.double(), torch.ones(1, 1), torch.tensor([[0, 0], [0, 1]])]
WRONG_LABELS = [LABELS - 1, LABELS.double(), LABELS.bool(), LABELS[None], [0, 1]]
BATCHES = [3, [torch.eye(2)], [PAIR, (torch.eye(2), LABELS + 1)], [(torch.eye(2), torch.zeros(2))]]
SAID = [None, lambda batch: batch.argmax(1)]
COUNTS = [-torch.eye(2), torch.eye(2) / 0, torch.eye(2).bool(), [[1]]]
test_a_wrong_argument_is_refused_by_its_name_and_its_edge_is_taken = refused_and_taken([
    (class_accuracy, {"predict": lambda batch: batch, "batches": [PAIR], "num_classes": 2}, {
        "predict": (SAID, [lambda batch: batch.half()]), "num_classes": (number(1)[0], [2]),
        "batches": (BATCHES, [[], [PAIR, PAIR]])}),
    (contingency_table, {
        "indices": LABELS, "labels": LABELS, "num_groups": 2, "num_classes": 2}, {
        "indices": ([*WRONG_LABELS, LABELS + 1], [LABELS, 0 * LABELS]), "num_groups": ([0], [2, 9]),
        "labels": ([*WRONG_LABELS, LABELS + 1, LABELS[:1]], [0 * LABELS + 1]),
        "num_classes": ([0], [2, 9])}),
    (balanced_accuracy, {}, {"table": TABLES}),
    (macro_f1, {}, {"table": TABLES}),
    (metrics.attack_success, {"table": TABLE, "target": 1}, {
        "table": ([*WRONG_TABLES, torch.tensor([[0, 0], [0, 3]])], [TABLE, torch.eye(2)]),
        "target": number(0, 1)}),
    (metrics.balanced_weights, {"weights": torch.eye(2), "labels": LABELS}, {
        "weights": (COUNTS, [torch.eye(2), torch.zeros(2, 2)]),
        "labels": ([*WRONG_LABELS, LABELS[:1]], [LABELS, 9 * LABELS])}),
    (metrics.most_frequent_class, {"counts": torch.eye(2), "labels": LABELS}, {
        "counts": (COUNTS, [torch.eye(2), torch.zeros(2, 2)]),
        "labels": ([*WRONG_LABELS, LABELS + 1], [LABELS, LABELS[:1]])}),
])  # fmt: skip
test_places_of_wrong_numbers_are_named = refused(globals())("""
harmonic_mean() -> ValueError: `accuracies` must contain at least one number; got none.
harmonic_mean(0.5, -0.1) -> ValueError: `accuracies[1]` must be at least 0; got -0.1.
harmonic_mean(nan) -> ValueError: `accuracies[0]` must be finite; got nan.
class_accuracy(len, 3, num_classes=2) -> TypeError: `batches` must be
class_accuracy(lambda _: ones(2, 3), [PAIR], num_classes=2) -> ValueError: `predict(inputs)` must
class_accuracy(lambda _: ones(1, 2), [PAIR], num_classes=2) -> ValueError: `predict(inputs)` must
""")
