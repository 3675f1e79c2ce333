"""Checks of the arguments of partition functions: labels and generators."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64, Int64, Integer, Shaped
from torch import Tensor

import fedprompt._conversions as convert
import fedprompt._refusals as check

Labels = Integer[np.ndarray, " samples"] | Integer[Tensor, " samples"] | Sequence[int | np.integer]
Indices = Int64[np.ndarray, " _"]
Names = (
    Sequence[str] | Sequence[int | np.integer] | Shaped[np.ndarray, " _"] | Integer[Tensor, " _"]
)
Alpha = float | np.integer | np.ndarray | Sequence[float] | Sequence[Sequence[float]]
Generator = np.random.Generator | torch.Generator

LARGEST_ALPHA = 1e12
"""Largest concentration; numpy overflows near 1e308."""


def numpy_generator(generator: Any) -> np.random.Generator:
    """Return a numpy generator unchanged, or seed one with 256 bits from a torch generator."""
    rule = "be a torch.Generator or a numpy Generator, such as np.random.default_rng(0)"
    check.instance("generator", generator, Generator, rule)
    if isinstance(generator, np.random.Generator):
        return generator
    words = torch.empty(4, dtype=torch.int64, device=generator.device)
    drawn = words.random_(-(2**63), None, generator=generator).cpu().numpy()
    return np.random.default_rng(drawn.astype("<i8").view("<u4"))


def some_labels(labels: Labels, *, num_classes: int | None = None) -> Int64[np.ndarray, " samples"]:
    """Copy at least one class label into an int64 array."""
    array = convert.integers("labels", labels, below=num_classes)
    check.some("labels", array.size, "hold at least one label")
    return array


def class_numbers(labels: Labels) -> Int64[np.ndarray, " samples"]:
    """Number the classes that occur from 0, so that gaps in the labels cost nothing."""
    return np.unique(some_labels(labels), return_inverse=True)[1].astype(np.int64)


def numbered(
    argument: str, names: object, known: object = None
) -> tuple[Int64[np.ndarray, " samples"], int]:
    """Number names in sorted order, or among all known ones; return their number as well."""
    place, every = (argument, names) if known is None else (f"all_{argument}", known)
    entries, own = convert.entries(place, every), convert.entries(argument, names)
    check.some(place, entries, f"hold at least one {argument[:-1]}")
    wanted = str if isinstance(entries[0], str) else Integral
    for where, given in {place: entries, argument: own}.items():
        for position, entry in enumerate(given):
            rule = "be a string or an integer, like all entries"
            fits = not isinstance(entry, bool) and isinstance(entry, wanted)
            check.typed(fits, f"{where}[{position}]", rule, entry)
    number = {name: position for position, name in enumerate(sorted(set(entries)))}
    unknown = [check.kind(name) for name in own if name not in number]
    check.nothing(unknown, argument, f"be among `{place}`")
    return np.array([number[name] for name in own], dtype=np.int64), len(number)


def concentrations(
    alpha: Alpha, num_clients: int, num_classes: int
) -> Float64[np.ndarray, "clients classes"]:
    """Check concentrations, and repeat them for all clients and classes."""
    check.count("num_clients", num_clients)
    if not isinstance(alpha, np.ndarray | list | tuple):
        check.number("alpha", alpha, above=0.0, at_most=LARGEST_ALPHA)
    rule, shape = "be a number, or numbers for clients and classes", (num_clients, num_classes)
    try:
        array = np.asarray(alpha)
    except ValueError as error:  # rows of unlike length
        raise check.wrong("alpha", rule, check.kind(alpha)) from error
    check.typed(array.dtype.kind in "iuf", "alpha", rule, alpha)
    array = array.astype(np.float64)
    wrong = array[~((array > 0) & (array <= LARGEST_ALPHA))].tolist()
    check.nothing(wrong, "alpha", f"be above 0 and at most {LARGEST_ALPHA:g}")
    try:
        return np.broadcast_to(array, shape)
    except ValueError as error:
        rule = f"be a number, or broadcast to (clients, classes) = {shape}"
        raise check.wrong("alpha", rule, f"shape {array.shape}") from error
