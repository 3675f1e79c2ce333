"""FedHPL, Eqs. 7-10, as slow and simple loops over clients, samples and classes in float64.

Ma et al., "FedHPL: Efficient Heterogeneous Federated Learning with Prompt Tuning and Logit
Distillation", 2024. Written from the paper. Here Eq. 8 is a sum over all correct logits, and not a
mean of class means. So it is independent of code that uploads class means.
"""

import math
from typing import NamedTuple

Row = list[float]


class Client(NamedTuple):
    """Logits and labels of one client after local training."""

    dim: int  # width of its features before the head
    logits: list[Row]  # one row for each local sample
    labels: list[int]


def similarity(dim: int, other: int) -> float:
    """Return the similarity of two feature widths (Eq. 7)."""
    return dim / other if dim <= other else other / dim


def is_correct(logits: Row, label: int) -> bool:
    """Return whether the logit of the label is the largest."""
    return all(logits[label] > logit for column, logit in enumerate(logits) if column != label)


def class_means(client: Client, num_classes: int) -> tuple[list[Row], list[int]]:
    """Return the mean of the correct logits of each class, and their number (Eq. 10)."""
    means, counts = [], []
    for label in range(num_classes):
        total, count = [0.0] * num_classes, 0
        for logits, own_label in zip(client.logits, client.labels, strict=True):
            if own_label == label and is_correct(logits, label):
                count += 1
                for column in range(num_classes):
                    total[column] += logits[column]
        means.append([entry / count if count else 0.0 for entry in total])
        counts.append(count)
    return means, counts


def teacher(
    clients: list[Client], dim: int, num_classes: int, *, smoothing: float = 1.0
) -> tuple[list[Row], Row]:
    """Return the teacher of a client of width `dim`, from all correct logits (Eq. 8).

    The second result has the sum of the similarities for each row.
    """
    rows, evidence = [], []
    for label in range(num_classes):
        numerator, weight = [0.0] * num_classes, 0.0
        for client in clients:
            for logits, own_label in zip(client.logits, client.labels, strict=True):
                if own_label == label and is_correct(logits, label):
                    weight += similarity(dim, client.dim)
                    for column in range(num_classes):
                        numerator[column] += similarity(dim, client.dim) * logits[column]
        rows.append([entry / (smoothing + weight) if weight else 0.0 for entry in numerator])
        evidence.append(weight)
    return rows, evidence


def softmax(logits: Row, temperature: float) -> Row:
    """Return probabilities at a temperature."""
    largest = max(logits)
    exponentials = [math.exp((logit - largest) / temperature) for logit in logits]
    return [entry / math.fsum(exponentials) for entry in exponentials]


def distillation_loss(
    logits: list[Row],
    labels: list[int],
    teacher_rows: list[Row],
    evidence: Row,
    *,
    temperature: float,
) -> float:
    """Return the mean over samples of KL(teacher || student) (Eq. 9).

    For a class without evidence, the teacher is the sample itself (App. C.4).
    """
    total = 0.0
    for student, label in zip(logits, labels, strict=True):
        target = teacher_rows[label] if evidence[label] > 0 else student
        for p, q in zip(softmax(target, temperature), softmax(student, temperature), strict=True):
            total += p * math.log(p / q)
    return total / len(logits)
