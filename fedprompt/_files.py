"""Paths, and files that are replaced completely or not at all, by one process at a time."""

import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from runpy import run_path
from typing import Any

from filelock import FileLock, Timeout

import fedprompt._refusals as check

WAIT = 30.0
"""Seconds that a process waits for another one that writes."""


IN_A_FILE = "be a function at the top of a file, or its place, such as 'mine.py:method'"
"""Rule for functions that another process imports."""


def function_at(place: Any) -> Any:
    """Return the function at a place FILE:NAME; a function is returned as it is."""
    if isinstance(place, str):
        file, _, name = place.rpartition(":")
        check.require(Path(file).is_file(), "method", IN_A_FILE, repr(place))
        place = run_path(file, run_name=Path(file).stem).get(name)
    check.function("method", place, IN_A_FILE)
    return place


def path_of(argument: str, path: object, *, of: str = "file") -> Path:
    """Return a path after checking that it is text and not empty."""
    if not isinstance(path, str | os.PathLike) or not isinstance(text := os.fspath(path), str):
        raise check.wrong_type(argument, "be a path (a string or a pathlib.Path)", check.kind(path))
    # Path("") is the working directory.
    check.require(text != "", argument, f"be the path of a {of}", "an empty path")
    return Path(path)


def file_of(path: object) -> Path:
    """Return the path of a regular file, or of no file yet. Reading a pipe would not return."""
    given = path_of("path", path)
    found = "a directory" if given.is_dir() else "a pipe or a device"
    check.require(not given.exists() or given.is_file(), "path", "be the path of a file", found)
    return given


@contextmanager
def locked(path: Path, *, wait: float | None = None) -> Iterator[None]:
    """Let one writer at a time write a file, or to a directory. Reading needs no lock.

    The lock is a file next to the path, ``.NAME.lock``, or ``.lock`` in a directory. The file
    stays; the system frees the lock when its process ends.

    Args:
        path: File or directory.
        wait: Seconds to wait for another process. If None, 30; a negative number is without end,
            for files that take long to make.

    Raises:
        TimeoutError: If another process still writes after this time.
    """
    wait = WAIT if wait is None else wait
    lock = path / ".lock" if path.is_dir() else path.with_name(f".{path.name}.lock")
    try:
        with FileLock(lock, timeout=wait):
            yield
    except Timeout as error:
        rule = f"`{path}` is written by another process; waited {wait:g} s. See {lock}."
        raise TimeoutError(rule) from error


def replace_file(path: Path, content: bytes) -> None:
    """Write a file completely or not at all. An existing file is replaced at the end."""
    path = path.resolve()  # a link stays, and its target is replaced
    with locked(path):
        remove_parts(path.parent, re.escape(path.name))
        try:
            replace_files({path: content})
        finally:
            remove_parts(path.parent, re.escape(path.name))


def replace_files(contents: Mapping[Path, bytes]) -> None:
    """Replace files in the given order, after all contents are on the disk. They keep their modes.

    After an error, preliminary files and a part of the new files remain.
    """
    parts = {}
    for path, content in contents.items():
        parts[path] = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
        with new_file(parts[path], like=path) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    for path, part in parts.items():
        os.replace(part, path)
        sync(path.parent)


def new_file(path: Path, *, like: Path) -> Any:
    """Open a file that does not exist yet, with the mode of another one, if that exists."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags, 0o666)
    if hasattr(os, "fchmod") and like.exists():
        os.fchmod(descriptor, stat.S_IMODE(like.stat().st_mode))
    return os.fdopen(descriptor, "wb")


def link(source: Path, target: Path) -> None:
    """Give a file a second name, or copy it to another disk, completely or not at all."""
    try:
        os.link(source, target)
    except FileExistsError:
        pass
    except OSError:
        replace_files({target: source.read_bytes()})


def sync_file(path: Path) -> None:
    """Synchronize the content of a file to the disk."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def parts_of(directory: Path, name: str) -> list[Path]:
    """List the preliminary files of files whose names match an expression."""
    pattern = re.compile(rf"(?:{name})\.[0-9a-f]{{16}}\.part")
    return [path for path in directory.glob("*.part") if pattern.fullmatch(path.name)]


def remove_parts(directory: Path, name: str) -> None:
    """Remove what killed writers left of files whose names match an expression."""
    for part in parts_of(directory, name):
        part.unlink(missing_ok=True)


def sync(directory: Path) -> None:
    """Synchronize the names in a directory to the disk."""
    if os.name == "posix":  # elsewhere a directory cannot be opened
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
