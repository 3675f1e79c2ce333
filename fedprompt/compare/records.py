"""A run of ``fedprompt compare`` in a folder: its stamp, a line for each finished row and seed.

Several programs may write to one folder. Each reads it once, when it starts, and appends.
"""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
import torch

from fedprompt._files import locked, remove_parts, replace_files
from fedprompt.compare import stamps
from fedprompt.compare.trials import CompareError

Record = dict[str, Any]
"""Figures of a finished run, and what tells it from the others."""

NAMED = ("partition", "row", "seed", "trial", "values")
NEEDED = {*NAMED, "own"}
NUMBERS = {"own", "full", "worst", "received", "after", "new", "h", "trained", "backward"}
NUMBERS |= {"bytes_up", "bytes_down", "shrink"}
KINDS: dict[str, Any] = {
    **dict.fromkeys(NUMBERS, (int, float)),
    **dict.fromkeys(("task", "partition", "row", "code", "device", "stamp"), str),
    **{"seed": int, "trial": (int, NoneType), "values": dict, "clients": dict},
}
"""Types of the fields that tables and keys are made from."""
_encode = json.JSONEncoder(sort_keys=True, default=str).encode  # made once for all records
ROOT = Path(__file__).parents[2]
LINES, RUN = "records.jsonl", stamps.RUN
DIVIDED = "division"
"""Part of a run's stamp that has another value for each seed."""


