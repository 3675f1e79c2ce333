"""Partition functions of the literature."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64, Int64

import fedprompt._refusals as check
from fedprompt.data import _arguments, _counts
from fedprompt.data._arguments import Alpha, Generator, Indices, Labels, Names, numpy_generator
from fedprompt.data._counts import Counts, client_counts, raised
from fedprompt.data.shares import allocate, pathological_shares


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
    num_samples = len(_arguments.some_labels(labels))
    check.count("num_clients", num_clients, at_most=num_samples, of="the number of samples")
    order = generator.permutation(num_samples).astype(np.int64)
    return [np.sort(part) for part in np.array_split(order, num_clients)]


def dirichlet(
    labels: Labels,
    num_clients: int,
    *,
    alpha: Alpha,
    min_size: int | None = None,
    min_per_class: float = 0,
    capped: bool = False,
    generator: Generator,
) -> list[Indices]:
    """Split each class over the clients in proportions from a Dirichlet distribution.

    The function combines :func:`~fedprompt.data.dirichlet_shares` and
    :func:`~fedprompt.data.allocate`. Shares that leave a client with fewer than `min_size` samples
    are drawn again, up to 1000 times. To give a test set the same proportions, call the two
    functions and keep the shares, or use :func:`~fedprompt.data.class_shares`.

    Args:
        labels: Classes of at least one sample. Only the classes that occur are split.
        num_clients: Number of clients, at least 1.
        alpha: Concentration, above 0 and at most 1e12. With a small one, a client has few classes.
            An array that broadcasts to (clients, classes) has one for each client and class that
            occurs.
        min_size: Smallest number of samples of a client. If None, the first draw is used, and empty
            clients are an error, because they cannot train. With 0 a client may be empty. With 1 or
            more, shares are drawn again until all clients have as many.
        min_per_class: Smallest number of samples of each class that a client has (FedHPL). A float
            is a share of each class, rounded down to whole samples. Clients below it are raised to
            it, and the others are scaled down.
        capped: Whether classes are split one after another, each only over clients that have fewer
            than an equal part of all samples so far. Many benchmarks do this, for example PFLlib,
            FedL2G and FedOTP. Clients then differ less in size. A client can still exceed the equal
            part by its share of one class, or by `min_per_class`.
        generator: Source of randomness, of numpy or torch.

    Returns:
        For each client the positions of its samples in `labels`, ascending, int64. Every sample
        has one owner.

    Raises:
        ValueError: If no draw reaches `min_size`. The message names the best minimum of all draws.
            If `min_size` is None, it names the empty clients. If a class has too few samples for
            `min_per_class`.

    Example:
        >>> labels, draw = np.arange(1000) % 10, np.random.default_rng(0)
        >>> clients = dirichlet(labels, 5, alpha=0.3, min_size=40, generator=draw)
        >>> sum(len(client) for client in clients), min(len(client) for client in clients) >= 40
        (1000, True)
        >>> clients = dirichlet(labels, 5, alpha=0.1, min_per_class=0.05, generator=draw)
        >>> [np.bincount(labels[client]).min().item() for client in clients]
        [5, 5, 5, 5, 5]

    References:
        Li et al., "Federated Learning on Non-IID Data Silos: An Experimental Study", ICDE 2022, and
        its code for the cap. Ma et al., "FedHPL: Efficient Heterogeneous Federated Learning with
        Prompt Tuning and Logit Distillation", 2024, App. C.5.4, for the minimum.
    """
    check.flag("capped", capped)
    generator = numpy_generator(generator)
    array = _arguments.class_numbers(labels)
    class_sizes = np.bincount(array)
    drawn = _arguments.concentrations(alpha, num_clients, len(class_sizes))
    least = _counts.minimum_counts(min_per_class, class_sizes, num_clients) / class_sizes

    def draw() -> Counts:
        if capped:
            return _capped_counts(class_sizes, drawn, least, generator)
        shares = np.stack([generator.dirichlet(column) for column in drawn.T], axis=1)
        return client_counts(class_sizes, raised(shares, least), generator)

    counts = _counts.drawn_counts(draw, len(array), num_clients, min_size)
    return _counts.deal(array, counts, generator)


def _capped_counts(
    class_sizes: Int64[np.ndarray, " classes"],
    alpha: Float64[np.ndarray, "clients classes"],
    least: Float64[np.ndarray, " classes"],
    generator: np.random.Generator,
) -> Counts:
    """Count the samples of each class for each client, class by class, with the cap.

    The benchmarks set the shares of clients at the cap to 0 and normalize the others. The others
    then have a Dirichlet distribution themselves, so they are drawn from it directly. This holds
    also where all their shares are rounded to 0.
    """
    counts = np.zeros((len(alpha) + 1, len(class_sizes)), dtype=np.int64)
    for label in range(len(class_sizes)):
        below = counts[:-1].sum(axis=1) * len(alpha) < class_sizes.sum()
        shares = np.zeros((len(alpha), 1))
        shares[below, 0] = generator.dirichlet(alpha[below, label])
        one = class_sizes[[label]]
        counts[:, [label]] = client_counts(one, raised(shares, least[[label]]), generator)
    return counts


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
        labels: Classes of at least one sample. Only the classes that occur are given to clients. If
            a class has fewer samples than clients that drew it, some of these get none of it.
        num_clients: Number of clients, at least 1.
        classes_per_client: Number of classes of each client, at most all. Its product with
            `num_clients` must be divisible by the number of classes that occur.
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
    array = _arguments.class_numbers(labels)
    num_classes = int(array.max()) + 1
    shares = pathological_shares(
        num_clients, num_classes, classes_per_client=classes_per_client, generator=generator
    )
    return allocate(array, shares, min_size=min_size, generator=generator)


def disjoint_classes(
    labels: Labels, num_clients: int, *, rest_last: bool = False, generator: Generator
) -> list[Indices]:
    """Give every client all samples of some classes, which no other client has.

    Any number of classes is divided, and not only a multiple of `num_clients`. To give a test set
    the same classes, pass its labels with a generator of the same seed; the same classes must
    occur.

    Args:
        labels: Classes of at least one sample. Only the classes that occur are given to clients.
        num_clients: Number of clients, at most the number of these classes.
        rest_last: Whether all clients but the last one have the rounded mean number of classes, and
            the last one has the rest, as in FedOTP's published code. If False, numbers of classes
            differ by at most 1.
        generator: Source of randomness, of numpy or torch.

    Returns:
        For each client the positions of its samples in `labels`, ascending, int64. Every sample
        has one owner.

    Raises:
        ValueError: If there are more clients than classes, or with `rest_last` nothing is left for
            the last client.

    Example:
        >>> labels, draw = np.arange(470) % 47, np.random.default_rng(0)
        >>> [len(set(labels[c])) for c in disjoint_classes(labels, 10, generator=draw)]
        [5, 5, 5, 5, 5, 5, 5, 4, 4, 4]
        >>> published = disjoint_classes(labels, 10, rest_last=True, generator=draw)
        >>> [len(set(labels[c])) for c in published]
        [5, 5, 5, 5, 5, 5, 5, 5, 5, 2]
    """
    generator = numpy_generator(generator)
    check.flag("rest_last", rest_last)
    array = _arguments.class_numbers(labels)
    order = generator.permutation(np.unique(array))
    check.count("num_clients", num_clients, at_most=len(order), of="the number of classes")
    if rest_last:
        size = round(len(order) / num_clients)
        rule = f"leave classes for the last client, of {len(order)}"
        left = len(order) - size * (num_clients - 1)
        check.require(left > 0, "num_clients", rule, num_clients)
        owned = np.split(order, size * np.arange(1, num_clients))
    else:
        owned = np.array_split(order, num_clients)
    return [np.flatnonzero(np.isin(array, classes)) for classes in owned]


def by_domain(
    domains: Names,
    num_clients: int | None = None,
    *,
    all_domains: Names | None = None,
    generator: Generator | None = None,
) -> list[Indices]:
    """Assign the samples of each domain to one client, or split them over several clients.

    Every domain has the same number of clients. Within a domain, samples are split as by
    :func:`iid`. If you call the function for a training and a test set, pass `all_domains` to both
    calls. Otherwise a domain without test samples shifts the clients after it.

    Args:
        domains: Domain of each sample, of at least one sample: all names or all integers.
        num_clients: Number of clients, a multiple of the number of domains. If None, it is the
            number of domains.
        all_domains: All domains of the federation in any order, repeated or not, such as the
            domains of the training samples. A domain without samples then has empty clients. If
            None, they are the domains that occur.
        generator: Source of randomness, of numpy or torch. It is required with `num_clients`, and
            unused without.

    Returns:
        For each client the positions of its samples, ascending, int64. Domains are in sorted order,
        and the clients of a domain follow one another.

    Raises:
        ValueError: If `num_clients` is not a multiple of the number of domains, a domain is not in
            `all_domains`, or, without `all_domains`, a domain has fewer samples than clients.

    Example:
        >>> train = ["photo", "sketch", "photo", "art"]
        >>> by_domain(train)
        [array([3]), array([0, 2]), array([1])]
        >>> by_domain(["sketch", "art"], all_domains=train)
        [array([1]), array([], dtype=int64), array([0])]
        >>> draw = np.random.default_rng(0)
        >>> by_domain(["photo", "art", "photo", "art"], 4, generator=draw)
        [array([1]), array([3]), array([0]), array([2])]
    """
    number, num_domains = _arguments.numbered("domains", domains, all_domains)
    domain_samples = _counts.owned(number, num_domains)
    if num_clients is None:
        return domain_samples
    check.count("num_clients", num_clients)
    rule = f"be a multiple of {num_domains}, the number of domains"
    check.require(not num_clients % num_domains, "num_clients", rule, num_clients)
    generator = numpy_generator(generator)
    fewest = min(map(len, domain_samples))
    if all_domains is None:
        reason = f"because a domain has only {fewest} samples"
        check.count("num_clients", num_clients, at_most=fewest * num_domains, of=reason)
    return [
        np.sort(part)
        for samples in domain_samples
        for part in np.array_split(generator.permutation(samples), num_clients // num_domains)
    ]
