"""Trees of tensors as JSON and tensors by number, and back."""

import hashlib
import json
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import safetensors.torch
from torch import Tensor

import fedprompt._refusals as check
from fedprompt.interfaces import Round, Weighted

DEEPEST = 100
"""Largest number of levels of a tree. A cycle has more."""


_NAMED: dict[str, Any] = {"weighted": Weighted, "round": Round}


def to_blob(tree: Any, where: str) -> bytes:
    """Write a tree as safetensors, with its form in the header. Equal trees give equal bytes."""
    tensors: dict[str, Tensor] = {}
    form = packed(tree, where, tensors)
    # One text, because safetensors writes several in any order.
    header = {"tree": json.dumps([form, kinds_of_devices(tensors)])}
    return safetensors.torch.save(on_cpu(tensors), header)


def digest(tree: Any, where: str = "tree") -> str:
    """Return a digest of a tree, the same for equal trees."""
    return hashlib.sha256(to_blob(tree, where)).hexdigest()


def from_blob(blob: bytes, device: Any = None) -> Any:
    """Read the tree of :func:`to_blob`, on the kinds of devices that it was on, or on another."""
    form, kinds = json.loads(texts_of(blob)["tree"])
    return unpacked(form, moved(safetensors.torch.load(blob), kinds, device))


def moved(
    tensors: Mapping[str, Tensor], kinds: Mapping[str, str], device: Any
) -> dict[str, Tensor]:
    """Move tensors to their kinds of devices. Those that were not on the CPU may get another."""
    places = {number: kind if kind == "cpu" else device or kind for number, kind in kinds.items()}
    return {number: tensor.to(places[number]) for number, tensor in tensors.items()}


def texts_of(blob: bytes) -> dict[str, str]:
    """Read the texts in the header of a safetensors blob."""
    header = json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")])
    texts: dict[str, str] = header.get("__metadata__", {})
    return texts


def kinds_of_devices(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the kind of device of each tensor by its number."""
    return {number: tensor.device.type for number, tensor in tensors.items()}


def on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors to the CPU, so that no two of them share memory."""
    return {name: part.detach().to("cpu", copy=True).contiguous() for name, part in tensors.items()}


def packed(
    thing: Any,
    where: str,
    tensors: dict[str, Tensor],
    files: dict[str, Any] | None = None,
    *,
    level: int = 0,
) -> Any:
    """Turn a tree into JSON types.

    Args:
        thing: Tree.
        where: Its name in errors.
        tensors: Tensors by number, to which those of the tree are added.
        files: Files by name, to which those of states on disk are added. If None, the states are a
            part of the tree.
        level: Level of `thing` in its tree.
    """
    if thing is None or type(thing) in (bool, int, str):
        return thing
    if type(thing) is float:
        return thing if math.isfinite(thing) else {"float": str(thing)}
    if isinstance(thing, Tensor) and check.is_dense(thing) and not thing.is_complex():
        tensors[str(len(tensors))] = thing
        return {"tensor": str(len(tensors) - 1)}
    if level == DEEPEST:
        rule = f"have at most {DEEPEST} levels, and no cycle"
        raise check.wrong(where.partition("[")[0], rule, "more")

    def part(child: Any, place: str) -> Any:
        return packed(child, f"{where}{place}", tensors, files, level=level + 1)

    for tag, named in _NAMED.items():
        if isinstance(thing, named):
            parts = [part(getattr(thing, name), f".{name}") for name in named._fields]
            if isinstance(thing, Round):
                parts.append(part(sorted(thing.stateful), ".stateful"))
                parts += [part(getattr(thing, name), f".{name}") for name in ("origin", "images")]
            return {tag: parts}
    if type(thing) in (list, tuple):
        parts = [part(child, f"[{position}]") for position, child in enumerate(thing)]
        return {type(thing).__name__: parts}
    if hasattr(thing, "listed"):
        return part(dict(thing), "") if files is None else {"files": thing.listed(files)}
    if type(thing) in (dict, OrderedDict):
        if strange := [key for key in thing if type(key) not in (str, int)]:
            rule = "have strings and integers as keys"
            raise check.wrong_type(where, rule, check.kind(strange[0]))
        return {"dict": [[key, part(child, f"[{key!r}]")] for key, child in thing.items()]}
    rule = "be a dict, list, tuple, Weighted, dense tensor, string, number, boolean or None"
    raise check.wrong_type(where, rule, check.kind(thing))


def parsed(text: str | bytes) -> Any:
    """Parse JSON. A ValueError is raised for any other text, also for one that is too deep."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("too many levels") from error


def unpacked(
    thing: Any,
    tensors: Mapping[str, Tensor],
    listed: Callable[[Any], Any] | None = None,
    *,
    level: int = 0,
) -> Any:
    """Make the tree from the result of :func:`packed`; raise a ValueError for anything else.

    Args:
        thing: Result of :func:`packed`.
        tensors: Tensors by number.
        listed: Function from a list of files to states on disk.
        level: Level of `thing` in its tree.
    """
    if thing is None or type(thing) in (bool, int, str, float):
        return thing
    if level > DEEPEST or not isinstance(thing, dict) or len(thing) != 1:
        raise ValueError(f"no part of a tree: {check.kind(thing)} at level {level}")
    ((tag, content),) = thing.items()
    if tag == "float" and isinstance(content, str):
        return float(content)
    if tag == "tensor" and isinstance(content, str) and content in tensors:
        return tensors[content]
    if tag == "files" and listed:
        return listed(content)
    if tag not in ("dict", "list", "tuple", *_NAMED) or not isinstance(content, list):
        raise ValueError(f"no part of a tree: {tag!r} with {check.kind(content)}")
    if tag == "dict":
        pairs = all(isinstance(pair, list) and len(pair) == 2 for pair in content)
        if not pairs or not all(type(key) in (str, int) for key, _ in content):
            raise ValueError("no pairs of a key and a part in a dict")
        return {key: unpacked(part, tensors, listed, level=level + 1) for key, part in content}
    parts = [unpacked(part, tensors, listed, level=level + 1) for part in content]
    if tag in _NAMED:
        if len(parts) != len(_NAMED[tag]._fields) + 3 * (tag == "round"):
            raise ValueError(f"{len(parts)} parts of a {_NAMED[tag].__name__}")
        return _NAMED[tag](*parts)
    return tuple(parts) if tag == "tuple" else parts
