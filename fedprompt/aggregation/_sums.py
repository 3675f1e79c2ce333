"""Running sums of entries of one layout, and their mean."""

import math

import torch
from torch import Tensor

import fedprompt._nouns as nouns
import fedprompt._refusals as check
from fedprompt._float64 import rounded, wide_zeros, widened
from fedprompt.aggregation._wide import WideSum
from fedprompt.interfaces import Weighted
from fedprompt.interfaces.nouns import per_row


class RowSums:
    """Float64 sums of weight times value and of weight.

    Adding is commutative and associative, and zero weight is its identity.
    """

    def __init__(self, first: Weighted) -> None:
        # An entry of this layout without numbers: an expanded scalar takes no memory.
        self.like = Weighted._make(part.new_empty(()).expand(part.shape) for part in first)
        self.value, self.weight = (WideSum(wide_zeros(tensor)) for tensor in first)

    def add(self, argument: str, entry: Weighted) -> None:
        """Add an entry. If it is malformed, raise an error that calls it `argument`."""
        check_alike(argument, entry, self.like)
        weight = widened(entry.weight)
        product = widened(entry.value) * entry.per_row(weight)
        value_sum = product.add_(self.value.low)
        weight_sum = self.weight.low + weight
        # One synchronization checks everything. The root of a negative weight is NaN.
        checksum = value_sum.sum() + weight_sum.sum() + weight.sqrt().sum()
        if math.isfinite(checksum.item()):
            self.value.low = value_sum
            self.weight.low = weight_sum
        else:  # a malformed entry, NaN in a row of weight 0, or an overflow
            nouns.rows(argument, entry)
            self.value.add(widened(entry.known), entry.per_row(weight))
            self.weight.add(weight)

    def add_sums(self, other: "RowSums", factor: float) -> None:
        """Add other sums times a factor from 0 to 2**60, as if all their weights had it."""
        self.value.add_sum(other.value, factor)
        self.weight.add_sum(other.weight, factor)

    def result(self) -> Weighted:
        """Return the mean. Rows of total weight 0 are 0."""
        return as_entry(self.value.over(self.weight), self.weight.saturated(), like=self.like)


def form_of(entry: Weighted) -> tuple[object, ...]:
    """Return the shapes, dtypes and devices of an entry, which are compared."""
    value, weight = entry
    return value.shape, value.dtype, value.device, weight.shape, weight.dtype, weight.device


def check_alike(argument: str, entry: object, first: Weighted) -> None:
    """Require the shapes, dtypes and device of the first entry."""
    sent = nouns.layout(argument, entry)
    if form_of(sent) == form_of(first):
        return
    for name, tensor, like in zip(Weighted._fields, sent, first, strict=True):
        place = f"{argument}.{name}"
        check.tensor(place, tensor, like.dtype, like.shape, "the first entry")
        check.same_device(place, tensor, like.device, "the device of the first entry")


def as_entry(value: Tensor, weight: Tensor, *, like: Weighted) -> Weighted:
    """Round to the dtypes of `like`, with value 0 in rows of weight 0 and finite weights.

    The result is on the device of `like`.
    """
    value = torch.where(per_row(weight > 0, value), value, 0.0)
    most = torch.finfo(like.weight.dtype).max
    parts = rounded(value, like.value), rounded(weight.clamp(max=most), like.weight)
    return Weighted._make(parts)