def key(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what tells a row and a seed from the others of a run."""
    named = tuple(record.get(name) for name in ("partition", "row", "seed", "trial", "stamp"))
    return (*named, _encode(record["values"]))


def written(value: Any) -> Any:
    """Return a value as a file has it: keys are texts, and sequences are lists."""
    if isinstance(value, Mapping):
        return {str(key): written(each) for key, each in value.items()}
    return [*map(written, value)] if isinstance(value, list | tuple) else value


def enter(out: Path, stamp: Mapping[str, Any], *, again: bool = False) -> Path:
    """Begin a run in a folder, or continue the same one, and return the folder.

    Args:
        out: Folder.
        stamp: What the run is made from, by name. Of divisions, seeds may be added.
        again: Whether to begin in a new folder beside one that has a run.

    Raises:
        CompareError: If the folder has another run. Nothing is written then.
    """
    stamp = json.loads(json.dumps(stamp, default=str))
    place = next(each for each in _beside(out, again) if not (again and (each / RUN).exists()))
    _check_same(place, stamp)
    place.mkdir(parents=True, exist_ok=True)
    with locked(place / RUN):
        known = _check_same(place, stamp)
        divided = {p: known[DIVIDED].get(p, {}) | each for p, each in stamp[DIVIDED].items()}
        content = json.dumps({**known, DIVIDED: divided}, indent=1, default=str)
        remove_parts(place, re.escape(RUN))
        replace_files({place / RUN: content.encode()})
    return place


def _check_same(place: Path, stamp: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the stamp of the run in a folder, or the new one if nothing has finished there."""
    known = _read_run(place / RUN)
    if not (place / LINES).exists():
        return stamp
    if known is None:
        raise CompareError(f"{place} has records without {RUN}. {_REMEDY}")
    if wrong := _differing(known, stamp):
        what = ", ".join(wrong[:4]) + (" and more" if len(wrong) > 4 else "")
        raise CompareError(f"{place} has another run, which differs in {what}. {_REMEDY}")
    return known


_REMEDY = "Begin anew beside it by `again`, or choose another `out`."


def _beside(out: Path, again: bool) -> Iterable[Path]:
    yield out
    for number in range(2, 10_000) if again else ():
        yield out.with_name(f"{out.name}-{number}")


def _read_run(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_bytes())
        return found if isinstance(found, dict) and DIVIDED in found else {DIVIDED: {}}
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise CompareError(f"{path} must be the stamp of a run. Repair or delete it.") from error


def _differing(known: Mapping[str, Any], stamp: Mapping[str, Any]) -> list[str]:
    plain = [{name: each for name, each in of.items() if name != DIVIDED} for of in (known, stamp)]
    wrong = stamps.differing(*plain)
    for partition, seeds in () if wrong else stamp[DIVIDED].items():
        before = known[DIVIDED].get(partition, {})
        differ = [seed for seed in seeds if before.get(seed, seeds[seed]) != seeds[seed]]
        wrong += [f"the {DIVIDED} of seed {seed}" for seed in differ[:1]]
    return wrong


class Records:
    """Lines of a file, which is read once.

    Args:
        path: File, or None if nothing is written.
        run: Digest of the stamp of the run. Lines of another one, which began in the same folder
            at the same time, are passed over.

    Attributes:
        found: The newest record by its key.
    """

    def __init__(self, path: Path | None, run: str | None = None) -> None:
        self.path, self.run = path, run
        listed = [] if path is None else read(path)
        self.found = {key(each): each for each in listed if run in (None, each.get("run"))}

    def add(self, record: Record) -> None:
        """Append a record, and know it."""
        record |= {} if self.run is None else {"run": self.run}
        if self.path is not None:
            append(self.path, record)
        self.found[key(record)] = record

    def others(self, shown: Iterable[Record]) -> list[str]:
        """Say which rows that are shown have records of other stamps."""
        now = {(record["partition"], record["row"]): record.get("stamp") for record in shown}
        counts = dict[str, int]()
        for record in self.found.values():
            where = record["partition"], record["row"]
            if record["trial"] is None and now.get(where, record.get("stamp")) != record.get(
                "stamp"
            ):
                counts[record["row"]] = counts.get(record["row"], 0) + 1
        return [f"{row}: {count} of other versions of it" for row, count in counts.items()]


def read(path: Path) -> list[Record]:
    """Return the records of a file, if there is one, without lines that were cut.

    Raises:
        CompareError: If another line is no record.
    """
    if not path.exists():
        return []
    found = []
    for number, line in enumerate(path.read_text("utf-8", "replace").split("\n"), 1):
        record = _parsed(line)
        if _is_record(record):
            found.append(record)
        elif line and not (record is None and line.startswith("{")):  # a line that was cut
            rule = f"be a record with {', '.join(NAMED)} and own, each of its type"
            raise CompareError(f"Line {number} of {path} must {rule}. Repair or delete it.")
    return found


def newest(found: Sequence[Record]) -> list[Record]:
    """Return the last record of each row and seed; all seeds of a row have the last stamp."""
    stamp_of = {(record["partition"], record["row"]): record.get("stamp") for record in found}
    last = {
        (record["partition"], record["row"], record["seed"]): record
        for record in found
        if record["trial"] is None
        and stamp_of[record["partition"], record["row"]] == record.get("stamp")
    }
    return list(last.values())


def _parsed(line: str) -> Any:
    """Read a line, or return None if it is not JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _is_record(found: Any) -> bool:
    """Return whether a line has all fields, and each of them is of its type."""
    if not isinstance(found, dict) or not found.keys() >= NEEDED:
        return False
    for name, value in found.items():
        if name in KINDS and not isinstance(value, KINDS[name]):
            return False
    for figures in found.get("clients", {}).values():
        if type(figures) is not dict or not {*map(type, figures.values())} <= {int, float}:
            return False
    return True


def append(path: Path, record: Record) -> None:
    """Write a record as one line, which is on the disk before this returns.

    A last line that a killed program cut gets an end, and is not read. The file is not read here.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path), path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
        cut = file.read(1) not in (b"\n", b"")
        file.write((b"\n" if cut else b"") + json.dumps(record).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays to a file, completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    remove_parts(path.parent, re.escape(path.name))
    replace_files({path: file.getvalue()})


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
    named |= {"version": stamps.versions()["fedprompt"], "torch": stamps.versions()["torch"]}
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
