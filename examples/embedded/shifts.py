"""Who holds what: clients that hold a few classes each (label shift), or images of one visual domain each (feature shift)."""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

import fedprompt as fp
from embedded import data
from embedded.tasks import Split, load_task

DOMAINS = ("inverted", "inverted_rotated", "noisy", "raw", "rotated")


class Side(NamedTuple):
    """Images to learn from or to test on: `split` yields them with their numbers, by which all else is looked up.

    `truth` are the groups that a selection should find, classes or domains; `shards` are the numbers that each client holds; `queries` are
    the features of the unprompted backbone, once that is known.
    """

    split: Split
    labels: Tensor
    truth: Tensor
    shards: list[np.ndarray]
    queries: Tensor = torch.empty(0)


class Federation(NamedTuple):
    """What clients learn from, and what each is tested on: the same classes in the same shares, or the same domain."""

    num_classes: int
    train: Side
    test: Side


class Numbered(Dataset[tuple[Tensor, int]]):
    """The images of a labelled data set, each with its number."""

    def __init__(self, labelled: Dataset[tuple[Tensor, Any]]) -> None:
        self.labelled = labelled

    def __len__(self) -> int:
        return len(self.labelled)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        return self.labelled[number][0], number


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
    """Give each client a few classes, and every class to equally many clients, in the same shares on both sides."""
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
        _side(images, labels, labels, fp.data.allocate(labels, shares, generator=generator))
        for images, labels in parts
    ]
    return Federation(task.num_classes, *sides)


def feature_shift(*, seed: int, num_clients: int, validate: bool) -> Federation:
    """Give each client digits as one of five domains shows them; each domain has as many clients as the others, or one more."""
    digits = data.digits(seed, domain=data.raw)
    parts = [(digits.train_images, digits.train_labels), (digits.test_images, digits.test_labels)]
    if validate:
        parts = list(zip(*(tensor.split([900, 300]) for tensor in parts[0]), strict=True))
    noise = fp.stream_generator(seed, server_round=0, purpose="noise")
    domains = [
        partial(data.noisy, generator=noise) if name == "noisy" else getattr(data, name)
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
