"""Partitions in which clients may share samples."""

import numpy as np
from jaxtyping import Float64, Int64

import fedprompt._checks as check
from fedprompt.data._arguments import Generator, Indices, Labels, numpy_generator, some_labels
from fedprompt.data._counts import deal, round_to_total


def dirichlet_overlapping(
    labels: Labels, num_clients: int, *, alpha: float, size: int, generator: Generator
) -> list[Indices]:
    r"""Draw `size` samples for each client, in random class proportions (FedHPL, App. B.2).

    .. math:: q_k \sim \mathrm{Dir}(\alpha, \dots, \alpha), \qquad
              n_{k,c} \approx q_{k,c} \cdot \text{size}

    A client never holds a sample twice, but two clients may hold the same one. Counts are rounded
    so that they sum to `size`. A class with too few samples contributes all of them, and the
    other classes fill the remainder in their proportions.

    Args:
        labels: Classes of at least one sample. There are ``max(labels) + 1`` classes.
        num_clients: Number of clients, at least 1.
        alpha: Concentration, above 0 and at most 1e12. With a small one, a client has few classes.
        size: Number of samples of each client, at least 1 and at most ``len(labels)``.
        generator: Source of randomness, of numpy or torch.

    Returns:
        For each client `size` different positions in `labels`, ascending, int64.

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
    check.count("num_clients", num_clients)
    check.number("alpha", alpha, above=0.0, at_most=1e12)
    generator = numpy_generator(generator)
    array = some_labels(labels)
    check.count("size", size, at_most=len(array), of="the number of labels")
    class_sizes = np.bincount(array)
    clients = []
    for mix in generator.dirichlet(np.full(len(class_sizes), float(alpha)), size=num_clients):
        taken = _fill(mix, class_sizes, size, generator)
        clients += deal(array, np.stack((taken, class_sizes - taken)), generator)
    return clients


def _fill(
    mix: Float64[np.ndarray, " classes"],
    class_sizes: Int64[np.ndarray, " classes"],
    size: int,
    generator: np.random.Generator,
) -> Int64[np.ndarray, " classes"]:
    """Count `size` samples in the proportions of `mix`; each pass but the last exhausts a class."""
    taken = np.zeros_like(class_sizes)
    while (missing := size - taken.sum()) > 0:
        unused = class_sizes - taken
        weight = np.where(unused > 0, mix, 0.0)
        if weight.sum() == 0:  # all remaining classes have a share of exactly 0
            weight = unused.astype(np.float64)
        quotas = missing * weight / weight.sum()
        counts = round_to_total(quotas[:, None], np.array([missing]), generator)[:, 0]
        taken += np.minimum(counts, unused)
    return taken
