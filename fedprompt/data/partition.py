"""The field's usual partitions, each in one call."""

from collections.abc import Sequence
from numbers import Integral

import numpy as np
from jaxtyping import Integer, Shaped
from torch import Tensor

from fedprompt._checks import check_count, kind, wrong_type, wrong_value
from fedprompt.data._arguments import Indices, Labels, check_generator, entries_of, some_labels
from fedprompt.data.allocation import allocate, client_counts, deal, owned
from fedprompt.data.shares import dirichlet_shares, pathological_shares

DRAWS = 1000
"""How often :func:`dirichlet` draws shares before it gives up on `min_size`."""


def iid(labels: Labels, *, num_clients: int, generator: np.random.Generator) -> list[Indices]:
    """Split samples at random into parts of equal size, whatever their labels.

    For parts with equal class counts, too, allocate with :func:`iid_shares`.

    Args:
        labels: Of at least one sample; only their number matters.
        num_clients: At least 1.
        generator: Source of randomness.

    Returns:
        For each client the positions in `labels` that it owns, ascending, int64; sizes differ by at most 1. Every sample has one owner.

    Raises:
        TypeError: If `labels` are not integers, `num_clients` not an integer, or `generator` not a numpy Generator.
        ValueError: If `labels` are empty or negative, or `num_clients` is below 1.

    Example:
        >>> iid([0, 0, 0, 1, 1], num_clients=2, generator=np.random.default_rng(0))
        [array([2, 3, 4]), array([0, 1])]
    """
    check_count("num_clients", num_clients)
    check_generator(generator)
    order = generator.permutation(len(some_labels(labels))).astype(np.int64)
    return [np.sort(part) for part in np.array_split(order, num_clients)]


def dirichlet(labels: Labels, *, num_clients: int, alpha: float, min_size: int = 0, generator: np.random.Generator) -> list[Indices]:
    """Split each class over the clients in proportions from a Dirichlet distribution, none too small.

    This is :func:`dirichlet_shares` and :func:`allocate`; shares that leave a client with less than `min_size` are drawn again, 1000 times
    at most. To give a test set the same proportions, call the two yourself and keep the shares.

    Args:
        labels: Classes of at least one sample; there are ``max(labels) + 1`` of them.
        num_clients: At least 1.
        alpha: Above 0; the smaller, the fewer classes has a client.
        min_size: The fewest samples that a client may get, at least 0; 0 lets a client go empty.
        generator: Source of randomness.

    Returns:
        For each client the positions in `labels` that it owns, ascending, int64. Every sample has one owner.

    Raises:
        TypeError: If `labels` are not integers, a number is of the wrong kind, or `generator` is not a numpy Generator.
        ValueError: If `labels` are empty or negative, a number lies outside its range, or no draw reaches `min_size`: the message says what
            the best one reached.

    Example:
        >>> labels = np.arange(1000) % 10
        >>> clients = dirichlet(labels, num_clients=5, alpha=0.3, min_size=40, generator=np.random.default_rng(0))
        >>> sum(len(client) for client in clients), min(len(client) for client in clients) >= 40
        (1000, True)

    References:
        Li et al., "Federated Learning on Non-IID Data Silos: An Experimental Study", ICDE 2022.
    """
    check_count("num_clients", num_clients)
    check_count("min_size", min_size, at_least=0)
    array = some_labels(labels)
    class_sizes = np.bincount(array)
    if min_size * num_clients > len(array):
        raise wrong_value("min_size", f"be at most {len(array) // num_clients}, an equal part of {len(array)} samples", min_size)
    best = 0
    for _ in range(DRAWS):
        shares = dirichlet_shares(len(class_sizes), num_clients, alpha=alpha, generator=generator)
        counts = client_counts(class_sizes, shares, generator)
        smallest = int(counts[:num_clients].sum(axis=1).min())
        if smallest >= min_size:
            return deal(array, counts, generator)
        best = max(best, smallest)
    raise wrong_value("min_size", f"be at most {best}, the best minimum in {DRAWS} draws at alpha={alpha}", min_size)


def pathological(labels: Labels, *, num_clients: int, classes_per_client: int, generator: np.random.Generator) -> list[Indices]:
    """Give every client samples of a few classes only.

    This is :func:`pathological_shares` and :func:`allocate`; to give a test set the same classes, call the two yourself and keep the
    shares.

    Args:
        labels: Classes of at least one sample; there are ``max(labels) + 1`` of them. A class with fewer samples than clients that picked
            it leaves some of these without it.
        num_clients: At least 1.
        classes_per_client: At most the number of classes; times `num_clients` it must be divisible by the number of classes.
        generator: Source of randomness.

    Returns:
        For each client the positions in `labels` that it owns, ascending, int64. Every sample has one owner.

    Raises:
        TypeError: If `labels` are not integers, a number is not an integer, or `generator` is not a numpy Generator.
        ValueError: If `labels` are empty or negative, or the numbers do not fit each other.

    Example:
        >>> labels = np.arange(1000) % 10
        >>> clients = pathological(labels, num_clients=5, classes_per_client=2, generator=np.random.default_rng(0))
        >>> [len(set(labels[client])) for client in clients]
        [2, 2, 2, 2, 2]
    """
    array = some_labels(labels)
    num_classes = int(array.max()) + 1
    shares = pathological_shares(num_classes, num_clients, classes_per_client=classes_per_client, generator=generator)
    return allocate(array, shares, generator=generator)


def by_domain(
    domains: Sequence[str] | Sequence[int | np.integer] | Shaped[np.ndarray, " samples"] | Integer[Tensor, " samples"],
) -> list[Indices]:
    """Make one client of each domain.

    Args:
        domains: Where each sample comes from, in names or integers, of at least one sample.

    Returns:
        For each domain, in the order of ``sorted(set(domains))``, the positions of its samples, ascending, int64.

    Raises:
        TypeError: If `domains` are neither all names nor all integers.
        ValueError: If `domains` are empty.

    Example:
        >>> by_domain(["photo", "sketch", "photo", "art"])
        [array([3]), array([0, 2]), array([1])]
    """
    entries = entries_of("domains", domains)
    if not entries:
        raise wrong_value("domains", "hold at least one domain", "none")
    wanted = str if isinstance(entries[0], str) else Integral
    for position, entry in enumerate(entries):
        if isinstance(entry, bool) or not isinstance(entry, wanted):
            raise wrong_type(f"domains[{position}]", "be a string, or an integer where all are", kind(entry))
    number = {domain: client for client, domain in enumerate(sorted(set(entries)))}
    return owned(np.array([number[entry] for entry in entries]), len(number))
