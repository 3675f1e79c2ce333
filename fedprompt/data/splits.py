"""Splits of samples into two sides, and of classes."""

from typing import Any

import numpy as np

import fedprompt._conversions as convert
import fedprompt._refusals as check
from fedprompt.data import _arguments
from fedprompt.data._arguments import Generator, Indices, Labels, Names, numpy_generator


def study_quiz_split(
    labels: Labels, *, quiz_size: int, generator: Generator
) -> tuple[Indices, Indices]:
    """Hold out a client's quiz samples, on which it never trains (FedL2G).

    Split once, before the first round. A client with at most `quiz_size` samples gets an empty
    study set, so it cannot train and has nothing to upload.

    Args:
        labels: Labels of the client's samples, possibly none. Only their number matters.
        quiz_size: Number of quiz samples, at least 1. FedL2G takes one batch.
        generator: Source of randomness, of numpy or torch.

    Returns:
        Positions of study and quiz in `labels`, ascending, int64. They are disjoint and cover all
        samples.

    Example:
        >>> study_quiz_split([1, 0, 1, 2, 0], quiz_size=2, generator=np.random.default_rng(0))
        (array([0, 1, 3]), array([2, 4]))

    References:
        Zhang et al., "FedL2G: Learning to Guide Local Training in Heterogeneous Federated
        Learning", 2024.
    """
    check.count("quiz_size", quiz_size)
    generator = numpy_generator(generator)
    order = generator.permutation(len(convert.integers("labels", labels))).astype(np.int64)
    return np.sort(order[quiz_size:]), np.sort(order[:quiz_size])


def group_split(groups: Names, *, share: float, generator: Generator) -> tuple[Indices, Indices]:
    """Hold out a share of the groups, such as patients or users, with all their samples.

    Use it if samples of one patient resemble each other. A random split would put some of them on
    both sides, and the accuracy on the test side would be too high. For a stratified split, pass
    two rows of shares to :func:`~fedprompt.data.allocate`.

    Args:
        groups: Group of each sample, of at least two groups: all names or all integers.
        share: Share of the groups to hold out, above 0 and at most 1. It is rounded to at least one
            group on each side. Groups count equally, whatever their sizes.
        generator: Source of randomness, of numpy or torch.

    Returns:
        Positions of the kept and of the held-out samples, ascending, int64. They are disjoint and
        cover all samples.

    Example:
        >>> patients = ["ann", "bob", "ann", "cid", "bob"]
        >>> group_split(patients, share=0.3, generator=np.random.default_rng(0))
        (array([0, 1, 2, 4]), array([3]))
    """
    check.number("share", share, above=0.0, at_most=1.0)
    generator = numpy_generator(generator)
    number, count = _arguments.numbered("groups", groups)
    check.count("len(set(groups))", count, at_least=2)
    held = generator.permutation(count)[: min(max(round(share * count), 1), count - 1)]
    side = np.isin(number, held)
    return np.flatnonzero(~side), np.flatnonzero(side)


def leave_one_out(domains: Names) -> dict[Any, tuple[Indices, Indices]]:
    """Hold out one domain with all its samples, each in turn (DomainBed).

    Args:
        domains: Domain of each sample, of at least two domains: all names or all integers.

    Returns:
        Positions of the samples of the other domains and of the held-out domain, both ascending,
        by the held-out domain in sorted order.

    Example:
        >>> for target, (kept, held) in leave_one_out(["photo", "art", "photo"]).items():
        ...     print(target, kept, held)
        art [0 2] [1]
        photo [1] [0 2]

    References:
        Gulrajani and Lopez-Paz, "In Search of Lost Domain Generalization", ICLR 2021.
    """
    number, count = _arguments.numbered("domains", domains)
    check.count("len(set(domains))", count, at_least=2)
    names = enumerate(sorted(set(convert.entries("domains", domains))))
    return {name: (np.flatnonzero(number != n), np.flatnonzero(number == n)) for n, name in names}


def few_shot(labels: Labels, *, shots: int, generator: Generator) -> Indices:
    """Draw the same number of samples of every class (CoOp).

    A class with fewer samples contributes all of them, once each.

    Args:
        labels: Classes of at least one sample.
        shots: Number of samples of each class, at least 1.
        generator: Source of randomness, of numpy or torch.

    Returns:
        Positions in `labels`, ascending, int64.

    Example:
        >>> labels = np.array([0, 0, 0, 1, 1, 2])
        >>> kept = few_shot(labels, shots=2, generator=np.random.default_rng(0))
        >>> labels[kept]
        array([0, 0, 1, 1, 2])

    References:
        Zhou et al., "Learning to Prompt for Vision-Language Models" (CoOp), IJCV 2022, Sec. 4.1.
    """
    check.count("shots", shots)
    generator = numpy_generator(generator)
    array = _arguments.some_labels(labels)
    order = generator.permutation(len(array))
    order = order[np.argsort(array[order], kind="stable")]  # by class, at random within each
    first = np.searchsorted(array[order], array[order])
    return np.sort(order[np.arange(len(array)) - first < shots]).astype(np.int64)


def base_new_split(num_classes: int) -> tuple[Indices, Indices]:
    """Split classes into base classes, for training, and new classes, for tests only (CoCoOp).

    The first half of the classes is base. If the number is odd, the middle class is base as well.
    CoCoOp numbers the new classes from 0 again: subtract ``len(base)`` from their labels.

    Args:
        num_classes: Number of classes, at least 2.

    Returns:
        Base classes and new classes, ascending, int64.

    Example:
        >>> base, new = base_new_split(5)
        >>> base, new
        (array([0, 1, 2]), array([3, 4]))
        >>> labels = np.array([4, 0, 3, 2])
        >>> np.isin(labels, base).nonzero()[0]  # samples to train on
        array([1, 3])

    References:
        Zhou et al., "Conditional Prompt Learning for Vision-Language Models" (CoCoOp), CVPR 2022,
        Sec. 4.1. Odd numbers follow the authors' code.
    """
    check.count("num_classes", num_classes, at_least=2)
    base, new = np.split(np.arange(num_classes), [(num_classes + 1) // 2])
    return base, new
