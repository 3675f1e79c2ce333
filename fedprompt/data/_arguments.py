"""Checks of the arguments of partition functions: labels and generators."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64, Integer
from torch import Tensor

import fedprompt._checks as check

Labels = Integer[np.ndarray, " samples"] | Integer[Tensor, " samples"] | Sequence[int | np.integer]
Indices = Int64[np.ndarray, " _"]
Generator = np.random.Generator | torch.Generator


def check_random(generator: object) -> None:
    """Require a source of randomness."""
    rule = "be a torch.Generator or a numpy Generator, such as np.random.default_rng(0)"
    check.instance("generator", generator, np.random.Generator | torch.Generator, rule)


def numpy_generator(generator: Any) -> np.random.Generator:
    """Return a numpy generator unchanged, or seed one with 256 bits from a torch generator."""
    check_random(generator)
    if isinstance(generator, np.random.Generator):
        return generator
    words = torch.empty(4, dtype=torch.int64, device=generator.device)
    drawn = words.random_(-(2**63), None, generator=generator).cpu().numpy()
    return np.random.default_rng(drawn.astype("<i8").view("<u4"))


def label_array(
    labels: Labels, *, num_classes: int | None = None, argument: str = "labels"
) -> Int64[np.ndarray, " samples"]:
    """Copy class labels into an int64 array; `num_classes` bounds them from above."""
    entries = entries_of(argument, labels)
    for position, entry in enumerate(entries):
        if isinstance(entry, bool) or not isinstance(entry, Integral):
            raise check.wrong_type(f"{argument}[{position}]", "be an integer", check.kind(entry))
    array = np.array(entries, dtype=np.int64)
    rule = "be at least 0" if num_classes is None else f"lie in [0, {num_classes})"
    if array.size and (array.min() < 0 or (num_classes is not None and array.max() >= num_classes)):
        raise check.wrong(argument, rule, f"values from {array.min()} to {array.max()}")
    return array


def some_labels(labels: Labels, *, num_classes: int | None = None) -> Int64[np.ndarray, " samples"]:
    """Copy at least one class label into an int64 array."""
    array = label_array(labels, num_classes=num_classes)
    check.some("labels", array.size, "hold at least one label")
    return array


def entries_of(argument: str, values: object) -> list[Any]:
    """List the entries of a one-dimensional tensor, array or sequence as Python objects."""
    if isinstance(values, Tensor | np.ndarray):
        if values.ndim != 1:
            raise check.wrong(argument, "have shape (samples,)", tuple(values.shape))
        return list(values.tolist())
    if isinstance(values, Sequence) and not isinstance(values, str | bytes):
        return list(values)
    raise check.wrong_type(argument, "be an array, a tensor or a sequence", check.kind(values))
