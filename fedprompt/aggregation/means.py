"""The weighted mean of uploads, one upload at a time."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from fedprompt._checks import check_rows, checked_layout, known_rows, per_row, wrong_type, wrong_value
from fedprompt.aggregation._wide import WideSum
from fedprompt.interfaces import Weighted


def weighted_mean(uploads: Iterable[Weighted], /) -> Weighted:
    r"""Average rows over uploads, each row by its own weight.

    .. math:: \bar v_r = \sum_k w_{k,r} v_{k,r} \,\big/\, \sum_k w_{k,r}

    Rows that nobody knows (total weight 0) come back as value 0 and weight 0. The result is an upload again, so means of means are means:
    stream clients one by one, or average on edge servers first. Sums are kept in float64; add uploads in the order of client ids and
    every engine gives bitwise identical means. The mean of finite uploads is finite, also where a sum exceeds float64. Gradients flow
    through: uploads of :func:`collect` are detached, detach your own.

    Args:
        uploads: At least one, all of the same shapes, dtypes and device; read once. A row of weight 0 may hold anything, NaN included.

    Returns:
        The mean of each row, with the total weight as the new weight, in the dtypes of the uploads; a total that its dtype cannot hold
        becomes the largest number that it can.

    Raises:
        TypeError: If an upload is not a :class:`Weighted` of floating-point tensors, or dtypes differ.
        ValueError: If `uploads` is empty, shapes or devices differ, a weight is negative or not finite, or a row of positive weight holds
            NaN or infinity.

    Example:
        Two clients know class 0; only the second knows class 1.

        >>> first = Weighted(torch.tensor([[1.0], [0.0]]), torch.tensor([1.0, 0.0]))
        >>> second = Weighted(torch.tensor([[4.0], [5.0]]), torch.tensor([2.0, 1.0]))
        >>> weighted_mean([first, second]).value
        tensor([[3.],
                [5.]])

    References:
        McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.
    """
    total: RowSums | None = None
    for position, upload in enumerate(uploads):
        total = total or RowSums(checked_layout(f"uploads[{position}]", upload))
        total.add(f"uploads[{position}]", upload)
    if total is None:
        raise wrong_value("uploads", "hold at least one upload", "none")
    return total.mean()


class RowSums:
    """Float64 sums of weight times value and of weight: adding is commutative and associative, and zero weight is its identity."""

    def __init__(self, like: Weighted) -> None:
        self.like = like
        self.value = WideSum(torch.zeros_like(like.value, dtype=torch.float64))
        self.weight = WideSum(torch.zeros_like(like.weight, dtype=torch.float64))

    def add(self, argument: str, upload: Weighted) -> None:
        """Add an upload; a malformed one, or one of another layout, is refused by the name `argument` and nothing is added."""
        check_alike(argument, upload, self.like)
        weight = upload.weight.double()
        product = upload.value.double() * per_row(weight, upload.value)
        value_sum, weight_sum = product.add_(self.value.low), self.weight.low + weight
        judged = value_sum.sum() + weight_sum.sum() + weight.sqrt().sum()  # one sync; NaN if a weight is negative
        if math.isfinite(judged.item()):
            self.value.low, self.weight.low = value_sum, weight_sum
        else:  # malformed, garbage in a row of weight 0, or an overflow
            check_rows(argument, upload)
            self.value.add(known_rows(upload).double(), per_row(weight, upload.value))
            self.weight.add(weight)

    def mean(self) -> Weighted:
        """Divide; rows of total weight 0 are 0."""
        return as_entry(self.value.over(self.weight), self.weight.saturated(), like=self.like)


def check_alike(argument: str, upload: object, first: Weighted) -> None:
    """Require an upload of the layout of the first one: shapes, dtypes, device."""
    for name, tensor, like in zip(Weighted._fields, checked_layout(argument, upload), first, strict=True):
        if tensor.shape != like.shape:
            raise wrong_value(f"{argument}.{name}", f"have the shape of the first upload {tuple(like.shape)}", tuple(tensor.shape))
        if tensor.dtype != like.dtype:
            raise wrong_type(f"{argument}.{name}", f"have the dtype of the first upload {like.dtype}", tensor.dtype)
        if tensor.device != like.device:
            raise wrong_value(f"{argument}.{name}", f"lie on the device of the first upload {like.device}", tensor.device)


def as_entry(value: Tensor, weight: Tensor, *, like: Weighted) -> Weighted:
    """Round to the dtypes of `like`, with 0 in the rows of weight 0; weights stop at the largest number of their dtype."""
    value = torch.where(per_row(weight > 0, value), value, 0.0)
    return Weighted(value.to(like.value.dtype), weight.clamp(max=torch.finfo(like.weight.dtype).max).to(like.weight.dtype))
