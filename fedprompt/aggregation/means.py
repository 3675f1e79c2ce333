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
from fedprompt.aggregation._mapped import aggregate
from fedprompt.aggregation._wide import WideSum
from fedprompt.interfaces import Payload, Weighted


@overload
def weighted_mean(entries: Iterable[Weighted], /) -> Weighted: ...
@overload
def weighted_mean(entries: Iterable[Payload], /) -> dict[str, Weighted]: ...
def weighted_mean(
    entries: Iterable[Weighted] | Iterable[Payload], /
) -> Weighted | dict[str, Weighted]:
    r"""Average entries row by row, each row by its own weight.

    .. math:: \bar v_r = \sum_k w_{k,r} v_{k,r} \,\big/\, \sum_k w_{k,r}

    Payloads are averaged name by name; a client that does not send a name counts as weight 0 for it.
    The result is an entry or a payload itself, so a mean of means is a mean: average on edge servers
    first if you like. Clients are streamed one by one, in memory that does not grow with their number.

    Sums are kept in float64. Add clients in the order of their ids, and every engine gives bitwise
    identical means. The mean of finite entries is finite, also where a sum exceeds float64.

    Args:
        entries: Entries, or payloads; at least one. All entries of a name have the same shapes, dtypes
            and device. A row of weight 0 may contain anything, including NaN.

    Returns:
        Mean of each row, in the dtypes of the entries. Its weight is the total weight, or the largest
        number of its dtype if the total exceeds it. Rows of total weight 0 have value 0.

    Raises:
        ValueError: If `entries` is empty, layouts differ, a weight is negative or not finite, or a row
            of positive weight contains NaN or infinity.

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
        McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.
    """
    return aggregate(entries, RowSums)


class RowSums:
    """Float64 sums of weight times value and of weight.

    Adding is commutative and associative, and zero weight is its identity.
    """

    def __init__(self, first: Weighted) -> None:
        self.like = Weighted(
            *(tensor.new_empty(()).expand(tensor.shape) for tensor in first)
        )  # holds no rows
        self.value, self.weight = (
            WideSum(torch.zeros(tensor.shape, dtype=torch.float64, device=tensor.device))
            for tensor in first
        )

    def add(self, argument: str, entry: Weighted) -> None:
        """Add an entry; a malformed one is refused by the name `argument`, and nothing is added."""
        check_alike(argument, entry, self.like)
        weight = entry.weight.double()
        product = entry.value.double() * per_row(weight, entry.value)
        value_sum, weight_sum = product.add_(self.value.low), self.weight.low + weight
        judged = (
            value_sum.sum() + weight_sum.sum() + weight.sqrt().sum()
        )  # NaN if a weight is negative
        if math.isfinite(judged.item()):
            self.value.low, self.weight.low = value_sum, weight_sum
        else:  # malformed, garbage in a row of weight 0, or an overflow
            check_rows(argument, entry)
            self.value.add(known_rows(entry).double(), per_row(weight, entry.value))
            self.weight.add(weight)

    def result(self) -> Weighted:
        """Divide; rows of total weight 0 are 0."""
        return as_entry(self.value.over(self.weight), self.weight.saturated(), like=self.like)


def check_alike(argument: str, entry: object, first: Weighted) -> None:
    """Require an entry of the layout of the first one: shapes, dtypes, device."""
    for name, tensor, like in zip(
        Weighted._fields, checked_layout(argument, entry), first, strict=True
    ):
        if tensor.shape != like.shape:
            raise wrong_value(
                f"{argument}.{name}",
                f"have the shape of the first entry {tuple(like.shape)}",
                tuple(tensor.shape),
            )
        if tensor.dtype != like.dtype:
            raise wrong_type(
                f"{argument}.{name}",
                f"have the dtype of the first entry {like.dtype}",
                tensor.dtype,
            )
        if tensor.device != like.device:
            raise wrong_value(
                f"{argument}.{name}",
                f"be on the device of the first entry {like.device}",
                tensor.device,
            )


def as_entry(value: Tensor, weight: Tensor, *, like: Weighted) -> Weighted:
    """Round to the dtypes of `like`; rows of weight 0 have value 0, and weights stop at their dtype's largest number."""
    value = torch.where(per_row(weight > 0, value), value, 0.0)
    most = torch.finfo(like.weight.dtype).max
    return Weighted(value.to(like.value.dtype), weight.clamp(max=most).to(like.weight.dtype))
