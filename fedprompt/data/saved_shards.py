"""The clients of a data set in a file, so that two papers can use the same division."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from pathlib import PurePath
from typing import Any
from unicodedata import normalize

import fedprompt._conversions as convert
import fedprompt._refusals as check
from fedprompt._files import file_of, replace_file
from fedprompt.data._arguments import Indices, Labels
from fedprompt.data.folders import Folder

FORMAT = "fedprompt-shards-1"
Dataset = Labels | Sequence[str] | Sequence[PathLike[str]] | Folder
Shards = Sequence[Any] | Mapping[int, Any]


def save_shards(path: str | PathLike[str], shards: Shards, *, of: Dataset) -> None:
    """Save the positions of each client's samples, with digests of them and of the data set.

    The file is JSON. It contains no image, label or name of a file.

    Args:
        path: Path of the file. An existing file is replaced when all bytes are on the disk.
        shards: For each client the positions of its samples, such as from :func:`dirichlet`; or a
            mapping from ids of clients.
        of: Data set of the positions: its labels, the names of its files, or a :class:`Folder`. The
            digest of a folder has the names of files below its root, and of their classes.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     save_shards(f"{folder}/shards.json", [[0, 2], [1]], of=[5, 3, 5])
        ...     print(load_shards(f"{folder}/shards.json", of=[5, 3, 5]))
        ...     try:
        ...         load_shards(f"{folder}/shards.json", of=[5, 3, 3])
        ...     except ValueError as error:
        ...         print(str(error).split(",")[0])
        [array([0, 2]), array([1])]
        `of` must be the data set of the file
    """
    file, about = file_of(path), _digest(of)
    check.instance("shards", shards, Sequence | Mapping, "list the positions of each client")
    clients = shards if isinstance(shards, Mapping) else dict(enumerate(shards))
    check.some("shards", len(clients), "have at least one client")
    for client in clients:
        check.count("key of shards", client, at_least=0)
    ids = list(map(int, clients)) if isinstance(shards, Mapping) else None
    parts = [_positions(c, own, about["samples"]).tolist() for c, own in clients.items()]
    division = {"clients": ids, "shards": parts, "division": _division(ids, parts)}
    replace_file(file, json.dumps({"format": FORMAT, **about, **division}).encode())


def load_shards(path: str | PathLike[str], *, of: Dataset) -> list[Indices] | dict[int, Indices]:
    """Load the positions of each client's samples from a file of :func:`save_shards`.

    Args:
        path: Path of the file.
        of: The same data set as for :func:`save_shards`, in the same form and order.

    Returns:
        For each client the positions of its samples, int64, in the saved order; a dict if a mapping
        was saved.

    Raises:
        ValueError: If the data set is another one, or the file is not from :func:`save_shards` or
            was changed. A file of version 0.3 or earlier has no digest of its positions, so that
            changed ones are not found.

    Example:
        See :func:`save_shards`.

        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     save_shards(f"{folder}/shards.json", {7: [1]}, of=["a.png", "b.png"])
        ...     load_shards(f"{folder}/shards.json", of=["a.png", "b.png"])
        {7: array([1])}
    """
    file = file_of(path)
    try:
        found = json.loads(file.read_bytes())
        given, rule = found["format"], f"be a file of format {FORMAT}"
        check.require(given == FORMAT, "path", rule, given)
        saved = {key: found[key] for key in ("of", "samples", "digest")}
        ids, shards = _parts(found)
    except (KeyError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"{file} must be a file of `save_shards`: {error}") from error
    if saved != (own := _digest(of)):
        raise check.wrong("of", f"be the data set of the file, {_told(saved)}", _told(own))
    return shards if ids is None else dict(zip(ids, shards, strict=True))


def _parts(found: Mapping[str, Any]) -> tuple[list[int] | None, list[Indices]]:
    """Return the ids of clients, if they have some, and their positions, as they were saved."""
    ids, parts = found["clients"], found["shards"]
    check.instance("shards", parts, list, "list the positions of each client")
    check.some("shards", parts, "have at least one client")
    check.count("samples", found["samples"])
    shards = [_positions(c, part, found["samples"]) for c, part in enumerate(parts)]
    if ids is not None:
        known = convert.integers("clients", ids)
        fits = len({*ids}) == len(known) == len(shards)
        check.require(fits, "clients", f"have {len(shards)} ids, each once", check.some_names(ids))
    if found.get("division", division := _division(ids, parts)) != division:
        raise check.wrong("shards", "be those that were saved", "others: the file was changed")
    return ids, shards


def _division(ids: Any, parts: Any) -> str:
    return hashlib.sha256(json.dumps([ids, parts]).encode()).hexdigest()


def _positions(client: int, positions: Any, samples: int) -> Indices:
    of = ", the positions in the data set"
    return convert.integers(f"shards[{client}]", positions, below=samples, of=of)


def _told(about: Mapping[str, Any]) -> str:
    return f"{about['samples']} {about['of']} with digest {str(about['digest'])[:12]}"


def _digest(of: Any) -> dict[str, Any]:
    """Return the kind, the number and the SHA-256 digest of labels, file names, or both."""
    if isinstance(of, Folder):
        kind, entries = "files of a folder", []
        for path, label in zip(of.paths, of.labels, strict=True):
            below = path.relative_to(of.root) if path.is_relative_to(of.root) else path
            entries.append(f"{below.as_posix()}\t{of.class_names[label]}")
    else:
        entries = convert.entries("of", of)
        kind = "file names"
        if not all(isinstance(entry, str | PathLike) for entry in entries):
            kind, entries = "labels", convert.integers("of", entries).tolist()
        else:
            entries = [PurePath(fspath(entry)).as_posix() for entry in entries]
    check.some("of", entries, "have at least one sample")
    text = normalize("NFC", json.dumps(entries, ensure_ascii=False))
    digest = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()
    return {"of": kind, "samples": len(entries), "digest": digest}
