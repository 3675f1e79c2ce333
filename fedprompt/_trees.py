"""Trees of tensors as JSON and tensors by number, and back."""

import math
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from fedprompt._checks import kind, wrong_type
from fedprompt.interfaces import Weighted


def packed(thing: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    """Turn a tree into JSON types; each tensor is moved to `tensors` and replaced by its number."""
    if thing is None or type(thing) in (bool, int, str):
        return thing
    if type(thing) is float:
        return thing if math.isfinite(thing) else {"float": str(thing)}
    if isinstance(thing, Weighted):
        return {
            "weighted": [
                packed(part, f"{where}.{name}", tensors)
                for name, part in zip(thing._fields, thing, strict=True)
            ]
        }
    if (
        isinstance(thing, Tensor)
        and thing.layout == torch.strided
        and not thing.is_complex()
        and not thing.is_quantized
    ):
        tensors[str(len(tensors))] = thing.detach().to("cpu", copy=True).contiguous()
        return {"tensor": str(len(tensors) - 1)}
    if type(thing) in (list, tuple):
        return {
            type(thing).__name__: [
                packed(part, f"{where}[{position}]", tensors) for position, part in enumerate(thing)
            ]
        }
    if type(thing) in (dict, OrderedDict):
        if strange := [key for key in thing if type(key) not in (str, int)]:
            raise wrong_type(where, "have strings and integers as keys", kind(strange[0]))
        return {
            "dict": [
                [key, packed(part, f"{where}[{key!r}]", tensors)] for key, part in thing.items()
            ]
        }
    raise wrong_type(
        where,
        "be a dict, list, tuple, Weighted, dense tensor, string, number, boolean or None",
        kind(thing),
    )


def unpacked(thing: Any, tensors: dict[str, Tensor]) -> Any:
    """Make the tree from the result of :func:`packed`."""
    if not isinstance(thing, dict):
        return thing
    ((tag, content),) = thing.items()
    if tag == "float":
        return float(content)
    if tag == "tensor":
        return tensors[content]
    if tag == "dict":
        return {key: unpacked(part, tensors) for key, part in content}
    parts = [unpacked(part, tensors) for part in content]
    return Weighted(*parts) if tag == "weighted" else tuple(parts) if tag == "tuple" else parts
