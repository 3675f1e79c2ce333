"""Samples of each client, from shares: whole counts first, then a random draw."""

import numpy as np
from jaxtyping import Float

import fedprompt._refusals as check
from fedprompt.data._arguments import Generator, Indices, Labels, numpy_generator, some_labels
from fedprompt.data._counts import TOLERANCE, client_counts, deal, smallest_client


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
    array = some_labels(labels, num_classes=num_classes)
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
