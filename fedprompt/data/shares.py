"""How much of each class each client gets: a matrix (clients, classes), apart from any data set.

Draw the shares once and hand them to :func:`allocate` for the training set and again for the test set: then every client is tested on
its own mix of classes.
"""

from math import gcd

import numpy as np
from jaxtyping import Float64

from fedprompt._checks import check_count, check_number, wrong_value
from fedprompt.data._arguments import check_generator

Shares = Float64[np.ndarray, "clients classes"]


def iid_shares(num_classes: int, num_clients: int) -> Shares:
    """Give every client the same share of every class; nothing is random here.

    :func:`allocate` makes of it a stratified split; for a plain random one take :func:`iid`.

    Args:
        num_classes: At least 1.
        num_clients: At least 1.

    Returns:
        A matrix (clients, classes) full of ``1 / num_clients``.

    Raises:
        TypeError: If a number is not an integer.
        ValueError: If a number is below 1.

    Example:
        >>> iid_shares(3, 2)
        array([[0.5, 0.5, 0.5],
               [0.5, 0.5, 0.5]])
    """
    check_count("num_classes", num_classes)
    check_count("num_clients", num_clients)
    return np.full((num_clients, num_classes), 1 / num_clients)


def dirichlet_shares(num_classes: int, num_clients: int, *, alpha: float, generator: np.random.Generator) -> Shares:
    r"""Draw the shares of each class among the clients from a symmetric Dirichlet distribution.

    .. math:: (s_{1,c}, \dots, s_{M,c}) \sim \mathrm{Dir}(\alpha, \dots, \alpha) \quad \text{for each class } c

    A small `alpha` gives most of a class to one client, a large one gives all clients alike. Nothing limits how much one client may get:
    this is the plain distribution, without the cap on large clients that some benchmark code adds.

    Args:
        num_classes: At least 1.
        num_clients: M, at least 1.
        alpha: Above 0 and at most 1e12; the field's usual values are 0.1, 0.3, 0.5 and 1.
        generator: Source of randomness.

    Returns:
        A matrix (clients, classes) whose columns sum to 1.

    Raises:
        TypeError: If a number is not an integer, `alpha` not a number, or `generator` not a numpy Generator.
        ValueError: If a number is below 1 or `alpha` outside its range.

    Example:
        >>> shares = dirichlet_shares(10, 4, alpha=0.3, generator=np.random.default_rng(0))
        >>> shares.shape, np.allclose(shares.sum(axis=0), 1)
        ((4, 10), True)

    References:
        Li et al., "Federated Learning on Non-IID Data Silos: An Experimental Study", ICDE 2022.
    """
    check_count("num_classes", num_classes)
    check_count("num_clients", num_clients)
    check_number("alpha", alpha, above=0.0, at_most=1e12)  # numpy's sums overflow to shares of 0 near 1e308
    check_generator(generator)
    return generator.dirichlet(np.full(num_clients, float(alpha)), size=num_classes).T.copy()


def pathological_shares(num_classes: int, num_clients: int, *, classes_per_client: int, generator: np.random.Generator) -> Shares:
    r"""Give every client a few classes, and every class to equally many clients.

    Each of the K classes has :math:`sM/K` slots, where s is `classes_per_client` and M the number of clients. Their portions are drawn from
    U(0.4, 0.6) and normalized. Clients in turn pick s different classes, each time one of those with the most slots left, by lot.

    Args:
        num_classes: K, at least 1.
        num_clients: M, at least 1.
        classes_per_client: s, at most K, with s M divisible by K.
        generator: Source of randomness.

    Returns:
        A matrix (clients, classes) whose columns sum to 1, with exactly s positive entries in each row and :math:`sM/K` in each column.

    Raises:
        TypeError: If a number is not an integer or `generator` not a numpy Generator.
        ValueError: If a number is below 1, s is larger than K, or s M is not divisible by K.

    Example:
        >>> shares = pathological_shares(4, 6, classes_per_client=2, generator=np.random.default_rng(0))
        >>> np.count_nonzero(shares, axis=1), np.count_nonzero(shares, axis=0)
        (array([2, 2, 2, 2, 2, 2]), array([3, 3, 3, 3]))

    References:
        Deng et al., "Unlocking the Potential of Prompt-Tuning in Bridging Generalized and Personalized Federated Learning" (SGPT), CVPR
        2024; in its code a client may draw one class twice, here it cannot.
    """
    check_count("num_classes", num_classes)
    check_count("num_clients", num_clients)
    check_count("classes_per_client", classes_per_client)
    check_generator(generator)
    step = num_classes // gcd(num_classes, num_clients)
    if classes_per_client > num_classes or classes_per_client % step:
        rule = f"be a multiple of {step} up to {num_classes}, to fit {num_classes} classes and {num_clients} clients"
        raise wrong_value("classes_per_client", rule, classes_per_client)
    slots = classes_per_client * num_clients // num_classes
    portions = generator.uniform(0.4, 0.6, (slots, num_classes))
    portions /= portions.sum(axis=0)
    shares = np.zeros((num_clients, num_classes))
    left = np.full(num_classes, slots)
    # To pick one class at a time among those with the most slots left, none of them twice, is to take the first s in the order of slots
    # left. The slots left of two classes never differ by more than one, so no client ever meets fewer than s classes with a slot.
    for client in range(num_clients):
        picked = np.lexsort((generator.random(num_classes), -left))[:classes_per_client]
        left[picked] -= 1
        shares[client, picked] = portions[left[picked], picked]
    return shares
