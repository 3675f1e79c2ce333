"""Everything that a run remembers, saved so that no moment of a crash can spoil it."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from torch import Tensor

from fedprompt._checks import kind, wrong_type, wrong_value
from fedprompt._trees import packed, unpacked

__all__ = ["load_checkpoint", "save_checkpoint"]

_FORMAT = "fedprompt checkpoint 2"
_STATE, _TENSORS = "state.json", "tensors-"
_RAISE = object()


def save_checkpoint(state: Any, directory: str | os.PathLike[str]) -> None:
    """Save whatever a run remembers, as a whole or not at all.

    At every moment the directory holds one complete state: the last one, until the new one is on
    the disk to its last byte. A killed process, a full disk or a power cut costs the rounds since
    the last call and nothing else. A save that fails removes its files, and one that was killed
    leaves at most one set, which the next save removes before it writes. The disk needs space for
    two states. One process at a time may save to a directory; others may load from it meanwhile.

    Each call writes the whole state. A :class:`Ledger` with a `path` adds only a few bytes to it.

    Args:
        state: A tree of dicts (keys are strings or integers), lists and tuples over tensors, :class:`Weighted`, strings, numbers, booleans
            and None: what ``state_dict()`` of modules and optimisers, server updates, ``generator.get_state()`` and NumPy's
            ``generator.bit_generator.state`` give. All of it is remembered to the bit; gradients and devices are not.
        directory: Made if need be; belongs to one checkpoint. Holds ``state.json`` and one safetensors file that it names.

    Raises:
        TypeError: If something in `state` is of another kind, which loading could not give back; nothing is written then.
        ValueError: If `directory` is empty.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     save_checkpoint({"server_round": 3, "values": {"head": torch.ones(2)}}, directory)
        ...     load_checkpoint(directory)
        {'server_round': 3, 'values': {'head': tensor([1., 1.])}}
    """
    import safetensors.torch

    directory = _folder(directory)
    tensors: dict[str, Tensor] = {}
    tree = json.dumps(packed(state, "state", tensors))
    blob = safetensors.torch.save(tensors)
    digest = _digest(tree, blob)
    name = f"{_TENSORS}{digest[:16]}.safetensors"
    record = {"format": _FORMAT, "tensors": name, "sha256": digest, "state": tree}
    directory.mkdir(parents=True, exist_ok=True)
    _clean(directory)
    try:
        parts = [
            _part(directory / name, blob),
            _part(directory / _STATE, json.dumps(record).encode()),
        ]
        for part in parts:  # tensors first: a state must never name a file that is not there
            os.replace(part, part.with_suffix(""))
            _sync(directory)
    finally:
        _clean(directory)  # after a failure the new files, after a success the old tensors


def load_checkpoint(directory: str | os.PathLike[str], *, default: Any = _RAISE) -> Any:
    """Load what :func:`save_checkpoint` saved last.

    Nothing in the files can run code. Whatever was damaged on the disk is refused whole, as a digest covers the tree and its tensors; that
    is no proof against somebody who edits them on purpose and computes it anew.

    Args:
        directory: Where it was saved.
        default: Returned if no save to `directory` was ever completed. Without it, that is an
            error.

    Returns:
        An equal tree, its tensors on the CPU.

    Raises:
        FileNotFoundError: If nothing was saved there and there is no `default`.
        ValueError: If the files are not what was saved, or ``state.json`` is gone and tensors
            remain.

    Example:
        The head of a loop that can be killed at any time:

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     for start in range(2):  # as if the process began twice
        ...         state = load_checkpoint(directory, default={"server_round": 0, "values": {"head": torch.zeros(2)}})
        ...         for server_round in range(state["server_round"], 3):
        ...             values = {"head": state["values"]["head"] + 1}
        ...             state = {"server_round": server_round + 1, "values": values}
        ...             save_checkpoint(state, directory)
        >>> state
        {'server_round': 3, 'values': {'head': tensor([3., 3.])}}
    """
    import safetensors.torch

    path = _folder(directory) / _STATE
    if _lost(path):
        raise wrong_value("directory", f"hold {_STATE}, which names its tensors", "tensors alone")
    if not path.exists():
        if default is _RAISE:
            raise FileNotFoundError(f"`directory` must hold a checkpoint; there is no {path}")
        return default
    tree, digest, blob = _read(path)
    if _digest(tree, blob) != digest:
        raise wrong_value(
            "directory", f"hold what was saved, of which {_STATE} has the digest", "other content"
        )
    return unpacked(json.loads(tree), safetensors.torch.load(blob))


def _folder(directory: object) -> Path:
    if not isinstance(directory, str | os.PathLike):
        raise wrong_type("directory", "be a path", kind(directory))
    if os.fspath(directory) == "":  # would be the working directory
        raise wrong_value("directory", "name a folder", "an empty path")
    return Path(directory)


def _digest(tree: str, blob: bytes) -> str:
    total = hashlib.sha256(
        tree.encode(errors="surrogatepass")
    )  # a damaged text may hold half a character
    total.update(blob)
    return total.hexdigest()


def _read(path: Path) -> tuple[str, str, bytes]:
    """Read the tree's text, the digest and the tensors; again, if a process that saved in between took those tensors away."""
    for _ in range(10):
        name, digest, tree = _record(path)
        try:
            return tree, digest, (path.parent / name).read_bytes()
        except FileNotFoundError:
            pass
    raise wrong_value("directory", f"hold the tensors that {_STATE} names", f"no file {name!r}")


