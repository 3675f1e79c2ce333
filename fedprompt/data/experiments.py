"""Protocols of the field: which images train, which are tests, and how their figures are read.

Each function takes labels, domains or clients of images, and returns positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64, Integer, Shaped
from torch import Tensor

import fedprompt._conversions as convert
import fedprompt._refusals as check
from fedprompt.data.splits import base_new_split, few_shot, group_split, leave_one_out

__all__ = [
    "Classes",
    "base_to_new",
    "class_tests",
    "few_shots",
    "leave_one_domain_out",
    "newcomers",
    "own_tests",
    "transfer",
]

Labels = Integer[np.ndarray, " _"] | Integer[Tensor, " _"] | Sequence[int | np.integer]
Names = Labels | Sequence[str] | Shaped[np.ndarray, " _"]
Indices = Int64[np.ndarray, " _"]
Generator = np.random.Generator | torch.Generator


@dataclass(frozen=True)
class Classes:
    """Images of some classes, which are told apart among these classes only.

    Attributes:
        names: Names of the classes.
        positions: Positions of the images, ascending.
        labels: Their classes, as positions in `names`.

    Example:
        >>> Classes(["cat", "dog"], np.array([0, 3]), np.array([1, 0])).names[1]
        'dog'
    """

    names: Sequence[str]
    positions: Indices
    labels: Int64[np.ndarray, " images"]


def few_shots(
    labels: Labels, *, shots: int, generator: Generator, among: Labels | None = None
) -> Indices:
    """Draw a few training images of each class, before clients divide them (CoOp).

    The number is for all clients together: 16 shots of 100 classes are 1,600 images. Tests keep all
    their images. With disjoint classes of clients (FedOTP), it is the number of a client, too.

    Args:
        labels: Class of each image.
        shots: Number of images of each class. A smaller class has all of its images.
        generator: Source of randomness, with another seed for each run.
        among: Positions of the training images. If None, all images.

    Returns:
        Positions in `labels`, ascending.

    Example:
        >>> labels, train = np.array([0, 1, 0, 1, 0, 0]), np.array([0, 1, 2, 3])
        >>> draw = np.random.default_rng(0)
        >>> few_shots(labels, shots=1, generator=draw, among=train).tolist()
        [1, 2]

    References:
        Zhou et al., "Learning to Prompt for Vision-Language Models" (CoOp), IJCV 2022, Sec. 4.1.
    """
    every = convert.integers("labels", labels)
    kept = np.arange(len(every)) if among is None else convert.integers("among", among)
    chosen = kept[few_shot(every[kept], shots=shots, generator=generator)]
    return np.sort(chosen)


def base_to_new(labels: Labels, class_names: Sequence[str]) -> tuple[Classes, Classes]:
    """Split classes into base and new ones, each told apart among its own only (CoCoOp).

    Base are the first half of the classes in the order of their labels, and the middle one. All
    clients train on base classes. The model is tested on base images among base classes, and on new
    images among new classes (``evaluate(..., class_names=new.names)``). Apply it to training and to
    test labels. The figure is the harmonic
    mean H of the two mean accuracies.

    Args:
        labels: Class of each image. Some classes may have no image.
        class_names: Names of all classes: of a folder in the order of names, of a split file of
            CoOp in the order of its labels.

    Returns:
        Base and new classes.

    Example:
        >>> base, new = base_to_new([4, 0, 3, 2], ["ant", "bee", "cat", "dog", "emu"])
        >>> base.names, base.positions.tolist(), base.labels.tolist()
        (['ant', 'bee', 'cat'], [1, 3], [0, 2])
        >>> new.names, new.positions.tolist(), new.labels.tolist()
        (['dog', 'emu'], [0, 2], [1, 0])

    References:
        Zhou et al., "Conditional Prompt Learning for Vision-Language Models" (CoCoOp), CVPR 2022,
        Sec. 4.1.
    """
    check.texts("class_names", class_names)
    sides = base_new_split(len(class_names))
    base, new = (_classes(labels, class_names, side) for side in sides)
    return base, new


def leave_one_domain_out(
    domains: Names, *, train: Labels | None = None
) -> dict[Any, tuple[list[Indices], Indices]]:
    """Let each domain be the target once, and the others be one client each (DomainBed, FedCLIP).

    Clients never see the target. All of its images are tests, also those of its training split.
    The figure of a method has one column for each target, and their unweighted mean.

    Args:
        domains: Domain of each image: all names or all integers.
        train: Positions of the training images. Other images of the sources are tests of their
            clients. If None, all images train.

    Returns:
        The training images of each client, and the images of the target, by the target.

    Example:
        >>> domains = ["art", "photo", "art", "sketch", "photo"]
        >>> splits = leave_one_domain_out(domains, train=[0, 3, 4])
        >>> clients, target = splits["sketch"]
        >>> [client.tolist() for client in clients], target.tolist()
        ([[0], [4]], [3])

    References:
        Gulrajani and Lopez-Paz, "In Search of Lost Domain Generalization" (DomainBed), ICLR 2021.
    """
    names = np.array(convert.entries("domains", domains))
    trained = np.arange(len(names))
    if train is not None:
        trained = np.unique(convert.integers("train", train, below=len(names)))
    splits = {}
    for target, (_, held) in leave_one_out(domains).items():
        parts = [trained[names[trained] == one] for one in np.unique(names) if one != target]
        splits[target] = [part for part in parts if len(part)], held
    return splits


def transfer(labels: Labels, class_names: Sequence[str]) -> Classes:
    """Test on the classes of another data set, of which no image trains (CoOp, CoCoOp).

    Images are told apart among all classes of their own data set, also those that it has in common
    with the training classes: ``evaluate(..., class_names=found.names)``. The figure has one column
    for each data set, and their unweighted mean.

    Args:
        labels: Class of each test image of the other data set.
        class_names: Names of the classes of the other data set.

    Returns:
        All of these images and classes.

    Example:
        >>> transfer([1, 0], ["oak", "elm"]).labels.tolist()
        [1, 0]
    """
    check.texts("class_names", class_names)
    return _classes(labels, class_names, np.arange(len(class_names)))


def newcomers(
    clients: Sequence[int], *, share: float, generator: Generator
) -> tuple[list[int], list[int]]:
    """Hold out clients, which never train and are tested with what the server sends them.

    The figure is the mean accuracy of newcomers on their own tests, before (`received`) and after
    a few steps on their own training images (`after`). See :class:`fedprompt.methods.HeldOut`.

    Args:
        clients: Ids of all clients, at least two.
        share: Share of the clients to hold out, in (0, 1), rounded to at least one client.
        generator: Source of randomness.

    Returns:
        Clients that train, and newcomers; both in the order of `clients`.

    Example:
        >>> newcomers(range(5), share=0.4, generator=np.random.default_rng(0))
        ([0, 1, 3], [2, 4])
    """
    ids = convert.integers("clients", clients)
    sides = group_split(ids, share=share, generator=generator)
    kept, held = (ids[side].tolist() for side in sides)
    return kept, held


def own_tests(clients: Names, tests: Labels) -> dict[Any, Indices]:
    """Give each client the test images of its own folder or domain (personal tests).

    A client's own figure is the accuracy on these, and the table has their unweighted mean over
    clients. On all tests, every client is tested on the tests of all clients together.

    Args:
        clients: Client of each image: all names or all integers.
        tests: Positions of the test images.

    Returns:
        Positions in `tests`, ascending, by client. They are `own` of
        :class:`fedprompt.methods.HeldOut` whose inputs are the tests.

    Example:
        >>> found = own_tests([7, 7, 3, 7], tests=[1, 2, 3])
        >>> {client: places.tolist() for client, places in found.items()}
        {3: [1], 7: [0, 2]}
    """
    names = np.array(convert.entries("clients", clients))
    chosen = names[convert.integers("tests", tests, below=len(names))]
    return {name: np.flatnonzero(chosen == name) for name in np.unique(chosen).tolist()}


def class_tests(
    labels: Labels, shards: Mapping[int, Labels], test_labels: Labels
) -> dict[int, Indices]:
    """Give each client all test images of the classes of its training images (FedOTP).

    It is for clients that differ in their classes only. Each test image counts once, however
    many training images of its class the client has. ``HeldOut(mixes="classes")`` weighs them by
    these numbers instead.

    Args:
        labels: Class of each training image.
        shards: Positions of the training images of each client.
        test_labels: Class of each test image.

    Returns:
        Positions in `test_labels`, ascending, by client.

    Example:
        >>> shards = {0: [0, 1], 1: [1, 2]}
        >>> found = class_tests([0, 0, 2], shards, [2, 1, 0, 2])
        >>> {client: places.tolist() for client, places in found.items()}
        {0: [2], 1: [0, 2, 3]}

    References:
        Li et al., "Global and Local Prompts Cooperation via Optimal Transport for Federated
        Learning" (FedOTP), CVPR 2024, Sec. 5.1.
    """
    every, tests = convert.integers("labels", labels), convert.integers("test_labels", test_labels)
    return {
        client: np.flatnonzero(np.isin(tests, every[convert.integers(f"shards[{client}]", shard)]))
        for client, shard in shards.items()
    }


def _classes(labels: Labels, class_names: Sequence[str], kept: Indices) -> Classes:
    """Return the images of some classes, which are numbered from 0."""
    every = convert.integers("labels", labels, below=len(class_names))
    positions = np.flatnonzero(np.isin(every, kept))
    names = [class_names[number] for number in kept]
    return Classes(names, positions, np.searchsorted(kept, every[positions]).astype(np.int64))
