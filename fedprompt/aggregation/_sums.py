"""Running sums of entries of one layout, and their mean."""

import math

import torch
from torch import Tensor

import fedprompt._nouns as nouns
import fedprompt._refusals as check
from fedprompt._conversions import widened
from fedprompt.interfaces import Weighted
from fedprompt.interfaces.nouns import per_row


class RowSums:
    """Float64 sums of weight times value and of weight.

    Adding is commutative and associative, and zero weight is its identity.
    """

    def __init__(self, first: Weighted) -> None:
        # An entry of this layout without numbers: an expanded scalar takes no memory.
        self.like = Weighted._make(part.new_empty(()).expand(part.shape) for part in first)
        self.value, self.weight = (widened(part.new_zeros(part.shape)) for part in first)

    def add(self, argument: str, entry: Weighted) -> None:
        """Add an entry. If it is malformed, raise an error that calls it `argument`."""
        check_alike(argument, entry, self.like)
        weight = widened(entry.weight)
        value_sum = (widened(entry.value) * entry.per_row(weight)).add_(self.value)
        weight_sum = self.weight + weight
        # One synchronization checks everything. The root of a negative weight is NaN.
        checksum = value_sum.sum() + weight_sum.sum() + weight.sqrt().sum()
        if not math.isfinite(checksum.item()):  # malformed, NaN in a row of weight 0, or overflow
            nouns.rows(argument, entry)
            value_sum = self.value + widened(entry.known) * entry.per_row(weight)
            _check_within(argument, value_sum, weight_sum)
        self.value, self.weight = value_sum, weight_sum

    def add_sums(self, other: "RowSums", factor: float) -> None:
        """Add other sums times a factor of at least 0, as if all their weights had it."""
        self.value = self.value + other.value * factor
        self.weight = self.weight + other.weight * factor

    def result(self) -> Weighted:
        """Return the mean. Rows of total weight 0 are 0."""
        return as_entry(quotient(self.value, self.weight), self.weight, like=self.like)


def quotient(value: Tensor, weight: Tensor) -> Tensor:
    """Divide each row by its weight, or by 1 if that is 0. The result is finite."""
    _check_within("entries", value, weight)
    most = torch.finfo(torch.float64).max
    return (value / per_row(torch.where(weight > 0, weight, 1.0), value)).clamp(-most, most)


def _check_within(argument: str, *sums: Tensor) -> None:
    """Require finite sums."""
    rule = "have sums of weights, and of weights times values, within float64"
    fits = all(bool(part.isfinite().all()) for part in sums)
    check.require(fits, argument, rule, "a sum beyond 1.8e308")


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
    parts = value.to(like.value), weight.clamp(max=most).to(like.weight)
    return Weighted._make(parts)
