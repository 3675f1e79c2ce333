"""Checks of the arguments of partition functions: labels and generators."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64, Integer
from torch import Tensor

import fedprompt._checks as check

Labels = Integer[np.ndarray, " samples"] | Integer[Tensor, " samples"] | Sequence[int | np.integer]
Indices = Int64[np.ndarray, " _"]
Generator = np.random.Generator | torch.Generator


def check_random(argument: str, generator: object) -> None:
    """Require a source of randomness."""
    rule = "be a torch.Generator or a numpy Generator, such as np.random.default_rng(0)"
    check.instance(argument, generator, np.random.Generator | torch.Generator, rule)


def numpy_generator(generator: Any) -> np.random.Generator:
    """Return a numpy generator unchanged, or seed one with 256 bits from a torch generator."""
    check_random("generator", generator)
    if isinstance(generator, np.random.Generator):
        return generator
    words = torch.empty(4, dtype=torch.int64, device=generator.device)
    drawn = words.random_(-(2**63), None, generator=generator).cpu().numpy()
    return np.random.default_rng(drawn.astype("<i8").view("<u4"))


def some_labels(labels: Labels, *, num_classes: int | None = None) -> Int64[np.ndarray, " samples"]:
    """Copy at least one class label into an int64 array."""
    array = check.integers("labels", labels, below=num_classes)
    check.some("labels", array.size, "hold at least one label")
    return array
