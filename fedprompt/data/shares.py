"""Shares of the classes among the clients, as matrices (clients, classes), and their samples.

Draw shares once and pass them to :func:`allocate` twice, for the training and the test set. Then
every client is tested on its own mix of classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import numpy as np
from jaxtyping import Float

import fedprompt._conversions as convert
import fedprompt._refusals as check
from fedprompt.data import _arguments
from fedprompt.data._arguments import Alpha, Generator, Indices, Labels, numpy_generator
from fedprompt.data._counts import TOLERANCE, Shares, client_counts, deal, raised, smallest_client


def iid_shares(num_clients: int, num_classes: int) -> Shares:
    """Give every client the same share of every class.

    :func:`allocate` turns these shares into a stratified split. For a plain random split use
    :func:`~fedprompt.data.iid`.

    Args:
        num_clients: Number of clients, at least 1.
        num_classes: Number of classes, at least 1.

    Returns:
        A matrix (clients, classes) full of ``1 / num_clients``.

    Example:
        >>> iid_shares(2, 3)
        array([[0.5, 0.5, 0.5],
               [0.5, 0.5, 0.5]])
    """
    check.count("num_clients", num_clients)
    check.count("num_classes", num_classes)
    return np.full((num_clients, num_classes), 1 / num_clients)


def dirichlet_shares(
    num_clients: int,
    num_classes: int,
    *,
    alpha: Alpha,
    min_per_class: float = 0.0,
    generator: Generator,
) -> Shares:
    r"""Draw the shares of each class among the clients from a Dirichlet distribution.

    .. math:: (s_{1,c}, \dots, s_{M,c}) \sim \mathrm{Dir}(\alpha, \dots, \alpha)
              \quad \text{for each class } c

    With a small `alpha`, one client has most of a class. The share of a client is not capped. A
    cap depends on the sizes of classes: use :func:`~fedprompt.data.dirichlet` with ``capped=True``,
    and :func:`~fedprompt.data.class_shares` for the test set.

    Args:
        num_clients: Number of clients M, at least 1.
        num_classes: Number of classes, at least 1.
        alpha: Concentration, above 0 and at most 1e12. Usual values are 0.1, 0.3, 0.5 and 1. An
            array that broadcasts to (clients, classes) has one for each client and class.
        min_per_class: Smallest share of each class that a client has, at most ``1 / num_clients``.
            Smaller shares are raised to it, and the others are scaled down.
        generator: Source of randomness, of numpy or torch.

    Returns:
        A matrix (clients, classes) whose columns sum to 1.

    Example:
        >>> shares = dirichlet_shares(4, 10, alpha=0.3, generator=np.random.default_rng(0))
        >>> shares.shape, np.allclose(shares.sum(axis=0), 1)
        ((4, 10), True)

    References:
        Li et al., "Federated Learning on Non-IID Data Silos: An Experimental Study", ICDE 2022.
    """
    check.count("num_classes", num_classes)
    drawn = _arguments.concentrations(alpha, num_clients, num_classes)
    check.number("min_per_class", min_per_class, at_least=0.0, at_most=1 / num_clients)
    generator = numpy_generator(generator)
    shares = np.stack([generator.dirichlet(column) for column in drawn.T], axis=1)
    return raised(shares, float(min_per_class))


def pathological_shares(
    num_clients: int, num_classes: int, *, classes_per_client: int, generator: Generator
) -> Shares:
    r"""Give every client a few classes, and every class to the same number of clients.

    Each of the K classes has :math:`sM/K` slots, where s is `classes_per_client` and M the number
    of clients. The portions of its slots are drawn from U(0.4, 0.6) and normalized. Clients pick
    s different classes in turn, each time at random among the classes with the most slots left.

    Args:
        num_clients: Number of clients M, at least 1.
        num_classes: Number of classes K, at least 1.
        classes_per_client: Number of classes s of each client, at most K. The product s M must be
            divisible by K.
        generator: Source of randomness, of numpy or torch.

    Returns:
        A matrix (clients, classes) whose columns sum to 1. Each row has s positive entries, each
        column :math:`sM/K`.

    Raises:
        ValueError: If s is larger than K, or s M is not divisible by K.

    Example:
        >>> draw = np.random.default_rng(0)
        >>> shares = pathological_shares(6, 4, classes_per_client=2, generator=draw)
        >>> np.count_nonzero(shares, axis=1), np.count_nonzero(shares, axis=0)
        (array([2, 2, 2, 2, 2, 2]), array([3, 3, 3, 3]))

    References:
        Deng et al., "Unlocking the Potential of Prompt-Tuning in Bridging Generalized and
        Personalized Federated Learning" (SGPT), CVPR 2024. In the authors' code a client may draw
        one class twice; here it cannot.
    """
    check.count("num_clients", num_clients)
    check.count("num_classes", num_classes)
    check.count("classes_per_client", classes_per_client)
    generator = numpy_generator(generator)
    step = num_classes // gcd(num_classes, num_clients)
    if classes_per_client > num_classes or classes_per_client % step:
        fit = f"to fit {num_classes} classes and {num_clients} clients"
        rule = f"be a multiple of {step} up to {num_classes}, {fit}"
        raise check.wrong("classes_per_client", rule, classes_per_client)
    slots = classes_per_client * num_clients // num_classes
    portions = generator.uniform(0.4, 0.6, (slots, num_classes))
    portions /= portions.sum(axis=0)
    shares = np.zeros((num_clients, num_classes))
    left = np.full(num_classes, slots)
    # Picking one class at a time among those with the most slots left, none twice, equals taking
    # the first s in the order of slots left. The slots left of two classes never differ by more
    # than one, so every client finds at least s classes with a slot.
    for client in range(num_clients):
        picked = np.lexsort((generator.random(num_classes), -left))[:classes_per_client]
        left[picked] -= 1
        shares[client, picked] = portions[left[picked], picked]
    return shares


def class_shares(
    labels: Labels, clients: Sequence[Indices | Sequence[int]], num_classes: int
) -> Shares:
    """Return the share of each class that each client holds.

    Pass the shares of a partition of the training set to :func:`~fedprompt.data.allocate`, and the
    test set has the same mixes. This works for any partition without overlap, also for one that
    was drawn again for `min_size`, or capped.

    Args:
        labels: Classes in [0, classes) of at least one sample.
        clients: For each client the positions of its samples in `labels`.
        num_classes: Number of classes of the data set. It is required, because one of the two sets
            may lack the last class.

    Returns:
        A matrix (clients, classes). A class without samples has shares of 0.

    Example:
        >>> class_shares([0, 0, 1], [[0], [1, 2]], 3)
        array([[0.5, 0. , 0. ],
               [0.5, 1. , 0. ]])
    """
    check.count("num_classes", num_classes)
    array = _arguments.some_labels(labels, num_classes=num_classes)
    check.iterable("clients", clients, "index arrays")
    held = convert.positions(clients, len(array))
    check.some("clients", held, "have at least one client")
    if twice := int((np.bincount(np.concatenate(held), minlength=1) > 1).sum()):
        raise check.wrong("clients", "hold each sample at most once", f"{twice} held twice")
    counts = np.stack([np.bincount(array[own], minlength=num_classes) for own in held])
    return counts / np.maximum(np.bincount(array, minlength=num_classes), 1)


def allocate(
    labels: Labels,
    shares: Float[np.ndarray, "clients classes"],
    *,
    min_size: int | None = None,
    generator: Generator,
) -> list[Indices]:
    """Draw the samples of every client, class by class, in proportion to its shares.

    A client with share s of a class with n samples gets n s of them. The largest remainders are
    rounded up, so that no sample is lost, and ties are broken at random. If the shares of a class
    sum to less than 1, the rest is not assigned.

    Call the function for the training and the test set with the same shares.

    Args:
        labels: Classes in [0, classes) of at least one sample.
        shares: Shares (clients, classes), at least 0. Columns sum to at most 1.
        min_size: Smallest number of samples of a client. If None, empty clients are an error,
            because they cannot train. With 0 a client may be empty.
        generator: Source of randomness, of numpy or torch.

    Returns:
        For each client the positions of its samples in `labels`, ascending, int64.

    Raises:
        ValueError: If a client gets fewer than `min_size` samples. If `min_size` is None, the text
            names the empty clients.

    Example:
        >>> shares = np.array([[0.5, 1.0], [0.25, 0.0]])
        >>> allocate([0, 0, 0, 0, 1, 1], shares, generator=np.random.default_rng(0))
        [array([0, 2, 4, 5]), array([1])]
    """
    _check_shares(shares)
    check.optional(check.count, "min_size", min_size, at_least=0)
    generator = numpy_generator(generator)
    num_classes = shares.shape[1]
    array = _arguments.some_labels(labels, num_classes=num_classes)
    counts = client_counts(np.bincount(array, minlength=num_classes), shares, generator)
    if (smallest := smallest_client(counts, min_size)) < (min_size or 0):
        rule = f"be at most {smallest}, the size of the smallest client with these shares"
        raise check.wrong("min_size", rule, min_size)
    return deal(array, counts, generator)


def _check_shares(shares: Float[np.ndarray, "clients classes"]) -> None:
    fits = isinstance(shares, np.ndarray) and np.issubdtype(shares.dtype, np.floating)
    check.typed(fits, "shares", "be a floating-point array of shape (clients, classes)", shares)
    rule = "have shape (clients, classes) without an empty axis"
    check.require(shares.ndim == 2 and 0 not in shares.shape, "shares", rule, shares.shape)
    wrong = list(shares[~(np.isfinite(shares) & (shares >= 0))])
    check.nothing(wrong, "shares", "be finite and at least 0")
    total = shares.astype(np.float64).sum(axis=0)
    got = f"{total.max():g} for class {total.argmax()}"
    check.require(total.max() <= 1 + TOLERANCE, "shares", "sum to at most 1 in every column", got)
