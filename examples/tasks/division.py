"""Division of the training images of a setting over its clients."""

import math

import numpy as np
import torch
from torch import Tensor

import fedprompt as fp
from tasks.papers import Partition

SMALLEST = 10
"""Smallest number of images of a client under label shift, if the mean is four times as large."""


def divide(
    partition: Partition,
    labels: Tensor,
    domains: Tensor,
    *,
    num_clients: int,
    generator: np.random.Generator,
) -> list[Tensor]:
    """Return the positions of the training images of each client.

    Args:
        partition: Kind of division.
        labels: Class of each training image.
        domains: Domain of each training image.
        num_clients: Number of clients.
        generator: Source of randomness.

    Raises:
        ValueError: If the clients cannot be divided evenly over the domains.
    """
    kept = np.arange(len(labels))
    if partition.shots is not None:
        kept = fp.data.few_shot(labels, shots=partition.shots, generator=generator)
    own, places = labels.numpy()[kept], domains.numpy()[kept]
    if partition.kind == "domains":
        shards = _by_domain(partition.alpha, own, places, num_clients, generator)
    else:
        shards = _by_class(partition, own, num_clients, generator)
    if partition.shots_each is not None:
        size = {"shots": partition.shots_each, "generator": generator}
        shards = [each[fp.data.few_shot(own[each], **size)] for each in shards]
    return [torch.from_numpy(kept[each]) for each in shards]


def _by_class(
    partition: Partition, labels: np.ndarray, count: int, generator: np.random.Generator
) -> list[np.ndarray]:
    drawn = {"num_clients": count, "generator": generator}
    size = len(labels) // count
    match partition.kind:
        case "iid":
            return fp.iid(labels, **drawn)
        case "dirichlet":
            share = math.ceil(partition.min_share * len(labels))
            smallest = max(min(SMALLEST, size // 4), share)
            return fp.dirichlet(labels, alpha=partition.alpha, min_size=smallest, **drawn)
        case "overlapping":
            return fp.dirichlet_overlapping(labels, alpha=partition.alpha, size=size, **drawn)
        case "classes" if partition.disjoint:
            order = generator.permutation(int(labels.max()) + 1)
            owned = np.array_split(order, count)
            return [np.flatnonzero(np.isin(labels, classes)) for classes in owned]
        case "classes":
            return _few_classes(labels, partition.classes, count, generator)
    raise ValueError(f"`partition.kind` must be that of a Partition; got {partition.kind!r}.")


def _few_classes(
    labels: np.ndarray, size: int, count: int, generator: np.random.Generator
) -> list[np.ndarray]:
    """Give each client `size` classes, and each class the same number of clients.

    If the numbers do not fit, as few classes as possible are left out at random.
    """
    total = int(labels.max()) + 1
    used = max(each for each in range(size, total + 1) if size * count % each == 0)
    classes = np.arange(total)
    if used < total:
        classes = np.sort(generator.permutation(total)[:used])
    images = np.flatnonzero(np.isin(labels, classes))
    shards = fp.pathological(
        np.searchsorted(classes, labels[images]),
        count,
        classes_per_client=size,
        min_size=0,
        generator=generator,
    )
    return [images[each] for each in shards]


def _by_domain(
    alpha: float | None,
    labels: np.ndarray,
    domains: np.ndarray,
    count: int,
    generator: np.random.Generator,
) -> list[np.ndarray]:
    """Give each domain the same number of clients, and divide its images over them."""
    owned = fp.by_domain(domains)
    each, rest = divmod(count, len(owned))
    if rest or not each:
        rule = f"be divisible by the {len(owned)} domains"
        raise ValueError(f"`num_clients` must {rule}; got {count}.")
    shards = []
    for images in owned:
        if alpha is None:
            parts = np.array_split(generator.permutation(images), each)
        else:
            parts = [
                images[own]
                for own in fp.dirichlet(
                    labels[images], num_clients=each, alpha=alpha, min_size=1, generator=generator
                )
            ]
        shards += parts
    return shards
