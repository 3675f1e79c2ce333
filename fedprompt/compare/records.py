"""Finished runs, each one line of a JSON-lines file, so that a killed program continues."""

import json
import os
import re
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from fedprompt._files import locked
from fedprompt.compare.problems import COLUMNS, COSTS, NEWCOMERS, Record
from fedprompt.compare.trials import CompareError

NAMED = ("task", "partition", "row", "seed", "trial", "values")
KINDS: dict[str, Any] = {
    **dict.fromkeys((*COLUMNS, *NEWCOMERS, *COSTS, "new", "h", "shrink"), int | float),
    **dict.fromkeys(("task", "partition", "row", "code", "device"), str),
    **{"seed": int, "trial": int | None, "values": dict, "inputs": list, "clients": dict},
}
"""Types of the fields that tables and keys are made from."""
ROOT = Path(__file__).parents[2]


def read(path: Path) -> list[Record]:
    """Return the records of a file, if there is one, without a last line that was cut.

    Raises:
        CompareError: If another line is no record.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    found = list(map(_parsed, lines if _parsed(lines[-1]) is not None else lines[:-1]))
    for number, record in enumerate(found, 1):
        if not _is_record(record):
            rule = f"be a record with {', '.join(NAMED)} and own, each of its type"
            raise CompareError(f"Line {number} of {path} must {rule}. Repair or delete it.")
    return found


def _parsed(line: bytes) -> Any:
    """Read a line, or return None if it is not JSON. A record that was cut has no last bracket."""
    try:
        return json.loads(line)
    except ValueError:
        return None


def _is_record(found: Any) -> bool:
    """Return whether a line has all fields, and each of them is of its type."""
    if not isinstance(found, dict) or not found.keys() >= {*NAMED, "own"}:
        return False
    if not all(isinstance(found[name], KINDS[name]) for name in KINDS.keys() & found):
        return False
    clients = found.get("clients", {}).values()
    numbers = [value for each in clients if isinstance(each, dict) for value in each.values()]
    flat = all(isinstance(value, int | float) for value in numbers)
    return flat and all(isinstance(each, dict) for each in clients)


def append(path: Path, record: Record) -> None:
    """Write a record as one line, which is on the disk before this returns.

    Several programs may write to one file. A last line that a killed program cut is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path), path.open("ab+") as file:
        file.seek(0)
        *_, last = file.read().split(b"\n")
        if last and _parsed(last) is None:
            file.truncate(file.tell() - len(last))
            last = b""
        file.write((b"\n" if last else b"") + json.dumps(record).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


@cache
def origin() -> Record:
    """Return the commit, the versions of the library and of torch, the processor and the date.

    The processor is its widest instruction set, as torch names it, and on Linux vendor, family and
    model, because processors with one set round sums differently. Older records name the set only.

    The commit is missing without a git repository. It ends with "-dirty" if files of the library
    or of the examples differ from it.
    """
    commit = _git("rev-parse", "--short", "HEAD")
    changed = _git("status", "--porcelain", "--", "fedprompt", "examples")
    named = {"commit": f"{commit}-dirty" if changed else commit} if commit else {}
    date = datetime.now(UTC).date().isoformat()
    named |= {"version": version("fedprompt"), "torch": str(torch.__version__)}
    text = Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else ""
    model = re.findall(r"(?:vendor_id|family|model)\s*: (.*)", text)[:3]
    processor = " ".join([torch.backends.cpu.get_cpu_capability(), *model])
    return named | {"processor": processor, "date": date}


def _git(*command: str) -> str:
    """Return what git prints, or nothing without git or a repository that it can read."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        return ""
    done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def rounded(figures: Record) -> Record:
    """Round figures, which are numbers or lists or dicts of them, to six digits."""
    found: Record = json.loads(json.dumps(figures), parse_float=_rounded, parse_int=_rounded)
    return found


def _rounded(number: str) -> Any:
    return float(f"{float(number):.6g}")
