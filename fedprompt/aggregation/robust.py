"""Aggregators that a minority cannot move far: order statistics of each coordinate."""

from collections.abc import Iterable
from itertools import accumulate

import torch
from torch import Tensor

from fedprompt._checks import check_number, check_weights, checked_layout, per_row, wrong_value
from fedprompt.aggregation._wide import WideSum
from fedprompt.aggregation.means import as_entry, check_alike
from fedprompt.interfaces import Weighted


def weighted_median(uploads: Iterable[Weighted], /) -> Weighted:
    r"""Take the median of every coordinate, each upload counting by the weight of its row.

    .. math:: \tilde v_{r,i} \in \arg\min_m \sum_k w_{k,r}\, |v_{k,r,i} - m|

    Where a whole interval is minimal, as between two uploads of equal weight, its midpoint is taken. Whoever holds less than half of the
    weight of a row cannot push any of its coordinates beyond what the others sent. A weight is the sender's claim: see :func:`cap_weight`.
    Evidence counts, not the number of uploads; but a median of medians is no median, so all uploads are held until the last has come.

    Args:
        uploads: At least one, all of the same shapes, dtypes and device. A row that holds NaN or infinity counts as weight 0: the
            minority that sends it must not stop the round.

    Returns:
        The median of each coordinate, with the total weight of the rows that counted; value 0 and weight 0 where there are none.

    Raises:
        TypeError: If an upload is not a :class:`Weighted` of floating-point tensors, or dtypes differ.
        ValueError: If `uploads` is empty, shapes or devices differ, or a weight is negative or not finite.

    Example:
        >>> uploads = [Weighted(torch.tensor([value]), torch.tensor(weight)) for value, weight in ((1.0, 2.0), (2.0, 3.0), (1e6, 1.0))]
        >>> weighted_median(uploads)
        Weighted(value=tensor([2.]), weight=tensor(6.))

    References:
        Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", ICML 2018.
    """
    value, weight, total, like = _sorted(uploads)
    seen = _running(weight)
    half = seen[-1] / 2
    lower, upper = (reached.byte().argmax(0, keepdim=True) for reached in (seen >= half, seen > half))
    first, second = value.gather(0, lower)[0], value.gather(0, upper)[0]
    middle = (first + second) / 2
    return as_entry(torch.where(middle.isfinite(), middle, first / 2 + second / 2), total, like=like)


def trimmed_mean(uploads: Iterable[Weighted], /, *, fraction: float) -> Weighted:
    r"""Average every coordinate without the lowest and the highest share of its weight.

    Sorted by value, the uploads of a coordinate lie side by side, each as wide as its weight; what lies within `fraction` of the total
    width from either end is cut off, through the middle of an upload where the cut falls there, and the rest is averaged. So evidence
    counts, not the number of uploads; `fraction` 0 is :func:`weighted_mean`, and towards 0.5 it becomes :func:`weighted_median`. Whoever
    holds less than `fraction` of the weight of a row cannot push any of its coordinates beyond what the others sent. At exactly that
    share rounding decides, and a sliver of a huge lie may stay in: leave a margin, such as 0.25 against a fifth.

    Args:
        uploads: At least one, all of the same shapes, dtypes and device; all are held. A row that holds NaN or infinity counts as weight 0.
        fraction: Of the weight, at each end, from 0 to 0.499.

    Returns:
        The mean of what is left of each coordinate, with the total weight of the rows that counted, trimmed parts included; value 0 and
        weight 0 where there are none.

    Raises:
        TypeError: If an upload is not a :class:`Weighted` of floating-point tensors, or dtypes differ.
        ValueError: If `fraction` is out of range, `uploads` is empty, shapes or devices differ, or a weight is negative or not finite.

    Example:
        A fifth of a weight of 5 is cut off at each end: all of the first upload, and 1 of the 2 of the last.

        >>> uploads = [Weighted(torch.tensor([value]), torch.tensor(weight)) for value, weight in ((0.0, 1.0), (2.0, 2.0), (5.0, 2.0))]
        >>> trimmed_mean(uploads, fraction=0.2)
        Weighted(value=tensor([3.]), weight=tensor(5.))

    References:
        Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", ICML 2018.
    """
    check_number("fraction", fraction, at_least=0, at_most=0.499)
    value, weight, total, like = _sorted(uploads)
    seen = _running(weight)
    low = fraction * seen[-1]
    kept = (torch.minimum(seen, seen[-1] - low) - torch.maximum(seen - weight, low)).clamp(min=0)
    sums = WideSum(torch.full_like(value[0], -0.0)), WideSum(torch.zeros_like(value[0]))  # -0.0 adds nothing, not even a sign
    for rows, share in zip(value, kept, strict=True):
        sums[0].add(rows, share)
        sums[1].add(share)
    middle = sums[0].over(sums[1])
    lowest, highest = (torch.where(kept > 0, value, bound) for bound in (torch.inf, -torch.inf))
    middle = middle.clamp(lowest.amin(0), highest.amax(0))  # rounding must not leave the range either
    return as_entry(middle, total, like=like)


def _sorted(uploads: Iterable[Weighted]) -> tuple[Tensor, Tensor, Tensor, Weighted]:
    """Values and weights of each coordinate by ascending value, clients first, the total weight of each row, and an upload to be like."""
    held: list[Weighted] = []
    for position, upload in enumerate(uploads):
        argument = f"uploads[{position}]"
        check_alike(argument, upload, held[0] if held else checked_layout(argument, upload))
        check_weights(argument, upload)
        held.append(upload)
    if not held:
        raise wrong_value("uploads", "hold at least one upload", "none")
    value = torch.stack([upload.value for upload in held]).double()
    weight = torch.stack([upload.weight for upload in held]).double()
    sound = value.isfinite().flatten(weight.ndim).all(-1) if value.ndim > weight.ndim else value.isfinite()
    weight = torch.where(sound, weight, 0.0)
    total = _running(weight)[-1]
    weight = torch.where(total.isfinite(), weight, weight * 2.0**-64)  # shares are all that counts below
    value, order = torch.where(per_row(weight > 0, value), value, 0.0).sort(0)
    return value, per_row(weight, value).expand_as(value).gather(0, order), total, held[0]


def _running(tensor: Tensor) -> Tensor:
    """Sums over clients, one after the other: an upload of weight 0 in between does not change a bit, nor does the device."""
    return torch.stack(list(accumulate(tensor)))
