"""Folders of trained parts: a state, a description and a card, which are written as one."""

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from importlib.metadata import version
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import safetensors
import safetensors.torch
from torch import Tensor

import fedprompt._refusals as check
from fedprompt._files import locked, new_file, sync
from fedprompt.backbones.preparation import Preparation

FORMAT = "fedprompt folder 2"
STATE, CONFIG, CARD = "state.safetensors", "config.json", "README.md"
DIGITS = 16
"""Number of hex digits of a digest in the name of a file that is not yet in its place."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """Contents of ``config.json``: how a network with trained parts is made again.

    Attributes:
        kind: "vit" for a vision transformer, "clip" for a CLIP.
        model: Name of the network with its library, or "" for a network of your own.
        arguments: Arguments of the library's constructor.
        fingerprint: Fingerprint of the network.
        preparation: Preparation of images. If None, that of the library.
        class_names: Names of classes, in the order of labels.
        method: Name of a method in the gallery, or of your function as FILE:NAME. If empty, the
            state has prompts and a head, or a context.
        values: Hyperparameters of the method.
        setting: Plain fields of the setting of the method.
        client: Client of the model, or None for a model of all clients.
        inputs: What the method takes.
        layers: Layers of prompts.
        replace: Whether prompts replace those of the layer before.
        scale: Factor of cosines of a context.
        about: Texts for the card, such as "data" and "license".
        fedprompt: Version that wrote the folder.
        format: Name of the format.
        files: Digests of the other files.
    """

    kind: Literal["vit", "clip"]
    model: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    fingerprint: dict[str, str]
    preparation: Preparation | None = None
    class_names: tuple[str, ...] = ()
    method: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    setting: dict[str, Any] = field(default_factory=dict)
    client: int | None = None
    inputs: Literal["images", "tokens"] = "images"
    layers: tuple[int, ...] = ()
    replace: bool = False
    scale: float | None = None
    about: dict[str, str] = field(default_factory=dict)
    fedprompt: str = field(default_factory=lambda: version("fedprompt"))
    format: str = FORMAT
    files: dict[str, str] = field(default_factory=dict)


def from_json(kind: Any, value: Any, where: str) -> Any:
    """Make a value of a type from parsed JSON, with a dataclass from all of its fields.

    Raises:
        ValueError: If a value has another type, or fields are missing or unknown.
    """
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        names = [one.name for one in fields(kind)]
        fits = isinstance(value, Mapping) and value.keys() == {*names}
        got = check.some_names(value) if isinstance(value, Mapping) else check.kind(value)
        check.require(fits, where, f"have the keys {', '.join(names)}", got)
        made = {name: from_json(hints[name], value[name], f"{where}: {name}") for name in names}
        with check.located(where):
            return kind(**made)  # type: ignore[operator]
    if origin is UnionType:
        (other,) = set(inner) - {NoneType}
        return None if value is None else from_json(other, value, where)
    if origin is Literal:
        check.require(value in inner, where, f"be one of {inner}", check.kind(value))
    elif origin is tuple and isinstance(value, list):
        return tuple(from_json(inner[0], part, where) for part in value)
    elif origin is dict and isinstance(value, dict):
        return {key: from_json(inner[1], part, f"{where}: {key}") for key, part in value.items()}
    elif kind is not Any:
        fits = type(value) is kind or (kind is float and type(value) is int)
        check.require(
            fits, where, f"be of type {getattr(kind, '__name__', kind)}", check.kind(value)
        )
    return value


def write(
    folder: Path, described: Description, state: Mapping[str, Tensor], card: str
) -> Description:
    """Write a folder completely or not at all, and return its description with digests.

    All files are on the disk under new names before the description is replaced, which names their
    digests. Then they get their names. So a folder that is read has files of one call. An edited
    card and files of others are kept, and links are replaced, but not followed.

    Raises:
        ValueError: If the folder has a file of another program with one of the names.
    """
    tensors = {key: value.cpu().contiguous().clone() for key, value in state.items()}
    names = {"classes": json.dumps(described.class_names)}
    blob = safetensors.torch.save(tensors, names)
    contents = {STATE: blob, CARD: card.encode()}
    values = asdict(described) | {"files": {name: _hash(each) for name, each in contents.items()}}
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        before = _complete(folder)
        if _is_edited(folder / CARD, before):
            del contents[CARD]
        for name, content in contents.items():
            _write(_part(folder, name, values["files"][name]), content)
        text = json.dumps(values | {"digest": _digest(values)}, indent=2)
        _write(part := folder / f"{CONFIG}.part", f"{text}\n".encode())
        os.replace(part, folder / CONFIG)
        sync(folder)
        _complete(folder)
    return _described(folder)


def read(folder: Path) -> tuple[Description, dict[str, Tensor]]:
    """Read a folder, whose digests must fit.

    Raises:
        FileNotFoundError: If there is no description.
        ValueError: If a file is damaged, missing or of another version.
    """
    for _ in range(10):  # another process may write in between
        described = _described(folder)
        expected = described.files.get(STATE, "")
        for path in (folder / STATE, _part(folder, STATE, expected)):
            with suppress(FileNotFoundError):
                if _hash(blob := path.read_bytes()) == expected:
                    return described, safetensors.torch.load(blob)
    rule = f"contain the {STATE} whose digest is in {CONFIG}"
    raise check.wrong("folder", rule, f"a missing or damaged file in {folder}")


def _described(folder: Path) -> Description:
    path = folder / CONFIG
    rule = f"contain {CONFIG}, as fedprompt writes it"
    check.require(path.is_file(), "folder", rule, folder, FileNotFoundError)
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"`{path}` must be JSON: {type(error).__name__}: {error}.") from error
    given = values.get("format") if isinstance(values, dict) else check.kind(values)
    check.require(given == FORMAT, str(path), f"be of format {FORMAT!r}", repr(given))
    digest = values.pop("digest", None)
    rule = "have the digest of its content; it was damaged or changed"
    check.require(digest == _digest(values), str(path), rule, repr(digest))
    described: Description = from_json(Description, values, str(path))
    return described


def _complete(folder: Path) -> dict[str, str]:
    """Give files their names after a save that was killed, and return the digests of the folder."""
    if not (folder / CONFIG).exists():
        found = [name for name in (STATE,) if (folder / name).exists()]
        check.nothing(found, str(folder), "have no file of another program")
    described = _described(folder).files if (folder / CONFIG).exists() else {}
    for name, digest in described.items():
        part = _part(folder, name, digest)
        if part.exists():
            os.replace(part, folder / name)
    for name in (STATE, CARD, CONFIG):
        for left in folder.glob(f"{name}*.part"):
            left.unlink()
    return described


def _is_edited(card: Path, before: Mapping[str, str]) -> bool:
    """Return whether a card was changed since it was written, or is of somebody else."""
    return card.exists() and _hash(card.read_bytes()) != before.get(CARD)


def _part(folder: Path, name: str, digest: str) -> Path:
    return folder / f"{name}.{digest[:DIGITS]}.part"


def _write(path: Path, content: bytes) -> None:
    with suppress(FileNotFoundError):
        path.unlink()
    with new_file(path, like=path) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _digest(values: Mapping[str, Any]) -> str:
    text = json.dumps(values, sort_keys=True)
    return _hash(text.encode())


def check_fingerprint(described: Description, found: Mapping[str, str]) -> None:
    """Require the recorded network, and name the parts that differ."""
    differ = [name for name, value in described.fingerprint.items() if found.get(name) != value]
    rule = f"have the same {', '.join(differ)} as the network of the folder"
    check.require(not differ, "weights", rule, "another network")


def card(described: Description, name: str, call: str) -> str:
    """Write the card of a folder, in Markdown.

    Args:
        described: Contents of the folder.
        name: Name of the folder.
        call: Lines of Python that load it and predict.
    """
    library, _, network = described.model.partition(":")
    hub = {"timm": f"timm/{network}", "transformers": network}.get(library)
    about = dict(described.about)
    head = {"library_name": "fedprompt", "base_model": hub, "tags": "[fedprompt]"}
    head["license"] = about.pop("license", None)
    trained = described.method or ("context" if described.kind == "clip" else "prompts")
    values = ", ".join(f"{key}={value}" for key, value in described.values.items())
    rows = {
        "network": f"`{described.model}`" if described.model else "your own",
        "trained": f"{trained}{f' ({values})' if values else ''}",
        "classes": ", ".join(described.class_names),
        "images": str(described.preparation or "as the library of the network prepares them"),
        **about,
        "fedprompt": described.fedprompt,
    }
    cells = {key: " ".join(value.split()).replace("|", "\\|") for key, value in rows.items()}
    table = [f"| {key} | {cell} |" for key, cell in cells.items() if cell]
    text = ["---", *(f"{key}: {value}" for key, value in head.items() if value), "---"]
    text += [f"# {name.removeprefix('hub:')}", "", "Trained parts of a frozen network.", ""]
    text += ["| | |", "|---|---|", *table, "", "```python", call, "```", ""]
    return "\n".join(text)
