"""FedHPL, Eq. 7-10, as loops over clients, samples and classes in float64: slow and obvious.

Ma et al., "FedHPL: Efficient Heterogeneous Federated Learning with Prompt Tuning and Logit Distillation", 2024. Written from the paper.
Nothing here is an average of averages: Eq. 8 runs over every single correct logit, so it can disagree with code that uploads class means.
"""

import math
from typing import NamedTuple

Row = list[float]


class Client(NamedTuple):
    """What one client holds after local training."""

    dim: int  # width of its features before the head
    logits: list[Row]  # one row for each local sample
    labels: list[int]


def similarity(dim: int, other: int) -> float:
    """Eq. 7."""
    return dim / other if dim <= other else other / dim


def is_correct(logits: Row, label: int) -> bool:
    """Whether the largest logit is that of the label."""
    return all(logits[label] > logit for column, logit in enumerate(logits) if column != label)


def class_means(client: Client, num_classes: int) -> tuple[list[Row], list[int]]:
    """Eq. 10: the mean of the correct logits of each class, and how many there are."""
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
    """Eq. 8, over every single correct logit: the rows for a client of width `dim`, and the sum of similarities behind each."""
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
    """Probabilities at a temperature."""
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
    """Eq. 9, the mean over samples of KL(teacher || student); by App. C.4 a class without evidence is taught by the sample's own logits."""
    total = 0.0
    for student, label in zip(logits, labels, strict=True):
        target = teacher_rows[label] if evidence[label] > 0 else student
        for p, q in zip(softmax(target, temperature), softmax(student, temperature), strict=True):
            total += p * math.log(p / q)
    return total / len(logits)
