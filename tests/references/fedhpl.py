"""FedHPL, Eqs. 1-10 and 36 and App. C.4, as slow loops over clients, samples and classes.

Ma et al., "FedHPL: Efficient Heterogeneous Federated Learning with Prompt Tuning and Logit
Distillation", 2024. Written from the paper. Here Eq. 8 is a sum over single logits, and not a mean
of class means. So it is independent of code that uploads class means. The forward pass, the loss,
the servers and SGD share no code with the library.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

from references.vpt import prompted_vit

Values = Mapping[str, Tensor]


class Client(NamedTuple):
    """Logits and labels of one client after local training."""

    dim: int  # width of its features before the head
    logits: list[Tensor]  # one row for each local sample
    labels: list[int]


class Axes(NamedTuple):
    """Everything that the paper varies, with its values."""

    rate: float = 0.01
    gamma: float = 1.0
    temperature: float = 4.5
    smoothing: float = 1.0
    uniform: bool = False
    keep_all: bool = False
    deep: bool = True
    share: tuple[str, ...] = ()


def similarity(dim: int, other: int) -> float:
    """Return the similarity of two feature widths (Eq. 7)."""
    return dim / other if dim <= other else other / dim


def is_correct(logits: Tensor, label: int) -> bool:
    """Return whether the logit of the label is the largest."""
    return all(logits[label] > logit for column, logit in enumerate(logits) if column != label)


def sent(client: Client, label: int, *, keep_all: bool = False) -> list[Tensor]:
    """Return the single logits of a class that a client sends (Sec. 3.3, client uploading)."""
    return [
        logits
        for logits, own in zip(client.logits, client.labels, strict=True)
        if own == label and (keep_all or is_correct(logits, label))
    ]


def teacher(clients: list[Client], dim: int, num_classes: int, axes: Axes) -> tuple[Tensor, Tensor]:
    """Return the teacher of width `dim` (Eq. 8), and the sum of the similarities for each row."""
    rows = torch.zeros(num_classes, num_classes, dtype=torch.float64)
    evidence = torch.zeros(num_classes, dtype=torch.float64)
    for label in range(num_classes):
        for client in clients:
            beta = 1.0 if axes.uniform else similarity(dim, client.dim)
            for logits in sent(client, label, keep_all=axes.keep_all):
                rows[label] += beta * logits
                evidence[label] += beta
        if evidence[label]:
            rows[label] /= axes.smoothing + evidence[label]
    return rows, evidence


def log_softmax(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Return log-probabilities at a temperature."""
    scaled = (logits - logits.max()) / temperature
    return scaled - sum(math.e**entry for entry in scaled).log()


def distillation_loss(
    logits: Iterable[Tensor], labels: list[int], rows: Tensor, evidence: Tensor, temperature: float
) -> Tensor:
    """Return the mean over samples of KL(teacher || student) (Eq. 9).

    For a class without evidence, the teacher is the sample itself (App. C.4).
    """
    total = torch.zeros(()).double()
    for student, label in zip(logits, labels, strict=True):
        p = log_softmax(rows[label] if evidence[label] > 0 else student.detach(), temperature)
        total = total + (p.exp() * (p - log_softmax(student, temperature))).sum()
    return total / len(labels)


def forward(vit: nn.Module, values: Values, images: Tensor, axes: Axes) -> Tensor:
    """Return logits of the class token after the last norm (Eqs. 3 to 6)."""
    prompts = dict(enumerate(values["prompts.tokens"]))
    pooled, _ = prompted_vit(vit, images, [(prompts, axes.deep)])
    return pooled @ values["head.weight"].T + values["head.bias"]


def train(
    vit: nn.Module, values: Values, batches: Iterable[tuple[Tensor, Tensor]], known, axes: Axes
) -> dict[str, Tensor]:
    """Descend Eq. 2 by SGD with momentum 0.9 and weight decay 1e-4 (Alg. 1, LocalTrain)."""
    speed: dict[str, Tensor] = {}
    for images, labels in batches:
        values = {name: value.detach().requires_grad_() for name, value in values.items()}
        logits, classes = forward(vit, values, images, axes), labels.tolist()
        pairs = zip(logits, classes, strict=True)
        loss = -sum(log_softmax(row)[label] for row, label in pairs) / len(classes)
        loss = loss + axes.gamma * distillation_loss(logits, classes, *known, axes.temperature)
        for name, slope in zip(values, torch.autograd.grad(loss, [*values.values()]), strict=True):
            step = slope + 1e-4 * values[name]
            speed[name] = 0.9 * speed[name] + step if name in speed else step
        values = {name: value - axes.rate * speed[name] for name, value in values.items()}
    return {name: value.detach() for name, value in values.items()}


def averaged(models: Mapping[int, Values], sizes: Callable[[int], int], share: tuple[str, ...]):
    """Average the shared parts of clients of one width by numbers of images (+P and +H)."""
    total = sum(map(sizes, models))
    return {
        name: sum(sizes(client) * values[name] for client, values in models.items()) / total
        for name in next(iter(models.values()))
        if name.startswith(share)
    }
