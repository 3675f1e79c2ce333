"""Partition functions of the literature."""

from collections.abc import Sequence
from numbers import Integral

import numpy as np
from jaxtyping import Int64, Integer, Shaped
from torch import Tensor

import fedprompt._checks as check
from fedprompt.data import _arguments
from fedprompt.data._arguments import Generator, Indices, Labels, numpy_generator, some_labels
from fedprompt.data._counts import client_counts, deal, owned, smallest_client
from fedprompt.data.allocation import allocate
from fedprompt.data.shares import dirichlet_shares, pathological_shares

_DRAWS = 1000
"""Number of times that :func:`dirichlet` draws shares before it gives up on `min_size`."""


def iid(labels: Labels, num_clients: int, *, generator: Generator) -> list[Indices]:
    """Split samples at random into parts of equal size, whatever their labels.

    For parts with equal class counts, pass :func:`~fedprompt.data.iid_shares` to
    :func:`~fedprompt.data.allocate`.

    Args:
        labels: Labels of at least one sample. Only their number matters.
        num_clients: Number of clients, at least 1.
        generator: Source of randomness, of numpy or torch.

    Returns:
        For each client the positions of its samples in `labels`, ascending, int64. Sizes differ by
        at most 1, and every sample has one owner.

    Raises:
        ValueError: If there are more clients than samples.

    Example:
        >>> iid([0, 0, 0, 1, 1], 2, generator=np.random.default_rng(0))
        [array([2, 3, 4]), array([0, 1])]
    """
    generator = numpy_generator(generator)
    num_samples = len(some_labels(labels))
    check.count("num_clients", num_clients, at_most=num_samples, of="the number of samples")
    order = generator.permutation(num_samples).astype(np.int64)
    return [np.sort(part) for part in np.array_split(order, num_clients)]


