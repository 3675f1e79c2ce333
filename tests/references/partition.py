"""Slow partition rules, in exact fractions and one step at a time."""

from collections import Counter
from collections.abc import Iterable, Sequence
from fractions import Fraction
from math import floor

import numpy as np


def largest_remainders(weights: Sequence[int], total: int) -> list[set[int]]:
    """Return the numbers that each holder may get of `total` things, in proportion to `weights`.

    There is one number, or two if equal remainders compete for the last thing.
    """
    quotas = [Fraction(weight, sum(weights)) * total for weight in weights]
    left = total - sum(floor(quota) for quota in quotas)
    remainders = sorted((quota - floor(quota) for quota in quotas), reverse=True)
    allowed = []
    for quota in quotas:
        remainder = quota - floor(quota)
        certain = left > 0 and sum(other >= remainder for other in remainders) <= left
        possible = left > 0 and sum(other > remainder for other in remainders) < left
        allowed.append(
            {floor(quota) + 1}
            if certain
            else {floor(quota), floor(quota) + 1}
            if possible
            else {floor(quota)}
        )
    return allowed


def is_fair_picking(picks: Sequence[Iterable[int]], num_classes: int, slots: int) -> bool:
    """Return whether every pick of the clients was fair.

    A fair pick is one of the classes with the most slots left, among the classes that the client
    does not have yet. Clients pick one after another.
    """
    left = [slots] * num_classes
    for client in picks:
        mine = list(client)
        if len(set(mine)) != len(mine):
            return False
        others = [left[label] for label in range(num_classes) if label not in mine]
        # A pick is fair if no other class has more slots left than the picked class had.
        if others and max(others) > min(left[label] for label in mine):
            return False
        for label in mine:
            left[label] -= 1
    return min(left) >= 0


def class_counts(
    labels: Sequence[int], owned: Sequence[Sequence[int]], num_classes: int
) -> list[list[int]]:
    """Count the samples of each class that each client owns."""
    counters = [Counter(labels[position] for position in mine) for mine in owned]
    return [[counter[label] for label in range(num_classes)] for counter in counters]


def capped_dirichlet(
    class_sizes: Sequence[int], num_clients: int, alpha: float, generator: np.random.Generator
) -> np.ndarray:
    """Count samples (clients, classes) as benchmarks do: zero the shares of full clients."""
    counts = np.zeros((num_clients, 0), dtype=int)
    for size in class_sizes:
        shares = generator.gamma(alpha, size=num_clients)
        shares *= counts.sum(1) < sum(class_sizes) / num_clients
        cuts = (shares.cumsum() / shares.sum() * size).astype(int)[:-1]
        counts = np.column_stack([counts, np.diff([0, *cuts, size])])
    return counts


def least(shares: np.ndarray, minimum: float) -> np.ndarray:
    """Find by bisection the factor with which shares of at least `minimum` sum to 1."""
    low, high = 0.0, 1.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (
            (low, middle) if np.maximum(minimum, middle * shares).sum() > 1 else (middle, high)
        )
    return np.maximum(minimum, low * shares)
