"""The weighted mean of entries or payloads, one client at a time."""

import math
from collections.abc import Iterable
from typing import overload

import torch
from torch import Tensor

from fedprompt._checks import (
    check_rows,
    checked_layout,
    known_rows,
    per_row,
    wrong_type,
    wrong_value,
)
from fedprompt._float64 import rounded, wide_zeros, widened
from fedprompt.aggregation._payloads import aggregate
from fedprompt.aggregation._wide import WideSum
from fedprompt.interfaces import Payload, Weighted


@overload
def weighted_mean(entries: Iterable[Weighted], /) -> Weighted: ...
@overload
def weighted_mean(entries: Iterable[Payload], /) -> dict[str, Weighted]: ...
def weighted_mean(
    entries: Iterable[Weighted] | Iterable[Payload], /
) -> Weighted | dict[str, Weighted]:
    r"""Average entries row by row, with a weight for each row.

    .. math:: \bar v_r = \sum_k w_{k,r} v_{k,r} \,\big/\, \sum_k w_{k,r}

    Payloads are averaged name by name. If a client does not send a name, it has weight 0 for that
    name. Clients are streamed one by one. A mean of means is a mean, so edge servers can average
    their clients first.

    Sums are computed in float64, on the CPU if the device has no float64 (Apple's MPS). If clients
    are added in the order of their ids, the means are bitwise identical on every engine. The mean
    of finite entries is finite, even if a sum overflows float64.

    Args:
        entries: Entries or payloads (at least one). All entries of a name have the same shapes,
            dtypes and device. A row of weight 0 may contain anything, including NaN.

    Returns:
        Mean of each row, in the dtypes of the entries. Its weight is the total weight, or the
        largest number of its dtype if the total overflows. Rows of total weight 0 have value 0.

    Raises:
        ValueError: If `entries` is empty, layouts differ, a weight is negative or not finite, or a
            row of positive weight contains NaN or infinity.

    Example:
        Two clients know class 0; only the second knows class 1.

        >>> first = Weighted(torch.tensor([[1.0], [0.0]]), torch.tensor([1.0, 0.0]))
        >>> second = Weighted(torch.tensor([[4.0], [5.0]]), torch.tensor([2.0, 1.0]))
        >>> weighted_mean([first, second]).value
        tensor([[3.],
                [5.]])
        >>> weighted_mean([{"logits": first}, {"logits": second}])["logits"].weight
        tensor([3., 1.])

    References:
        McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data",
        AISTATS 2017.
    """
    return aggregate(entries, RowSums)


class RowSums:
    """Float64 sums of weight times value and of weight.

    Adding is commutative and associative, and zero weight is its identity.
    """

    def __init__(self, first: Weighted) -> None:
        # Only the layout is kept: an expanded scalar takes no memory.
        self.like = Weighted(*(tensor.new_empty(()).expand(tensor.shape) for tensor in first))
        self.value, self.weight = (WideSum(wide_zeros(tensor)) for tensor in first)

    def add(self, argument: str, entry: Weighted) -> None:
        """Add an entry. If it is malformed, raise an error that calls it `argument`."""
        check_alike(argument, entry, self.like)
        weight = widened(entry.weight)
        product = widened(entry.value) * per_row(weight, entry.value)
        value_sum = product.add_(self.value.low)
        weight_sum = self.weight.low + weight
        # One synchronization checks everything. The root of a negative weight is NaN.
        checksum = value_sum.sum() + weight_sum.sum() + weight.sqrt().sum()
        if math.isfinite(checksum.item()):
            self.value.low = value_sum
            self.weight.low = weight_sum
        else:  # a malformed entry, NaN in a row of weight 0, or an overflow
            check_rows(argument, entry)
            self.value.add(widened(known_rows(entry)), per_row(weight, entry.value))
            self.weight.add(weight)

    def add_sums(self, other: "RowSums", factor: float) -> None:
        """Add other sums times a factor from 0 to 2**60, as if all their weights had it."""
        self.value.add_sum(other.value, factor)
        self.weight.add_sum(other.weight, factor)

    def result(self) -> Weighted:
        """Return the mean. Rows of total weight 0 are 0."""
        return as_entry(self.value.over(self.weight), self.weight.saturated(), like=self.like)


def check_alike(argument: str, entry: object, first: Weighted) -> None:
    """Require the shapes, dtypes and device of the first entry."""
    for name, tensor, like in zip(
        Weighted._fields, checked_layout(argument, entry), first, strict=True
    ):
        place = f"{argument}.{name}"
        if tensor.shape != like.shape:
            rule = f"have the shape of the first entry {tuple(like.shape)}"
            raise wrong_value(place, rule, tuple(tensor.shape))
        if tensor.dtype != like.dtype:
            rule = f"have the dtype of the first entry {like.dtype}"
            raise wrong_type(place, rule, tensor.dtype)
        if tensor.device != like.device:
            rule = f"be on the device of the first entry {like.device}"
            raise wrong_value(place, rule, tensor.device)


def as_entry(value: Tensor, weight: Tensor, *, like: Weighted) -> Weighted:
    """Round to the dtypes of `like`, with value 0 in rows of weight 0 and finite weights.

    The result is on the device of `like`.
    """
    value = torch.where(per_row(weight > 0, value), value, 0.0)
    most = torch.finfo(like.weight.dtype).max
    return Weighted(rounded(value, like.value), rounded(weight.clamp(max=most), like.weight))
