"""Robust aggregators: the median and the trimmed mean of each coordinate."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import accumulate
from typing import overload

import torch
from torch import Tensor

import fedprompt._nouns as nouns
import fedprompt._refusals as check
from fedprompt._conversions import widened
from fedprompt.aggregation._payloads import aggregate
from fedprompt.aggregation._sums import as_entry, check_alike
from fedprompt.interfaces import Payload, Weighted
from fedprompt.interfaces.nouns import per_row


@overload
def weighted_median(entries: Iterable[Weighted], /) -> Weighted: ...
@overload
def weighted_median(entries: Iterable[Payload], /) -> dict[str, Weighted]: ...
def weighted_median(
    entries: Iterable[Weighted] | Iterable[Payload], /
) -> Weighted | dict[str, Weighted]:
    r"""Take the weighted median of each coordinate.

    .. math:: \tilde v_{r,i} \in \arg\min_m \sum_k w_{k,r}\, |v_{k,r,i} - m|

    If the minimum is an interval, as between two entries of equal weight, the result is its
    midpoint. Clients with less than half of the weight of a row cannot move any of its coordinates
    beyond the values of the other clients. Weights are self-reported, so cap them first
    (:func:`cap_weight`).

    Payloads are aggregated name by name. All entries are kept in memory, because a median of
    medians is not a median.

    Args:
        entries: Entries or payloads (at least one). All entries of a name have the same shapes,
            dtypes and device. A row that contains NaN or infinity has weight 0, so that a malicious
            client cannot stop the round.

    Returns:
        Median of each coordinate. Its weight is the total weight of the rows without NaN or
        infinity. Rows of total weight 0 have value 0.

    Raises:
        ValueError: If `entries` is empty, layouts differ, or a weight is negative or not finite.

    Example:
        >>> def entry(value, weight):
        ...     return Weighted(torch.tensor([value]), torch.tensor(weight))
        >>> entries = [entry(1.0, 2.0), entry(2.0, 3.0), entry(1e6, 1.0)]
        >>> weighted_median(entries)
        Weighted(value=tensor([2.]), weight=tensor(6.))

    References:
        Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", ICML
        2018.
    """
    return aggregate(entries, partial(_Entries, _median))


@overload
def trimmed_mean(entries: Iterable[Weighted], /, *, fraction: float) -> Weighted: ...
@overload
def trimmed_mean(entries: Iterable[Payload], /, *, fraction: float) -> dict[str, Weighted]: ...
def trimmed_mean(
    entries: Iterable[Weighted] | Iterable[Payload], /, *, fraction: float
) -> Weighted | dict[str, Weighted]:
    r"""Average each coordinate without the lowest and the highest `fraction` of its weight.

    An entry may be removed in part. With `fraction` 0, this is :func:`weighted_mean`. For
    `fraction` towards 0.5, it converges to :func:`weighted_median`.

    Clients with less than `fraction` of the weight of a row cannot move any of its coordinates
    beyond the values of the other clients. Leave a margin for rounding, such as 0.25 if a fifth may
    be malicious.

    Payloads are aggregated name by name. All entries are kept in memory.

    Args:
        entries: Entries or payloads (at least one). All entries of a name have the same shapes,
            dtypes and device. A row that contains NaN or infinity has weight 0.
        fraction: Share of the weight to remove at each end (from 0 to 0.499).

    Returns:
        Trimmed mean of each coordinate. Its weight is the total weight of the rows without NaN or
        infinity, including the removed weight. Rows of total weight 0 have value 0.

    Raises:
        ValueError: If `fraction` is out of range, `entries` is empty, layouts differ, or a weight
            is negative or not finite.

    Example:
        A fifth of the total weight 5 is removed at each end. This is the first entry, and half of
        the last one.

        >>> def entry(value, weight):
        ...     return Weighted(torch.tensor([value]), torch.tensor(weight))
        >>> entries = [entry(0.0, 1.0), entry(2.0, 2.0), entry(5.0, 2.0)]
        >>> trimmed_mean(entries, fraction=0.2)
        Weighted(value=tensor([3.]), weight=tensor(5.))

    References:
        Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", ICML
        2018.
    """
    check.number("fraction", fraction, at_least=0, at_most=0.499)
    return aggregate(entries, partial(_Entries, partial(_trimmed, fraction=fraction)))


class _Entries:
    """Statistic that keeps all entries of one name and applies a rule to them."""

    def __init__(self, rule: Callable[[list[Weighted]], Weighted], first: Weighted) -> None:
        self.rule = rule
        self.first = first
        self.entries: list[Weighted] = []

    def add(self, argument: str, entry: Weighted) -> None:
        check_alike(argument, entry, self.first)
        nouns.weights(argument, entry)
        self.entries.append(entry)

    def result(self) -> Weighted:
        return self.rule(self.entries)


def _median(entries: list[Weighted]) -> Weighted:
    value, weight, total = _sorted(entries)
    seen = _running(weight)
    half = seen[-1] / 2
    first = (reached.byte().argmax(0, keepdim=True) for reached in (seen >= half, seen > half))
    lower, upper = (value.gather(0, position)[0] for position in first)
    middle = (lower + upper) / 2
    middle = torch.where(middle.isfinite(), middle, lower / 2 + upper / 2)  # the sum may overflow
    return as_entry(middle, total, like=entries[0])


def _trimmed(entries: list[Weighted], *, fraction: float) -> Weighted:
    value, weight, total = _sorted(entries)
    seen = _running(weight)
    low = fraction * seen[-1]
    share = (torch.minimum(seen, seen[-1] - low) - torch.maximum(seen - weight, low)).clamp(min=0)
    kept = _running(share)[-1]
    kept = torch.where(kept > 0, kept, 1.0)
    mean = _running(value * share)[-1] / kept
    mean = torch.where(mean.isfinite(), mean, _running(value * (share / kept))[-1])  # an overflow
    # Rounding must not move the mean out of the range of the remaining entries.
    lowest = torch.where(share > 0, value, torch.inf).amin(0)
    highest = torch.where(share > 0, value, -torch.inf).amax(0)
    return as_entry(mean.clamp(lowest, highest), total, like=entries[0])


def _sorted(entries: list[Weighted]) -> tuple[Tensor, Tensor, Tensor]:
    """Sort each coordinate over clients (axis 0); return values, weights, total row weights."""
    value = widened(torch.stack([entry.value for entry in entries]))
    weight = widened(torch.stack([entry.weight for entry in entries]))
    finite = value.isfinite()[..., None].flatten(weight.ndim).all(-1)
    weight = torch.where(finite, weight, 0.0)
    total = _running(weight)[-1]
    # If the total overflows, weights are scaled down. Only their shares matter below.
    weight = torch.where(total.isfinite(), weight, weight * 2.0**-64)
    value, order = torch.where(per_row(weight > 0, value), value, 0.0).sort(0)
    return value, per_row(weight, value).expand_as(value).gather(0, order), total


def _running(tensor: Tensor) -> Tensor:
    """Sum over clients one by one, so that the result is bitwise identical on every device."""
    return torch.stack(list(accumulate(tensor)))
