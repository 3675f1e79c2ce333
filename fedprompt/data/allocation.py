"""Samples of each client, from shares: whole counts first, then a random draw."""

import numpy as np
from jaxtyping import Float, Float64, Int64

from fedprompt._checks import check_count, kind, wrong_type, wrong_value
from fedprompt.data._arguments import Generator, Indices, Labels, numpy_generator, some_labels

_Counts = Int64[np.ndarray, "holders classes"]

_TOLERANCE = 1e-6
"""Distance from 1 within which the sum of a column counts as 1, for float32 shares."""


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
    check_min_size(min_size)
    generator = numpy_generator(generator)
    num_clients, num_classes = shares.shape
    array = some_labels(labels, num_classes=num_classes)
    counts = client_counts(np.bincount(array, minlength=num_classes), shares, generator)
    if min_size is None:
        check_occupied(counts)
    elif (smallest := int(counts[:num_clients].sum(axis=1).min())) < min_size:
        rule = f"be at most {smallest}, the size of the smallest client with these shares"
        raise wrong_value("min_size", rule, min_size)
    return deal(array, counts, generator)


def check_min_size(min_size: object) -> None:
    """Require None or a number of samples."""
    if min_size is not None:
        check_count("min_size", min_size, at_least=0)


def check_occupied(counts: _Counts) -> None:
    """Require a sample for each client, because `min_size` does not say that some may be empty."""
    empty = np.flatnonzero(counts[:-1].sum(axis=1) == 0).tolist()
    if empty:
        rule = "be 0 to allow empty clients, or in `dirichlet` at least 1 to draw again"
        shown = ", ".join(map(str, empty[:10])) + (", ..." if len(empty) > 10 else "")
        got = f"None, and {len(empty)} of {len(counts) - 1} clients have no samples: {shown}"
        raise wrong_value("min_size", rule, got)


def client_counts(
    class_sizes: Int64[np.ndarray, " classes"],
    shares: Float[np.ndarray, "clients classes"],
    generator: np.random.Generator,
) -> _Counts:
    """Count the samples of each class for each client; the last row counts unassigned samples."""
    total = shares.astype(np.float64).sum(axis=0)
    whole = np.abs(total - 1) <= _TOLERANCE
    shares = shares / np.where(whole, total, 1.0)
    rest = np.where(whole, 0.0, 1 - total)
    return round_to_total(np.vstack((shares, rest)) * class_sizes, class_sizes, generator)


def round_to_total(
    quotas: Float64[np.ndarray, "holders classes"],
    totals: Int64[np.ndarray, " classes"],
    generator: np.random.Generator,
) -> _Counts:
    """Round columns to whole numbers of given totals, by largest remainders, ties at random."""
    counts: _Counts = np.floor(quotas).astype(np.int64)
    order = np.lexsort((generator.random(quotas.shape), counts - quotas), axis=0)
    rank = np.argsort(order, axis=0)
    counts[rank < totals - counts.sum(axis=0)] += 1
    return counts


def deal(
    labels: Int64[np.ndarray, " samples"], counts: _Counts, generator: np.random.Generator
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


def _check_shares(shares: Float[np.ndarray, "clients classes"]) -> None:
    if not isinstance(shares, np.ndarray) or not np.issubdtype(shares.dtype, np.floating):
        rule = "be a floating-point array of shape (clients, classes)"
        raise wrong_type("shares", rule, kind(shares))
    if shares.ndim != 2 or 0 in shares.shape:
        rule = "have shape (clients, classes) without an empty axis"
        raise wrong_value("shares", rule, shares.shape)
    if not np.isfinite(shares).all() or shares.min() < 0:
        bad = shares[~(np.isfinite(shares) & (shares >= 0))]
        raise wrong_value("shares", "be finite and at least 0", bad[0])
    total = shares.astype(np.float64).sum(axis=0)
    if total.max() > 1 + _TOLERANCE:
        got = f"{total.max():g} for class {total.argmax()}"
        raise wrong_value("shares", "sum to at most 1 in every column", got)
