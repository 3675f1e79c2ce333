"""Whole numbers of samples for each client and class, and their random draw."""

from collections.abc import Callable

import numpy as np
from jaxtyping import Float, Float64, Int64

import fedprompt._refusals as check
from fedprompt.data._arguments import Indices

Counts = Int64[np.ndarray, "holders classes"]
Shares = Float64[np.ndarray, "clients classes"]
Sizes = Int64[np.ndarray, " classes"]

TOLERANCE = 1e-6
"""Distance from 1 within which the sum of a column counts as 1, for float32 shares."""

DRAWS = 1000
"""Number of times that counts are drawn before `min_size` is given up."""


def minimum_counts(min_per_class: float, class_sizes: Sizes, holders: int) -> Sizes:
    """Count the samples of each class that each of some holders has at least."""
    check.number("min_per_class", min_per_class, at_least=0)
    of = np.ones_like(class_sizes) if isinstance(min_per_class, int | np.integer) else class_sizes
    # Rounded first, because .29 * 100 is below 29.
    least = np.floor(np.round(min_per_class * of, 6)).astype(np.int64)
    if (short := least * holders > class_sizes).any():
        there = f"{holders} clients and {class_sizes[short][0]} samples of a class"
        raise check.wrong("min_per_class", f"be small enough for {there}", min_per_class)
    return least


def raised(shares: Shares, least: Float64[np.ndarray, "..."] | float) -> Shares:
    """Raise shares to the least ones, and scale the others down; columns sum to 1 as before."""
    low = np.zeros(shares.shape, dtype=bool)
    scaled = shares
    while (scaled < least).any():
        low |= scaled < least
        rest = np.where(low, 0.0, shares)
        free = (1 - least * low.sum(axis=0)) / np.maximum(rest.sum(axis=0), 1e-300)
        scaled = np.where(low, least, rest * free)
    return scaled


def drawn_counts(
    draw: Callable[[], Counts], num_samples: int, num_clients: int, min_size: int | None
) -> Counts:
    """Draw counts until each client has `min_size` samples."""
    least, best = 0 if min_size is None else min_size, 0
    equal = f"an equal part of {num_samples} samples"
    check.count("min_size", least, at_least=0, at_most=num_samples // num_clients, of=equal)
    for _ in range(DRAWS):
        counts = draw()
        smallest = smallest_client(counts, min_size)
        if smallest >= least:
            return counts
        best = max(best, smallest)
    rule = f"be at most {best}, the best minimum in {DRAWS} draws with this `alpha`"
    raise check.wrong("min_size", rule, min_size)


def smallest_client(counts: Counts, min_size: int | None) -> int:
    """Return the size of the smallest client; without `min_size`, no client may be empty."""
    sizes = counts[:-1].sum(axis=1)
    empty = np.flatnonzero(sizes == 0).tolist()
    if min_size is None and empty:
        rule = "be 0 to allow empty clients, or in `dirichlet` at least 1 to draw again"
        shown = ", ".join(map(str, empty[:10])) + (", ..." if len(empty) > 10 else "")
        got = f"None, and {len(empty)} of {len(sizes)} clients have no samples: {shown}"
        raise check.wrong("min_size", rule, got)
    return int(sizes.min())


def client_counts(
    class_sizes: Sizes, shares: Float[np.ndarray, "clients classes"], generator: np.random.Generator
) -> Counts:
    """Count the samples of each class for each client; the last row counts unassigned samples."""
    total = shares.astype(np.float64).sum(axis=0)
    whole = np.abs(total - 1) <= TOLERANCE
    shares = shares / np.where(whole, total, 1.0)
    rest = np.where(whole, 0.0, 1 - total)
    return round_to_total(np.vstack((shares, rest)) * class_sizes, class_sizes, generator)


def round_to_total(
    quotas: Float64[np.ndarray, "holders classes"], totals: Sizes, generator: np.random.Generator
) -> Counts:
    """Round columns to whole numbers of given totals, by largest remainders, ties at random."""
    counts: Counts = np.floor(quotas).astype(np.int64)
    order = np.lexsort((generator.random(quotas.shape), counts - quotas), axis=0)
    rank = np.argsort(order, axis=0)
    counts[rank < totals - counts.sum(axis=0)] += 1
    return counts


def fill(
    mix: Float64[np.ndarray, " classes"],
    class_sizes: Sizes,
    size: int,
    generator: np.random.Generator,
) -> Sizes:
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


def deal(
    labels: Int64[np.ndarray, " samples"], counts: Counts, generator: np.random.Generator
) -> list[Indices]:
    """Deal the samples of each class at random by `counts`; the last row is left out."""
    owner = np.empty(len(labels), dtype=np.int64)
    by_class = np.split(np.argsort(labels, kind="stable"), np.cumsum(counts.sum(axis=0))[:-1])
    for members, column in zip(by_class, counts.T, strict=True):
        owner[members] = generator.permutation(np.repeat(np.arange(len(counts)), column))
    return owned(owner, len(counts) - 1)


def owned(owner: Int64[np.ndarray, " samples"], num_clients: int) -> list[Indices]:
    """List for each client the positions where it is the owner, ascending."""
    ends = np.cumsum(np.bincount(owner, minlength=num_clients))
    return np.split(np.argsort(owner, kind="stable"), ends)[:num_clients]
