"""Division of images: over clients, into training and test images, and a part of them."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fedprompt as fp
from fedprompt.data.divisions import held_out
from studies.core import Images
from studies.papers import Partition
from studies.sets.readers import ImageSet

NUM_IMAGES = 40
"""Images of an average client, at least: batch normalization needs two in each batch."""
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
    used = np.arange(len(labels))
    if partition.shots is not None:
        used = fp.data.few_shot(labels, shots=partition.shots, generator=generator)
    classes, places = labels.numpy()[used], domains.numpy()[used]
    if partition.kind == "domains":
        shards = _by_domain(partition, classes, places, num_clients, generator)
    else:
        shards = _by_class(partition, classes, num_clients, generator)
    return [torch.from_numpy(used[shard]) for shard in shards]


def _by_class(
    partition: Partition, labels: np.ndarray, count: int, generator: np.random.Generator
) -> list[np.ndarray]:
    drawn = {"num_clients": count, "generator": generator}
    dirichlet = drawn | {"min_per_class": partition.min_per_class}
    size = len(labels) // count
    match partition.kind:
        case "iid":
            return fp.data.iid(labels, **drawn)
        case "dirichlet":
            alpha = concentration(partition.alpha, labels, count, generator)
            fixed = {"min_size": min(SMALLEST, size // 4), "capped": partition.capped}
            return fp.data.dirichlet(labels, alpha=alpha, **fixed, **dirichlet)
        case "overlapping":
            alpha = concentration(partition.alpha, labels, count, generator)
            return fp.data.dirichlet_overlapping(labels, alpha=alpha, size=size, **dirichlet)
        case "classes" if partition.disjoint:
            return fp.data.disjoint_classes(labels, **drawn)
        case "classes":
            return _few_classes(labels, partition.classes, count, generator)
    raise ValueError(f"`partition.kind` must be that of a Partition; got {partition.kind!r}.")


def concentration(
    alpha: float | str | None, labels: np.ndarray, count: int, generator: np.random.Generator
) -> Any:
    """Return a concentration, or draw some (clients, classes) that sum to 1 over an axis."""
    kinds = len(np.unique(labels))
    if alpha == "classes":
        return generator.dirichlet(np.ones(kinds), size=count)
    if alpha == "clients":
        return generator.dirichlet(np.ones(count), size=kinds).T
    return alpha


def _few_classes(
    labels: np.ndarray, size: int, count: int, generator: np.random.Generator
) -> list[np.ndarray]:
    """Give each client `size` classes, and each class the same number of clients.

    If the numbers do not fit, as few classes as possible are left out at random.
    """
    total = int(labels.max()) + 1
    used = max(number for number in range(size, total + 1) if size * count % number == 0)
    classes = np.arange(total)
    if used < total:
        classes = np.sort(generator.permutation(total)[:used])
    images = np.flatnonzero(np.isin(labels, classes))
    places = np.searchsorted(classes, labels[images])
    drawn = {"classes_per_client": size, "min_size": 0, "generator": generator}
    return [images[shard] for shard in fp.data.pathological(places, count, **drawn)]


def _by_domain(
    partition: Partition,
    labels: np.ndarray,
    domains: np.ndarray,
    count: int,
    generator: np.random.Generator,
) -> list[np.ndarray]:
    """Give each domain the same number of clients, and divide its images over them."""
    owned = fp.data.by_domain(domains)
    clients, rest = divmod(count, len(owned))
    if rest or not clients:
        rule = f"be divisible by the {len(owned)} domains"
        raise ValueError(f"`num_clients` must {rule}; got {count}.")
    drawn = {"alpha": partition.alpha, "min_size": 1, "capped": partition.capped}
    drawn |= {"generator": generator}
    shards = []
    for images in owned:
        if partition.alpha is None:
            shards += np.array_split(generator.permutation(images), clients)
        else:
            parts = fp.data.dirichlet(labels[images], clients, **drawn)
            shards += [images[part] for part in parts]
    return shards


def split_shards(
    shards: Sequence[Tensor], share: float, *, generator: np.random.Generator
) -> tuple[list[Tensor], list[Tensor]]:
    """Split the images of each client, and return those for training and a share for testing.

    Of two images or more, at least one is for testing; a single one is for training.
    """
    owners = np.repeat(np.arange(len(shards)), [len(shard) for shard in shards])
    tested = torch.from_numpy(held_out(owners, share, generator)).split([*map(len, shards)])
    sides = zip(shards, tested, strict=True)
    train, test = zip(*((shard[~part], shard[part]) for shard, part in sides), strict=True)
    return list(train), list(test)


def only_used(images: Images, parts: Sequence[Tensor]) -> tuple[Images, list[Tensor]]:
    """Leave out images that no client has, and return the positions of each client's images."""
    used = torch.cat(list(parts)).unique()
    return images.at(used), [torch.searchsorted(used, part) for part in parts]


def fewer(data: ImageSet, share: float, num_clients: int) -> ImageSet:
    """Return a share of the images of each class, but at least four, and enough for all clients."""
    train, test = _fewer(data.train, share, num_clients), _fewer(data.test, share, 1)
    return data._replace(train=train, test=test)


def _fewer(images: Images, share: float, num_clients: int) -> Images:
    cells = images.cells(int(images.labels.max()) + 1)
    sizes = torch.bincount(cells)
    smallest = max(4, math.ceil(NUM_IMAGES * num_clients / len(images.labels.unique())))
    chosen = [
        torch.nonzero(cells == cell)[: max(smallest, math.ceil(share * size)), 0]
        for cell, size in enumerate(sizes.tolist())
        if size
    ]
    return images.at(torch.cat(chosen).sort().values)
