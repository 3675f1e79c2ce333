"""Arguments in the form that the library computes with: floats, sizes, integers and tables."""

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

import fedprompt._refusals as check


def widened(tensor: Tensor) -> Tensor:
    """Convert to float64, on the CPU if the device has no float64 (Apple's MPS)."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()


def single(tensor: Tensor) -> Tensor:
    """Convert half precision to float32. Other dtypes are unchanged."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def height_and_width(argument: str, size: object) -> tuple[int, int]:
    """Return a size in pixels as (height, width); it is given in this form or as one number."""
    sizes = tuple(size) if isinstance(size, tuple | list) else (size, size)
    if len(sizes) != 2:
        raise check.wrong(argument, "be one number or (height, width)", check.kind(size))
    for pixels in sizes:
        check.count(argument, pixels)
    return sizes


def integers(
    argument: str, values: object, *, below: int | None = None, of: str = ""
) -> Int64[np.ndarray, " samples"]:
    """Copy integers of at least 0, and below the number `of` something, into an int64 array."""
    given = entries(argument, values)
    for position, value in enumerate(given):
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise check.wrong_type(f"{argument}[{position}]", "be an integer", check.kind(value))
    rule = "be at least 0" if below is None else f"lie in [0, {below}){of}"
    if given and (min(given) < 0 or max(given) >= (check.LARGEST_INT if below is None else below)):
        raise check.wrong(argument, rule, f"values from {min(given)} to {max(given)}")
    return np.array(given, dtype=np.int64)


def positions(clients: Iterable[object], size: int) -> list[Int64[np.ndarray, " _"]]:
    """Return the positions of each client's samples in `size` labels."""
    of = ", the positions in `labels`"
    return [integers(f"clients[{c}]", own, below=size, of=of) for c, own in enumerate(clients)]


def entries(argument: str, values: object) -> list[Any]:
    """List the entries of a one-dimensional tensor, array or sequence as Python objects."""
    if isinstance(values, Tensor | np.ndarray):
        check.require(values.ndim == 1, argument, "have shape (samples,)", values)
        return list(values.tolist())
    if isinstance(values, Sequence) and not isinstance(values, str | bytes):
        return list(values)
    raise check.wrong_type(argument, "be an array, a tensor or a sequence", check.kind(values))


def table(
    argument: str, tensor: Any, shape: str, *, ndims: Sequence[int] = (2,), floating: bool = True
) -> Tensor:
    """Return a tensor without an empty axis in float64, on the CPU; numbers are not checked."""
    noun = "floating-point tensor of shape" if floating else "tensor of real numbers"
    real = isinstance(tensor, Tensor) and not tensor.is_complex() and tensor.dtype != torch.bool
    fits = real and (tensor.is_floating_point() or not floating)
    check.typed(fits, argument, f"be a {noun} {shape}", tensor)
    check.dense(argument, tensor)
    fits = tensor.ndim in ndims and 0 not in tensor.shape
    check.require(fits, argument, f"have shape {shape} without an empty axis", tensor)
    table: Tensor = tensor.detach().cpu().double()
    return table


def accuracies(tensor: Any) -> Tensor:
    """Return the accuracies of clients on test sets, in float64 on the CPU."""
    matrix = table("accuracy", tensor, "(clients, tests)")
    inside = (matrix >= 0) & (matrix <= 1)  # False for NaN as well
    if not bool(inside.all()):
        raise check.wrong("accuracy", "lie in [0, 1]", matrix[~inside][0].item())
    return matrix


def counts(argument: str, tensor: Any, shape: str, *, ndims: Sequence[int] = (2,)) -> Tensor:
    """Return a table of counts, which are finite, at least 0 and not empty, in float64."""
    counts = table(argument, tensor, shape, ndims=ndims, floating=False)
    check.nonnegative(argument, counts)
    return counts
