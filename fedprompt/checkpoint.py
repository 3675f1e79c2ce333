"""Checkpoints: the state of a run, saved completely or not at all."""

import hashlib
import json
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

import fedprompt._refusals as check
from fedprompt._files import locked, parts_of, path_of, replace_files
from fedprompt._state_files import NAME, StateFolder, StatesOnDisk
from fedprompt._trees import kinds_of_devices, moved, on_cpu, packed, parsed, texts_of, unpacked

_FORMAT = "fedprompt checkpoint 2"
_STATE = "state.json"
_TENSORS = re.compile(r"tensors-[0-9a-f]{16}\.safetensors")
_DEVICES = "devices"
_NAMED_FILES = f"contain the files that {_STATE} names"


def save_checkpoint(state: Any, directory: str | os.PathLike[str]) -> None:
    """Save the state of a run, completely or not at all.

    At every moment the directory contains one complete state. The old state is replaced when all
    bytes of the new one are on the disk. A killed process, a full disk or a power failure costs the
    rounds since the last call, and nothing else.

    A save that fails removes its files. A save that is killed leaves at most one set of files,
    which the next save removes first. The disk needs space for two states. One process at a time
    saves to a directory: a second one waits for 30 seconds. Others may load at the same time.

    Each call writes the whole state. States of clients that are on the disk
    (``run_rounds(..., states=)``) are not written again: their files get a second name.

    Args:
        state: Tree of dicts (keys are strings or integers), lists and tuples. Its leaves are
            tensors, :class:`Weighted`, :class:`Round`, strings, numbers, booleans and None. This
            includes ``state_dict()`` of modules and optimizers, states of server rules,
            ``generator.get_state()`` and, of ``numpy.random.default_rng()``, its
            ``bit_generator.state``. Values and kinds of devices are restored; gradients are not
            saved.
        directory: Directory of this checkpoint, created if necessary. It contains ``state.json``
            and one safetensors file, ``tensors-`` with 16 hex digits, and of each client whose
            state is on the disk, ``client-`` with its id, a round and a digest. Other files are
            kept.

    Raises:
        TypeError: If a part of `state` has another type. Nothing is written then.
        ValueError: If `state` has more than 100 levels, or contains itself. Also if ``state.json``
            is missing next to tensors, because these may be the only remains of a run.
        TimeoutError: If another process still saves after 30 seconds.

    Example:
        >>> import tempfile
        >>> state = {"server_round": 3, "values": {"head": torch.ones(2)}}
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     save_checkpoint(state, directory)
        ...     load_checkpoint(directory)
        {'server_round': 3, 'values': {'head': tensor([1., 1.])}}
    """
    directory = path_of("directory", directory, of="directory")
    tensors: dict[str, Tensor] = {}
    files: dict[str, Any] = {}
    tree = json.dumps(packed(state, "state", tensors, files))
    devices = json.dumps(kinds_of_devices(tensors))
    blob = safetensors.torch.save(on_cpu(tensors), {_DEVICES: devices})
    digest = _digest(tree, blob)
    name = f"tensors-{digest[:16]}.safetensors"
    record = {"format": _FORMAT, "tensors": name, "sha256": digest, "state": tree}
    taken = StateFolder.at(directory).lock.is_locked
    check.require(not taken, "directory", "be another folder than `states`", directory)
    directory.mkdir(parents=True, exist_ok=True)
    with locked(directory):
        _check_not_lost(directory / _STATE)
        _clean(directory)
        try:
            for name_of_state in files.keys() - _files(directory):
                files[name_of_state].link_into(directory)
            # Tensors first: a state must never name a missing file.
            replace_files({directory / name: blob, directory / _STATE: json.dumps(record).encode()})
        finally:
            _clean(directory)  # removes new files after a failure, old tensors after a success


def load_checkpoint(
    directory: str | os.PathLike[str],
    *,
    default: Any = ...,
    device: torch.device | str | None = None,
) -> Any:
    """Load the last complete state of :func:`save_checkpoint`.

    Loading runs no code from the files. A digest covers the tree and its tensors, so damaged files
    are refused. It does not detect deliberate changes.

    Args:
        directory: Directory of the checkpoint.
        default: Result if no save to `directory` was ever completed. Without a default, that is an
            error.
        device: Device of the tensors that were not on the CPU. If None, the kind of device that
            they were on, such as "cuda" for "cuda:1".

    Returns:
        An equal tree.

    Raises:
        FileNotFoundError: If there is neither a state nor a `default`.
        ValueError: If the files are damaged, if ``state.json`` is missing next to tensors, or if
            this machine does not have the device.

    Example:
        A loop that can be killed at any time. Here the process starts twice.

        >>> import tempfile
        >>> start = {"server_round": 0, "values": {"head": torch.zeros(2)}}
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     for process in range(2):
        ...         state = load_checkpoint(directory, default=start)
        ...         for server_round in range(state["server_round"], 3):
        ...             values = {"head": state["values"]["head"] + 1}
        ...             state = {"server_round": server_round + 1, "values": values}
        ...             save_checkpoint(state, directory)
        >>> state
        {'server_round': 3, 'values': {'head': tensor([3., 3.])}}
    """
    path = path_of("directory", directory, of="directory") / _STATE
    _check_not_lost(path)
    if not path.exists():
        if default is ...:
            raise FileNotFoundError(f"`directory` must hold a checkpoint; there is no {path}")
        return default
    for _ in range(10):  # another process may save in between, and remove what was named
        try:
            return _loaded(path, device)
        except FileNotFoundError as error:
            missing = Path(error.filename).name
    raise check.wrong("directory", _NAMED_FILES, f"no file {missing!r}")


