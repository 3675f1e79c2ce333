"""Finished runs, each one line of a JSON-lines file, so that a killed study continues."""

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

Record = dict[str, Any]
NAMED = ("task", "partition", "row", "seed", "trial", "values")
ROOT = Path(__file__).parents[2]


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
    named |= {"version": version("fedprompt"), "torch": torch.__version__}
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


def rounded(figures: dict[str, Any]) -> Record:
    """Round figures, which are numbers or lists of them, to six digits."""
    return json.loads(json.dumps(figures), parse_float=_rounded, parse_int=_rounded)


def _rounded(number: str) -> float:
    return float(f"{float(number):.6g}")
