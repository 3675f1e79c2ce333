"""Partitions with given numbers of samples, with or without overlap."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import fedprompt._conversions as convert
import fedprompt._refusals as check
from fedprompt.data import _arguments
from fedprompt.data._arguments import Alpha, Generator, Indices, Labels, numpy_generator
from fedprompt.data._counts import deal, fill, minimum_counts, raised


def dirichlet_overlapping(
    labels: Labels,
    num_clients: int,
    *,
    alpha: Alpha,
    size: int,
    min_per_class: float = 0,
    generator: Generator,
) -> list[Indices]:
    r"""Draw `size` samples for each client, in random class proportions (FedHPL, App. B.2).

    .. math:: q_k \sim \mathrm{Dir}(\alpha, \dots, \alpha), \qquad
              n_{k,c} \approx q_{k,c} \cdot \text{size}

    A client never holds a sample twice, but two clients may hold the same one. Counts are rounded
    so that they sum to `size`. A class with too few samples contributes all of them, and the
    other classes fill the remainder in their proportions.

    Args:
        labels: Classes of at least one sample. Clients have mixes of the classes that occur.
        num_clients: Number of clients, at least 1.
        alpha: Concentration, above 0 and at most 1e12. With a small one, a client has few classes.
            An array that broadcasts to (clients, classes) has one for each client and class that
            occurs.
        size: Number of samples of each client, at least 1 and at most ``len(labels)``.
        min_per_class: Smallest number of samples of each class that a client has. A float is a
            share of each class, rounded down to whole samples. Proportions below it are raised to
            it, and the others are scaled down.
        generator: Source of randomness, of numpy or torch.

    Returns:
        For each client `size` different positions in `labels`, ascending, int64.

    Raises:
        ValueError: If a class or `size` is too small for `min_per_class`.

    Example:
        >>> draw = np.random.default_rng(0)
        >>> labels = [0, 0, 0, 1, 1]
        >>> clients = dirichlet_overlapping(labels, 2, alpha=1.0, size=3, generator=draw)
        >>> [len(client) for client in clients]
        [3, 3]

    References:
        Ma et al., "FedHPL: Efficient Heterogeneous Federated Learning with Prompt Tuning and Logit
        Distillation", 2024.
    """
    generator = numpy_generator(generator)
    array = _arguments.class_numbers(labels)
    check.count("size", size, at_most=len(array), of="the number of labels")
    class_sizes = np.bincount(array)
    drawn = _arguments.concentrations(alpha, num_clients, len(class_sizes))
    least = minimum_counts(min_per_class, class_sizes, 1)
    got = f"{least.sum()} samples of all classes"
    check.require(least.sum() <= size, "min_per_class", f"fit into `size`, {size}", got)
    clients = []
    mixes = np.stack([*map(generator.dirichlet, drawn)], axis=1)
    for mix in raised(mixes, least[:, None] / size).T:
        taken = fill(mix, class_sizes, size, generator)
        clients += deal(array, np.stack((taken, class_sizes - taken)), generator)
    return clients


def dirichlet_sizes(
    labels: Labels, sizes: Sequence[int], *, alpha: Alpha, generator: Generator
) -> list[Indices]:
    """Give clients given numbers of samples, in random class proportions, and no sample twice.

    Clients choose in turn, in proportions from a Dirichlet distribution over classes. If a class is
    exhausted, the other classes fill the remainder in their proportions. If `sizes` sum to nearly
    all samples, the last clients get what is left.

    Args:
        labels: Classes of at least one sample. Clients have mixes of the classes that occur.
        sizes: Number of samples of each client, at least 1. They sum to at most ``len(labels)``,
            and the rest is not assigned.
        alpha: Concentration, above 0 and at most 1e12. With a small one, a client has few classes.
            An array that broadcasts to (clients, classes) has one for each client and class that
            occurs.
        generator: Source of randomness, of numpy or torch.

    Returns:
        For each client the positions of its samples in `labels`, ascending, int64.

    Example:
        >>> draw = np.random.default_rng(0)
        >>> clients = dirichlet_sizes([0, 0, 0, 1, 1, 1], [3, 1], alpha=0.5, generator=draw)
        >>> [len(client) for client in clients]
        [3, 1]
    """
    generator = numpy_generator(generator)
    array = _arguments.class_numbers(labels)
    chosen = convert.integers("sizes", sizes)
    check.some("sizes", chosen.size, "have the size of at least one client")
    total = sum(chosen.tolist())  # int64 could overflow
    rule = f"be at least 1, and sum to at most {len(array)}, the number of labels"
    fits = chosen.min() >= 1 and total <= len(array)
    check.require(fits, "sizes", rule, f"a minimum of {chosen.min()}, a sum of {total}")
    counts, left = [], np.bincount(array)
    drawn = _arguments.concentrations(alpha, len(chosen), len(left))
    for mix, size in zip([*map(generator.dirichlet, drawn)], chosen.tolist(), strict=True):
        counts.append(fill(mix, left, size, generator))
        left = left - counts[-1]
    return deal(array, np.stack([*counts, left]), generator)
