"""Finished runs, each one line of a JSON-lines file, so that a killed study continues."""

import json
import os
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def read(path: Path) -> list[Record]:
    """Return the records of a file, if there is one, without a last line that was cut."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def append(path: Path, record: Record) -> None:
    """Write a record as one line, which is on the disk before this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and (text := path.read_text()) and not text.endswith("\n"):
        path.write_text(text[: text.rfind("\n") + 1])  # a killed study cut the last line
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")
        file.flush()
        os.fsync(file.fileno())


def rounded(figures: dict[str, Any]) -> Record:
    """Round figures, which are numbers or lists of them, to six digits."""
    return {
        name: [_rounded(each) for each in value] if isinstance(value, list) else _rounded(value)
        for name, value in figures.items()
    }


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
