"""Federations with label shift or feature shift.

With label shift, each client has a few classes. With feature shift, each client has images of one
visual domain.
"""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

import fedprompt as fp
from embedded.tasks import Split, load_task
from fedprompt import samples

DOMAINS = ("inverted", "inverted_rotated", "noisy", "raw", "rotated")


class Side(NamedTuple):
    """Training images or test images of a federation.

    `split` yields images with their numbers, which index the other fields. `truth` contains the
    groups that a selection should find, which are classes or domains. `shards` contains the
    numbers of each client's images. `queries` contains the features of the backbone without
    prompts. It is empty until they are computed.
    """

    split: Split
    labels: Tensor
    truth: Tensor
    shards: list[np.ndarray]
    queries: Tensor = torch.empty(0)


class Federation(NamedTuple):
    """Training and test images of all clients.

    The test images of a client have the same class shares or the same domain as its training
    images.
    """

    num_classes: int
    train: Side
    test: Side


class Numbered(Dataset[tuple[Tensor, int]]):
    """Images of a labeled data set, each with its number."""

    def __init__(self, labeled: Dataset[tuple[Tensor, Any]]) -> None:
        self.labeled = labeled

    def __len__(self) -> int:
        return len(self.labeled)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        return self.labeled[number][0], number


def label_shift(
    dataset: str,
    *,
    root: str,
    image_size: int,
    seed: int,
    num_clients: int,
    classes_per_client: int,
    validate: bool,
) -> Federation:
    """Split a data set over clients that have a few classes each.

    Every class is given to the same number of clients. The class shares of a client are the same
    in training and test images.
    """
    task = load_task(dataset, root=root, seed=seed, image_size=image_size)
    parts = [(split.dataset, split.labels) for split in (task.train, task.test)]
    if validate:
        cut = len(task.train.labels) * 3 // 4
        halves = range(cut), range(cut, len(task.train.labels))
        parts = [(Subset(task.train.dataset, half), task.train.labels[half]) for half in halves]
    generator = np.random.default_rng(seed)
    shares = fp.data.pathological_shares(
        num_clients, task.num_classes, classes_per_client=classes_per_client, generator=generator
    )
    sides = [
        _side(
            images,
            labels,
            labels,
            fp.data.allocate(labels, shares, min_size=0, generator=generator),
        )
        for images, labels in parts
    ]
    return Federation(task.num_classes, *sides)


def feature_shift(*, seed: int, num_clients: int, validate: bool) -> Federation:
    """Split the digits over clients that have one of five domains each.

    The numbers of clients of two domains differ by at most one.
    """
    digits = samples.digits(seed, domain=samples.raw)
    parts = [(digits.train_images, digits.train_labels), (digits.test_images, digits.test_labels)]
    if validate:
        parts = list(zip(*(tensor.split([900, 300]) for tensor in parts[0]), strict=True))
    noise = fp.stream_generator(seed, server_round=0, purpose="noise")
    domains = [
        partial(samples.noisy, generator=noise) if name == "noisy" else getattr(samples, name)
        for name in DOMAINS
    ]
    sides = []
    for images, labels in parts:
        truth, images = torch.arange(len(labels)) % len(DOMAINS), images.clone()
        for number, domain in enumerate(domains):
            images[truth == number] = domain(images[truth == number])
        held = [
            np.array_split(part, len(range(number, num_clients, len(DOMAINS))))
            for number, part in enumerate(fp.by_domain(truth))
        ]
        shards = [
            held[client % len(DOMAINS)][client // len(DOMAINS)] for client in range(num_clients)
        ]
        sides.append(_side(TensorDataset(images, labels), labels.numpy(), truth.numpy(), shards))
    return Federation(10, *sides)


def _side(
    images: Dataset[Any], labels: np.ndarray, truth: np.ndarray, shards: list[np.ndarray]
) -> Side:
    return Side(
        Split(Numbered(images), labels), torch.as_tensor(labels), torch.as_tensor(truth), shards
    )