def _record(path: Path) -> tuple[str, str, str]:
    try:
        record = json.loads(path.read_bytes())
        parts = tuple(record[key] for key in ("format", "tensors", "sha256", "state"))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise wrong_value(
            "directory",
            f"hold a checkpoint in {_STATE}",
            f"damaged content ({type(error).__name__}: {error})",
        ) from error
    if not all(isinstance(part, str) for part in parts):
        raise wrong_value(
            "directory",
            f"hold a checkpoint in {_STATE}",
            f"damaged content ({', '.join(type(part).__name__ for part in parts)})",
        )
    given, name, digest, tree = parts
    if given != _FORMAT:
        raise wrong_value("directory", f"hold a checkpoint of format {_FORMAT!r}", given)
    if Path(name).name != name or not name.startswith(_TENSORS):
        raise wrong_value("directory", f"hold the tensors that {_STATE} names", f"no file {name!r}")
    return name, digest, tree


def _part(path: Path, content: bytes) -> Path:
    """Write a file under a preliminary name, to the last byte on the disk."""
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return part


def _sync(directory: Path) -> None:
    """Make the names in a directory survive a power cut."""
    if os.name == "posix":  # elsewhere a directory cannot be opened
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _clean(directory: Path) -> None:
    """Remove what no state refers to.

    Without a readable state, complete tensors stay: they may be all that is left of a run.
    """
    state = directory / _STATE
    leftovers = set(directory.glob(f"{_TENSORS}*.part"))
    named = _named(state)
    if named is not None:
        leftovers |= set(directory.glob(f"{_TENSORS}*")) - {directory / named}
    elif not state.exists() and not _lost(state):
        leftovers |= set(directory.glob(f"{_TENSORS}*"))
    for leftover in leftovers:
        leftover.unlink()
    state.with_name(f"{_STATE}.part").unlink(missing_ok=True)  # last: until then it explains them


def _lost(state: Path) -> bool:
    """Whether complete tensors are there but the state that named them is gone.

    A first save that was cut short leaves tensors without a state, too, but beside a part of the
    state that names them.
    """
    complete = {path.name for path in state.parent.glob(f"{_TENSORS}*") if path.suffix != ".part"}
    begun = _named(state.with_name(f"{_STATE}.part"))
    return bool(complete - {begun}) and not state.exists()


def _named(state: Path) -> str | None:
    """Read which tensors a state names; None where it cannot be read."""
    try:
        return _record(state)[0]
    except (FileNotFoundError, ValueError):
        return None
