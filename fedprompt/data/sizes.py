"""Partitions by the number of samples of each client."""

from collections.abc import Sequence

import numpy as np

import fedprompt._checks as check
from fedprompt.data._arguments import (
    Alpha,
    Generator,
    Indices,
    Labels,
    class_numbers,
    concentrations,
    numpy_generator,
)
from fedprompt.data._counts import Counts, client_counts, deal, drawn_counts, fill


def quantity_skew(
    labels: Labels,
    num_clients: int,
    *,
    alpha: Alpha,
    min_size: int | None = None,
    generator: Generator,
) -> list[Indices]:
    r"""Give clients unlike numbers of samples, in the class mix of the data set.

    .. math:: (q_1, \dots, q_M) \sim \mathrm{Dir}(\alpha, \dots, \alpha), \qquad
              n_{k,c} \approx q_k n_c

    Args:
        labels: Classes of at least one sample.
        num_clients: Number of clients M, at least 1.
        alpha: Concentration, above 0 and at most 1e12, or an array (clients, 1) with one for each
            client. With a small one, a few clients have most of the samples.
        min_size: Smallest number of samples of a client, as in :func:`~fedprompt.data.dirichlet`.
        generator: Source of randomness, of numpy or torch.

    Returns:
        For each client the positions of its samples in `labels`, ascending, int64. Every sample
        has one owner.

    Raises:
        ValueError: If no draw reaches `min_size`, or, if it is None, a client has no samples.

    Example:
        >>> labels, draw = np.arange(1000) % 2, np.random.default_rng(0)
        >>> clients = quantity_skew(labels, 4, alpha=1.0, generator=draw)
        >>> [np.bincount(labels[client]).tolist() for client in clients]
        [[197, 197], [296, 296], [6, 6], [1, 1]]

    References:
        Li et al., "Federated Learning on Non-IID Data Silos: An Experimental Study", ICDE 2022,
        Sec. 4.3.
    """
    generator = numpy_generator(generator)
    array = class_numbers(labels)
    class_sizes = np.bincount(array)
    drawn = concentrations(alpha, num_clients, 1)[:, 0]

    def draw() -> Counts:
        shares = np.repeat(generator.dirichlet(drawn)[:, None], len(class_sizes), axis=1)
        return client_counts(class_sizes, shares, generator)

    return deal(array, drawn_counts(draw, len(array), num_clients, min_size), generator)


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
    array = class_numbers(labels)
    chosen = check.integers("sizes", sizes)
    check.some("sizes", chosen.size, "have the size of at least one client")
    if chosen.min() < 1 or chosen.sum() > len(array):
        rule = f"be at least 1, and sum to at most {len(array)}, the number of labels"
        raise check.wrong("sizes", rule, f"a minimum of {chosen.min()}, a sum of {chosen.sum()}")
    counts, left = [], np.bincount(array)
    mixes = [generator.dirichlet(row) for row in concentrations(alpha, len(chosen), len(left))]
    for mix, size in zip(mixes, chosen.tolist(), strict=True):
        counts.append(fill(mix, left, size, generator))
        left = left - counts[-1]
    return deal(array, np.stack([*counts, left]), generator)