def _loaded(path: Path, device: torch.device | str | None) -> Any:
    name, digest, tree = _record(path)
    blob = (path.parent / name).read_bytes()
    rule = f"contain the saved state, of which {_STATE} has the digest"
    check.require(_digest(tree, blob) == digest, "directory", rule, "other content")
    states = partial(StatesOnDisk.of_list, StateFolder.at(path.parent), device)
    kinds: dict[str, str] = {}
    try:
        kinds |= parsed(texts_of(blob)[_DEVICES])
        tensors = moved(safetensors.torch.load(blob), kinds, device)
        return unpacked(parsed(tree), tensors, states)
    except (AssertionError, RuntimeError) as error:  # the first if PyTorch has no CUDA
        rule = f"be one of this machine, because tensors were on {sorted(set(kinds.values()))}"
        raise check.wrong("device", rule, device) from error
    except (TypeError, ValueError, KeyError, safetensors.SafetensorError) as error:
        rule = "contain a state as `save_checkpoint` writes it"
        raise check.wrong("directory", rule, error) from error


def _digest(tree: str, blob: bytes) -> str:
    # A damaged text may contain half a character.
    total = hashlib.sha256(tree.encode(errors="surrogatepass"))
    total.update(blob)
    return total.hexdigest()


def _record(path: Path) -> tuple[str, str, str]:
    try:
        record = parsed(path.read_bytes())
        parts = tuple(record[key] for key in ("format", "tensors", "sha256", "state"))
    except (ValueError, KeyError, TypeError) as error:
        got = f"damaged content ({type(error).__name__}: {error})"
        raise check.wrong("directory", f"contain a checkpoint in {_STATE}", got) from error
    if not all(isinstance(part, str) for part in parts):
        got = f"damaged content ({', '.join(type(part).__name__ for part in parts)})"
        raise check.wrong("directory", f"contain a checkpoint in {_STATE}", got)
    given, name, digest, tree = parts
    rule = f"contain a checkpoint of format {_FORMAT!r}"
    check.require(given == _FORMAT, "directory", rule, given)
    check.require(_TENSORS.fullmatch(name), "directory", _NAMED_FILES, f"no file {name!r}")
    return name, digest, tree


def _clean(directory: Path) -> None:
    """Remove files that no state refers to.

    If the state cannot be read, complete files stay: they may be the only remains of a run.
    `_check_not_lost` comes before, so tensors without a state are those of an interrupted save.
    """
    state = directory / _STATE
    leftovers = set(parts_of(directory, f"{_TENSORS.pattern}|{NAME.pattern}"))
    named = _named(state)
    if named is not None or not state.exists():
        used = (named or set()) | {*StateFolder.at(directory).files}
        leftovers |= {directory / name for name in _files(directory) - used}
    for leftover in leftovers:
        leftover.unlink()
    for part in parts_of(directory, re.escape(_STATE)):
        part.unlink()  # last: it tells that they may go


def _files(directory: Path) -> set[str]:
    """List the files with names that this package gives to tensors and to states of clients."""
    found = {entry.name for entry in os.scandir(directory) if entry.is_file()}
    return {name for name in found if _TENSORS.fullmatch(name) or NAME.fullmatch(name)}


def _check_not_lost(state: Path) -> None:
    """Refuse complete tensors if the state that named them is missing.

    An interrupted first save also leaves tensors without a state. It leaves a preliminary state
    that names them, too.
    """
    if state.exists() or not state.parent.is_dir():
        return
    begun = [_named(part) or set() for part in parts_of(state.parent, re.escape(_STATE))]
    lost = {name for name in _files(state.parent).difference(*begun) if _TENSORS.fullmatch(name)}
    check.require(
        not lost, "directory", f"contain {_STATE}, which names its tensors", "tensors alone"
    )


def _named(state: Path) -> set[str] | None:
    """Return the names of the files in a state, or None if the state cannot be read."""
    try:
        name, _, tree = _record(state)
    except (FileNotFoundError, ValueError):
        return None
    return {name, *NAME.findall(tree)}
