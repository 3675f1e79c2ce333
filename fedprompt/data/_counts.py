"""Whole numbers of samples for each client and class, and their random draw."""

import numpy as np
from jaxtyping import Float, Float64, Int64

import fedprompt._checks as check
from fedprompt.data._arguments import Indices

Counts = Int64[np.ndarray, "holders classes"]

TOLERANCE = 1e-6
"""Distance from 1 within which the sum of a column counts as 1, for float32 shares."""


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
    class_sizes: Int64[np.ndarray, " classes"],
    shares: Float[np.ndarray, "clients classes"],
    generator: np.random.Generator,
) -> Counts:
    """Count the samples of each class for each client; the last row counts unassigned samples."""
    total = shares.astype(np.float64).sum(axis=0)
    whole = np.abs(total - 1) <= TOLERANCE
    shares = shares / np.where(whole, total, 1.0)
    rest = np.where(whole, 0.0, 1 - total)
    return round_to_total(np.vstack((shares, rest)) * class_sizes, class_sizes, generator)


def round_to_total(
    quotas: Float64[np.ndarray, "holders classes"],
    totals: Int64[np.ndarray, " classes"],
    generator: np.random.Generator,
) -> Counts:
    """Round columns to whole numbers of given totals, by largest remainders, ties at random."""
    counts: Counts = np.floor(quotas).astype(np.int64)
    order = np.lexsort((generator.random(quotas.shape), counts - quotas), axis=0)
    rank = np.argsort(order, axis=0)
    counts[rank < totals - counts.sum(axis=0)] += 1
    return counts


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
