"""The description ``config.json`` of a folder of prompts, read with a rule for each field."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import fedprompt._refusals as check

FORMAT = 1
FILE, CONFIG, CARD = "prompts.safetensors", "config.json", "README.md"
_LARGEST = 2**31

Rule = tuple[str, Callable[[Any], bool]]
"""Rule of a field, and whether a value keeps it."""


def _is_size(value: object, least: int = 1) -> bool:
    return type(value) is int and least <= value < _LARGEST


def _is_factor(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def _are_layers(value: Any) -> bool:
    fits = isinstance(value, list) and all(_is_size(layer, 0) for layer in value)
    return fits and 0 < len({*value}) == len(value)


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


_OBJECT: Rule = "be an object", lambda value: isinstance(value, dict)
_TEXT: Rule = "be a string", lambda value: isinstance(value, str)
_FLAG: Rule = "be true or false", lambda value: isinstance(value, bool)
_SIZE: Rule = "be an integer from 1 to 2**31 - 1", _is_size
_LENGTH: Rule = "be an integer from 0 to 2**31 - 1", lambda value: _is_size(value, 0)

_FIELDS: dict[str, Rule] = {
    "format": (f"be {FORMAT}", lambda value: value == FORMAT),
    **dict.fromkeys(("fedprompt", "model", "sentence", "method", "data", "license"), _TEXT),
    "kind": ("be 'prompts' or 'context'", lambda value: value in ("prompts", "context")),
    "class_names": ("be a list of strings", _are_texts),
    "arguments": _OBJECT,
    "scale": ("be null or a number above 0", lambda value: value is None or _is_factor(value)),
}
_PARTS: dict[str, dict[str, Rule]] = {
    "prompts": {
        "num_prompts": _LENGTH,
        "dim": _SIZE,
        "layers": ("list layers, each once", _are_layers),
        "replace": _FLAG,
    },
    "head": {"in_features": _SIZE, "out_features": _SIZE, "bias": _FLAG},
    "context": {
        "dim": _SIZE,
        "length": _LENGTH,
        "num_classes": ("be null or an integer", lambda value: value is None or _is_size(value)),
    },
}


def read_config(folder: Path) -> dict[str, Any]:
    """Read the description of a folder, and require each field, before anything is built."""
    path = folder / CONFIG
    if not path.is_file():
        raise check.wrong("folder", f"have a file {CONFIG}, as save_prompts writes it", str(folder))
    try:
        config: dict[str, Any] = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"`{path}` must be JSON: {type(error).__name__}: {error}.") from error
    found = config.get("format") if isinstance(config, dict) else check.kind(config)
    rule = f"be of format {FORMAT}; a newer fedprompt may have written it"
    check.require(type(found) is int and found == FORMAT, str(path), rule, found)
    parts = [name for name in ("prompts", "context", "head") if name in config]
    tower = {"tower": _TEXT} if "tower" in config else {}  # older folders have none
    _read_object(f"{path}", config, _FIELDS | tower | dict.fromkeys(parts, _OBJECT))
    for name in parts:
        _read_object(f"{path}: {name}", config[name], _PARTS[name])
    kind = [name for name in parts if name != "head" or config["kind"] == "context"]
    rule = "have prompts with or without a head, or a context, and name it as `kind`"
    check.require(kind == [config["kind"]], str(path), rule, f"{parts}, kind {config['kind']!r}")
    _check_classes(path, config)
    _check_size(folder, config)
    return config


def _read_object(where: str, found: Mapping[str, Any], fields: Mapping[str, Rule]) -> None:
    if unknown := sorted(found.keys() - fields.keys()):
        raise check.wrong(where, f"have the keys {', '.join(fields)}", check.some_names(unknown))
    for name, (rule, holds) in fields.items():
        check.require(name in found, where, f"have the key {name!r}", "none")
        check.require(holds(found[name]), f"{where}: {name}", rule, check.kind(found[name]))


def _check_classes(path: Path, config: Mapping[str, Any]) -> None:
    count = len(config["class_names"])
    classes = config.get("head", {}).get("out_features")
    if config["kind"] == "context":
        check.some(f"{path}: class_names", count, "name the classes of a context")
        classes = config["context"]["num_classes"]
    if count and classes not in (None, count):
        raise check.wrong(f"{path}: class_names", f"have {classes} names", count)


def _check_size(folder: Path, config: Mapping[str, Any]) -> None:
    """Require that the file has a byte at least for each number, so that little is allocated."""
    part, head = config[config["kind"]], config.get("head")
    rows = part["num_classes"] or 1 if config["kind"] == "context" else len(part["layers"])
    numbers = rows * part["dim"] * part["length" if config["kind"] == "context" else "num_prompts"]
    if head:
        numbers += head["out_features"] * (head["in_features"] + head["bias"])
    path = folder / FILE
    rule = f"be the file that {CONFIG} describes, with {numbers} numbers"
    size = path.stat().st_size if path.is_file() else None
    got = "no file" if size is None else f"{size} bytes"
    check.require(size is not None and numbers <= size, str(path), rule, got)
