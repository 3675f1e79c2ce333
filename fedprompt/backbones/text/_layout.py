"""Rows of a text tower: a prefix, and after it the suffixes of one or several classes."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

_LARGEST_PADDING = 16
"""The lengths of one run differ by at most a 16th of a row."""


class Layout(NamedTuple):
    """Arrangement of the classes of one run. All rows have the same one.

    Attributes:
        source: Suffix token ``(rows, suffix)`` at each place of each row, counted over the
            flattened axes ``(classes, length)``.
        owner: Class within the row ``(seq,)`` of each token, from 1. 0 for the prefix.
        position: Position ``(seq,)`` of each token in its sentence.
        read: Token ``(rows, places)`` at which each class of a row is read. The classes of the
            run are those of the first place of all rows, then those of the next place.
    """

    source: Int[Tensor, "rows suffix"]
    owner: Int[Tensor, " seq"]
    position: Int[Tensor, " seq"]
    read: Int[Tensor, "rows places"]


def best_suffix(shared: int, dim: int) -> int:
    """Choose the number of suffix tokens that follow one copy of the prefix.

    Let a row have n suffix tokens. The prefix costs shared / n for each of them. Attention scores
    between different classes, which are masked, cost n * 4 dim relative to the 32 dim^2 of all
    other work. The sum is smallest at n^2 = 8 shared dim.
    """
    return max(1, round(math.sqrt(8 * shared * dim)))


def best_rows(lengths: Sequence[int], *, shared: int, dim: int) -> int:
    """Choose the number of rows for the classes of one run, from the longest to the shortest.

    The cost of a row is that of :func:`best_suffix`, with the padding included.
    """
    num_classes = len(lengths)
    places = round(num_classes * best_suffix(shared, dim) / sum(lengths))
    nearby = range(max(1, places - 2), min(num_classes, places + 2) + 1)

    def cost(rows: int) -> int:
        seq = shared + sum(lengths[::rows])
        return rows * seq * (8 * dim + seq)

    return min((math.ceil(num_classes / number) for number in nearby), key=cost, default=1)


def runs(lengths: Sequence[int], *, suffix: int, most: int | None = None) -> Iterator[list[int]]:
    """Split classes, from the longest to the shortest, into runs of nearly equal length.

    Args:
        lengths: Number of suffix tokens of each class.
        suffix: Number of suffix tokens of a row. A run fills rows of this number, so the padding
            of each row is at most the difference between its longest and its shortest class.
        most: Maximum number of classes of a run. If None, a run may contain all classes.
    """
    run: list[int] = []
    for number in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        full = len(run) == most
        if run and (full or (lengths[run[0]] - lengths[number]) * _LARGEST_PADDING > suffix):
            yield run
            run = []
        run.append(number)
    yield run


def layout(
    run: Sequence[int],
    lengths: Sequence[int],
    ends: Sequence[int],
    *,
    shared: int,
    stride: int,
    rows: int,
) -> Layout:
    """Deal classes over rows, so that the classes at one place of all rows have similar lengths.

    Each place is as wide as its longest class, so one layout and one mask fit all rows.

    Args:
        run: Classes, from the longest to the shortest.
        lengths: Number of suffix tokens of each class.
        ends: Position at which each class is read, counted from the start of the prefix.
        shared: Number of tokens of the prefix.
        stride: Number of suffix tokens of each class, padding included.
        rows: Number of rows, at most the number of classes.
    """
    widths = [lengths[number] for number in run[::rows]]
    starts = [sum(widths[:place]) for place in range(len(widths))]
    missing = len(widths) * rows - len(run)  # the last place repeats a class that nothing reads
    classes = torch.tensor([*run, *[run[-1]] * missing]).reshape(len(widths), rows)
    place = torch.cat([torch.full((width,), number) for number, width in enumerate(widths)])
    offset = torch.cat([torch.arange(width) for width in widths])
    return Layout(
        source=(classes[place] * stride + offset[:, None]).T,
        owner=F.pad(place + 1, (shared, 0)),
        position=torch.cat([torch.arange(shared), shared + offset]),
        read=torch.tensor(starts) + torch.tensor(ends)[classes].T,
    )


def mask(
    owner: Int[Tensor, " seq"], position: Int[Tensor, " seq"], dtype: torch.dtype
) -> Float[Tensor, "seq seq"]:
    """Mask all but the earlier tokens of the prefix and of the same class."""
    same_sentence = (owner[None] == owner[:, None]) | (owner[None] == 0)
    attended = same_sentence & (position[None] <= position[:, None])
    scores = torch.zeros(attended.shape, dtype=dtype, device=attended.device)
    return scores.masked_fill(~attended, -torch.inf)
