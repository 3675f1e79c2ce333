"""Aggregators that a minority cannot move far: order statistics of each coordinate."""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import accumulate
from typing import overload

import torch
from torch import Tensor

from fedprompt._checks import check_number, check_weights, per_row
from fedprompt.aggregation._mapped import aggregate
from fedprompt.aggregation._wide import WideSum
from fedprompt.aggregation.means import as_entry, check_alike
from fedprompt.interfaces import Payload, Weighted


@overload
def weighted_median(entries: Iterable[Weighted], /) -> Weighted: ...
@overload
def weighted_median(entries: Iterable[Payload], /) -> dict[str, Weighted]: ...
def weighted_median(
    entries: Iterable[Weighted] | Iterable[Payload], /
) -> Weighted | dict[str, Weighted]:
    r"""Take the median of every coordinate, each entry counting by the weight of its row.

    .. math:: \tilde v_{r,i} \in \arg\min_m \sum_k w_{k,r}\, |v_{k,r,i} - m|

    Where a whole interval is minimal, as between two entries of equal weight, its midpoint is taken.
    Clients with less than half of the weight of a row cannot move any of its coordinates beyond the
    values of the other clients. Weights are self-reported: see :func:`cap_weight`. Payloads are
    aggregated name by name. A median of medians is not a median, so all entries are held.

    Args:
        entries: Entries, or payloads; at least one. All entries of a name have the same shapes, dtypes
            and device. A row that contains NaN or infinity counts as weight 0, so that a minority
            cannot stop the round.

    Returns:
        Median of each coordinate, with the total weight of the rows that counted; value 0 and weight 0
        where there are none.

    Raises:
        ValueError: If `entries` is empty, layouts differ, or a weight is negative or not finite.

    Example:
        >>> sent = ((1.0, 2.0), (2.0, 3.0), (1e6, 1.0))
        >>> entries = [Weighted(torch.tensor([value]), torch.tensor(weight)) for value, weight in sent]
        >>> weighted_median(entries)
        Weighted(value=tensor([2.]), weight=tensor(6.))

    References:
        Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", ICML 2018.
    """
    return aggregate(entries, partial(_Held, _median))


@overload
def trimmed_mean(entries: Iterable[Weighted], /, *, fraction: float) -> Weighted: ...
@overload
def trimmed_mean(entries: Iterable[Payload], /, *, fraction: float) -> dict[str, Weighted]: ...
def trimmed_mean(
    entries: Iterable[Weighted] | Iterable[Payload], /, *, fraction: float
) -> Weighted | dict[str, Weighted]:
    r"""Average every coordinate without the lowest and the highest share of its weight.

    The entries of a coordinate are sorted by value. A share `fraction` of the total weight is cut off
    at each end, through an entry where the cut falls there, and the rest is averaged. With `fraction` 0
    this is :func:`weighted_mean`; towards 0.5 it becomes :func:`weighted_median`. Payloads are
    aggregated name by name.

    Clients with less than `fraction` of the weight of a row cannot move any of its coordinates beyond
    the values of the other clients. At exactly that share rounding decides, and a small part of an
    outlier may remain. Leave a margin, such as 0.25 against a fifth.

    Args:
        entries: Entries, or payloads; at least one, all held. All entries of a name have the same
            shapes, dtypes and device. A row that contains NaN or infinity counts as weight 0.
        fraction: Share of the weight at each end, from 0 to 0.499.

    Returns:
        Mean of the rest of each coordinate, with the total weight of the rows that counted, trimmed
        parts included; value 0 and weight 0 where there are none.

    Raises:
        ValueError: If `fraction` is out of range, `entries` is empty, layouts differ, or a weight is
            negative or not finite.

    Example:
        A fifth of a weight of 5 is cut off at each end: all of the first entry, and 1 of the 2 of the last.

        >>> sent = ((0.0, 1.0), (2.0, 2.0), (5.0, 2.0))
        >>> entries = [Weighted(torch.tensor([value]), torch.tensor(weight)) for value, weight in sent]
        >>> trimmed_mean(entries, fraction=0.2)
        Weighted(value=tensor([3.]), weight=tensor(5.))

    References:
        Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", ICML 2018.
    """
    check_number("fraction", fraction, at_least=0, at_most=0.499)
    return aggregate(entries, partial(_Held, partial(_trimmed, fraction=fraction)))


class _Held:
    """All entries of one name, for a rule that needs them at once."""

    def __init__(self, rule: Callable[[list[Weighted]], Weighted], first: Weighted) -> None:
        self.rule = rule
        self.first = first
        self.held: list[Weighted] = []

    def add(self, argument: str, entry: Weighted) -> None:
        check_alike(argument, entry, self.first)
        check_weights(argument, entry)
        self.held.append(entry)

    def result(self) -> Weighted:
        return self.rule(self.held)


def _median(held: list[Weighted]) -> Weighted:
    value, weight, total = _sorted(held)
    seen = _running(weight)
    half = seen[-1] / 2
    lower, upper = (
        reached.byte().argmax(0, keepdim=True) for reached in (seen >= half, seen > half)
    )
    first, second = value.gather(0, lower)[0], value.gather(0, upper)[0]
    middle = (first + second) / 2
    return as_entry(
        torch.where(middle.isfinite(), middle, first / 2 + second / 2), total, like=held[0]
    )


def _trimmed(held: list[Weighted], *, fraction: float) -> Weighted:
    value, weight, total = _sorted(held)
    seen = _running(weight)
    low = fraction * seen[-1]
    kept = (torch.minimum(seen, seen[-1] - low) - torch.maximum(seen - weight, low)).clamp(min=0)
    sums = (
        WideSum(torch.full_like(value[0], -0.0)),
        WideSum(torch.zeros_like(value[0])),
    )  # -0.0 adds nothing, not even a sign
    for rows, share in zip(value, kept, strict=True):
        sums[0].add(rows, share)
        sums[1].add(share)
    middle = sums[0].over(sums[1])
    lowest, highest = (torch.where(kept > 0, value, bound) for bound in (torch.inf, -torch.inf))
    middle = middle.clamp(
        lowest.amin(0), highest.amax(0)
    )  # rounding must not leave the range either
    return as_entry(middle, total, like=held[0])


def _sorted(held: list[Weighted]) -> tuple[Tensor, Tensor, Tensor]:
    """Values and weights of each coordinate by ascending value, clients first, and the total weight of each row."""
    value = torch.stack([entry.value for entry in held]).double()
    weight = torch.stack([entry.weight for entry in held]).double()
    sound = (
        value.isfinite().flatten(weight.ndim).all(-1)
        if value.ndim > weight.ndim
        else value.isfinite()
    )
    weight = torch.where(sound, weight, 0.0)
    total = _running(weight)[-1]
    weight = torch.where(
        total.isfinite(), weight, weight * 2.0**-64
    )  # shares are all that counts below
    value, order = torch.where(per_row(weight > 0, value), value, 0.0).sort(0)
    return value, per_row(weight, value).expand_as(value).gather(0, order), total


def _running(tensor: Tensor) -> Tensor:
    """Sums over clients in their order, bitwise identical with entries of weight 0 in between and on every device."""
    return torch.stack(list(accumulate(tensor)))
