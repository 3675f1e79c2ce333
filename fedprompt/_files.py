"""Paths, and files that are replaced completely or not at all."""

import os
import stat
from collections.abc import Mapping
from pathlib import Path

import fedprompt._checks as check


def checked_path(argument: str, path: object, *, of: str = "file") -> Path:
    """Return a path after checking that it is text and not empty."""
    if not isinstance(path, str | os.PathLike) or not isinstance(text := os.fspath(path), str):
        raise check.wrong_type(argument, "be a path (a string or a pathlib.Path)", check.kind(path))
    if text == "":  # Path("") is the working directory
        raise check.wrong(argument, f"be the path of a {of}", "an empty path")
    return Path(path)


def checked_file(argument: str, path: object) -> Path:
    """Return the path of a regular file, or of no file yet. Reading a pipe would not return."""
    checked = checked_path(argument, path)
    if checked.exists() and not stat.S_ISREG(checked.stat().st_mode):
        found = "a directory" if checked.is_dir() else "a pipe or a device"
        raise check.wrong(argument, "be the path of a file", found)
    return checked


def replace_file(path: Path, content: bytes) -> None:
    """Write a file completely or not at all. An existing file is replaced at the end."""
    path = path.resolve()  # a link stays, and its target is replaced
    try:
        replace_files({path: content})
    finally:
        _part(path).unlink(missing_ok=True)


def replace_files(contents: Mapping[Path, bytes]) -> None:
    """Replace files in the given order, after all contents are on the disk.

    After an error, preliminary files and a part of the new files remain.
    """
    for path, content in contents.items():
        with _part(path).open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    for path in contents:
        os.replace(_part(path), path)
        _sync(path.parent)


def _part(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")


def _sync(directory: Path) -> None:
    """Synchronize the names in a directory to the disk."""
    if os.name == "posix":  # elsewhere a directory cannot be opened
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