def dirichlet(
    labels: Labels,
    num_clients: int,
    *,
    alpha: float,
    min_size: int | None = None,
    generator: Generator,
) -> list[Indices]:
    """Split each class over the clients in proportions from a Dirichlet distribution.

    The function combines :func:`~fedprompt.data.dirichlet_shares` and
    :func:`~fedprompt.data.allocate`. Shares that leave a client with fewer than `min_size` samples
    are drawn again, up to 1000 times. To give a test set the same proportions, call the two
    functions and keep the shares.

    Args:
        labels: Classes of at least one sample. There are ``max(labels) + 1`` classes.
        num_clients: Number of clients, at least 1.
        alpha: Concentration, above 0 and at most 1e12. With a small one, a client has few classes.
        min_size: Smallest number of samples of a client. If None, the first draw is used, and empty
            clients are an error, because they cannot train. With 0 a client may be empty. With 1 or
            more, shares are drawn again until all clients have as many.
        generator: Source of randomness, of numpy or torch.

    Returns:
        For each client the positions of its samples in `labels`, ascending, int64. Every sample
        has one owner.

    Raises:
        ValueError: If no draw reaches `min_size`. The message names the best minimum of all draws.
            If `min_size` is None, it names the empty clients.

    Example:
        >>> labels, draw = np.arange(1000) % 10, np.random.default_rng(0)
        >>> clients = dirichlet(labels, 5, alpha=0.3, min_size=40, generator=draw)
        >>> sum(len(client) for client in clients), min(len(client) for client in clients) >= 40
        (1000, True)

    References:
        Li et al., "Federated Learning on Non-IID Data Silos: An Experimental Study", ICDE 2022.
    """
    check.count("num_clients", num_clients)
    check.optional(check.count, "min_size", min_size, at_least=0)
    generator = numpy_generator(generator)
    array = some_labels(labels)
    class_sizes = np.bincount(array)
    equal = f"an equal part of {len(array)} samples"
    check.count("min_size", min_size or 0, at_least=0, at_most=len(array) // num_clients, of=equal)
    best = 0
    for _ in range(_DRAWS):
        shares = dirichlet_shares(num_clients, len(class_sizes), alpha=alpha, generator=generator)
        counts = client_counts(class_sizes, shares, generator)
        smallest = smallest_client(counts, min_size)
        if smallest >= (min_size or 0):
            return deal(array, counts, generator)
        best = max(best, smallest)
    rule = f"be at most {best}, the best minimum in {_DRAWS} draws at alpha={alpha}"
    raise check.wrong("min_size", rule, min_size)


def pathological(
    labels: Labels,
    num_clients: int,
    *,
    classes_per_client: int,
    min_size: int | None = None,
    generator: Generator,
) -> list[Indices]:
    """Give every client samples of a few classes only.

    The function combines :func:`~fedprompt.data.pathological_shares` and
    :func:`~fedprompt.data.allocate`. To give a test set the same classes, call the two functions
    and keep the shares.

    Args:
        labels: Classes of at least one sample. There are ``max(labels) + 1`` classes. If a class
            has fewer samples than clients that drew it, some of these get none of it.
        num_clients: Number of clients, at least 1.
        classes_per_client: Number of classes of each client, at most all. Its product with
            `num_clients` must be divisible by the number of classes.
        min_size: Smallest number of samples of a client, as in :func:`~fedprompt.data.allocate`. If
            None, empty clients are an error. With 0 a client may be empty.
        generator: Source of randomness, of numpy or torch.

    Returns:
        For each client the positions of its samples in `labels`, ascending, int64. Every sample
        has one owner.

    Raises:
        ValueError: If `classes_per_client` does not fit the numbers of classes and clients, or a
            client has fewer than `min_size` samples.

    Example:
        >>> labels, draw = np.arange(1000) % 10, np.random.default_rng(0)
        >>> clients = pathological(labels, 5, classes_per_client=2, generator=draw)
        >>> [len(set(labels[client])) for client in clients]
        [2, 2, 2, 2, 2]
    """
    generator = numpy_generator(generator)
    array = some_labels(labels)
    num_classes = int(array.max()) + 1
    shares = pathological_shares(
        num_clients, num_classes, classes_per_client=classes_per_client, generator=generator
    )
    return allocate(array, shares, min_size=min_size, generator=generator)


def by_domain(
    domains: Sequence[str]
    | Sequence[int | np.integer]
    | Shaped[np.ndarray, " samples"]
    | Integer[Tensor, " samples"],
    num_clients: int | None = None,
    *,
    generator: Generator | None = None,
) -> list[Indices]:
    """Assign the samples of each domain to one client, or split them over several clients.

    Every domain has the same number of clients. Within a domain, samples are split as by
    :func:`iid`.

    Args:
        domains: Domain of each sample, of at least one sample: all names or all integers.
        num_clients: Number of clients, a multiple of the number of domains. If None, it is the
            number of domains.
        generator: Source of randomness, of numpy or torch. It is required with `num_clients`, and
            unused without.

    Returns:
        For each client the positions of its samples, ascending, int64. Domains are in the order of
        ``sorted(set(domains))``, and the clients of a domain follow one another.

    Raises:
        ValueError: If `num_clients` is not a multiple of the number of domains, or a domain has
            fewer samples than clients.

    Example:
        >>> by_domain(["photo", "sketch", "photo", "art"])
        [array([3]), array([0, 2]), array([1])]
        >>> draw = np.random.default_rng(0)
        >>> by_domain(["photo", "art", "photo", "art"], 4, generator=draw)
        [array([1]), array([3]), array([0]), array([2])]
    """
    number = _domain_numbers(domains)
    check.optional(_arguments.check_random, "generator", generator)
    num_domains = int(number.max()) + 1
    domain_samples = owned(number, num_domains)
    if num_clients is None:
        return domain_samples
    check.count("num_clients", num_clients)
    if num_clients % num_domains:
        rule = f"be a multiple of {num_domains}, the number of domains"
        raise check.wrong("num_clients", rule, num_clients)
    generator = numpy_generator(generator)
    fewest = min(map(len, domain_samples))
    reason = f"because a domain has only {fewest} samples"
    check.count("num_clients", num_clients, at_most=fewest * num_domains, of=reason)
    return [
        samples[part]
        for samples in domain_samples
        for part in iid(samples, num_clients // num_domains, generator=generator)
    ]


def _domain_numbers(domains: object) -> Int64[np.ndarray, " samples"]:
    """Number the domains in sorted order, and return the number of each sample."""
    entries = check.entries("domains", domains)
    check.some("domains", entries, "hold at least one domain")
    wanted = str if isinstance(entries[0], str) else Integral
    for position, entry in enumerate(entries):
        if isinstance(entry, bool) or not isinstance(entry, wanted):
            rule = "be a string or an integer, like all entries"
            raise check.wrong_type(f"domains[{position}]", rule, check.kind(entry))
    number = {domain: client for client, domain in enumerate(sorted(set(entries)))}
    return np.array([number[entry] for entry in entries], dtype=np.int64)
