"""Lists of images: a CSV with paths and labels, and CoOp's split_zhou_*.json."""

import csv
import json
import stat
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from fedprompt.data.doubts import both
from fedprompt.data.wording import few, named

SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "eval"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}
"""Split by the name of its folder in lower case, with the synonyms of timm."""
LISTS = {"coop": "split_zhou_*.json", "csv": "*.csv"}
"""Names of lists by their layout."""
ROW = {"path", "label", "domain", "split"}
COLUMNS = {"file_name": "path", "client": "domain"}
"""Columns of a list, and other names of two."""
MISSING = {"nan", "NaN", "NAN", "<NA>", "null", "NULL", "None"}
"""Labels that other programs write where there is none."""
WORDS = "classnames.txt"
"""Names in words of the classes of a folder or a table, as for ImageNet in CoOp."""
ARCHIVES = {".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".7z", ".rar"}
"""Extensions of archives, which are not opened."""


class Row(NamedTuple):
    """One image: its file, the names of its class, domain and split, and its place in a list."""

    path: Path
    label: str
    domain: str = ""
    split: str = "train"
    where: str = ""


class Listed(NamedTuple):
    """Images of a list, names of classes by label in order, examples of doubts, and notes."""

    rows: list[Row]
    titles: dict[str, str]
    doubts: Mapping[str, Sequence[str]] = {}
    notes: tuple[str, ...] = ()


def fault_of(path: Path) -> str:
    """Return why a file cannot be an image or a list, without reading it."""
    try:
        status = path.stat()
    except (OSError, ValueError):  # a name with a null byte
        return "missing"
    if not stat.S_ISREG(status.st_mode):
        return "not a file"
    return "" if status.st_size else "empty"


def lists_of(path: Path) -> dict[str, list[tuple[str, Path]]]:
    """Find the lists in a folder, or the one that a path is: those of images, and others."""
    if path.is_file():
        kinds = {".json": "coop", ".csv": "csv"}
        found = [(kinds[path.suffix.lower()], path)] if path.suffix.lower() in kinds else []
    else:
        files = [(kind, file) for kind in LISTS for file in sorted(path.glob(LISTS[kind]))]
        found = [(kind, file) for kind, file in files if not fault_of(file)]
    lists: dict[str, list[tuple[str, Path]]] = {"images": [], "others": []}
    for kind, file in found:
        fits = kind == "coop" or {"path", "label"} <= {*_csv(file, head=True)[0]}
        lists["images" if fits else "others"].append((kind, file))
    return lists


def remedies(path: Path) -> str:
    """Say what helps if a path is no folder of images: other columns, two lists, archives."""
    lists = lists_of(path)
    files = [path] if path.is_file() else chain(path.iterdir(), path.glob("*/*"))
    archives = sorted(file.name for file in files if file.suffix.lower() in ARCHIVES)
    told = [f"Unpack {named(name)} first." for name in archives]
    for _, file in lists["others"]:
        got = few(map(named, _csv(file, head=True)[0]))
        told.append(f"{named(file.name)} must have columns path and label; it has {got}.")
    if len(lists["images"]) > 1:
        told.append("Make one list of them, with a column `split`: train, val or test.")
    return "".join(f" {text}" for text in told[:3])


def _csv(file: Path, *, head: bool = False) -> tuple[list[str], list[dict[str, str]]]:
    """Read the columns of a table, and its lines with their places.

    Raises:
        ValueError: If it is not a table in UTF-8.
    """
    try:
        errors = "replace" if head else "strict"  # the whole table is refused when it is read
        with file.open("rb") as start:  # tables of spreadsheets may have two bytes for a character
            coding = "utf-16" if start.read(2) in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
        with file.open(newline="", encoding=coding, errors=errors) as lines:
            first = lines.readline(10_000)
            lines.seek(0)
            reader = csv.DictReader(lines, delimiter=max(",;\t", key=first.count))
            names = [name.strip().lower() for name in reader.fieldnames or []]
            reader.fieldnames = [COLUMNS.get(name, name) for name in names]
            for name in ROW if not head else ():
                if reader.fieldnames.count(name) > 1:
                    raise csv.Error(f"it has two columns for {name}")
            rows = [] if head else [{"": f"{file}, line {reader.line_num}", **r} for r in reader]
            return list(reader.fieldnames), rows
    except (UnicodeDecodeError, csv.Error) as error:
        if head:
            return [], []
        raise ValueError(f"{named(file)} must be a table in UTF-8; {error}.") from error


def listed(kind: str, file: Path) -> Listed:
    """Read the images of a list, in its order.

    Raises:
        ValueError: If a line is wrong, or an image is listed twice.
    """
    found = (_coop if kind == "coop" else _table)(file)
    places = dict[Path, str]()
    for row in found.rows:
        if row.path in places:
            before = f"is listed before, at {places[row.path]}"
            raise ValueError(f"{row.where}: {named(row.path)} {before}.")
        places[row.path] = row.where
    return found


def _table(file: Path) -> Listed:
    """Read a table with columns path and label, and possibly domain and split."""
    rows = []
    for line in _csv(file)[1]:
        where, words = named(line[""]), {k: v.strip() for k, v in line.items() if type(v) is str}
        if words.keys() != line.keys() or not all(words.get(k) for k in ROW & line.keys()):
            raise ValueError(f"{where}: must have one entry for each column.")
        split = SPLITS.get(words.get("split", "train").lower())
        if split is None:
            raise ValueError(
                f"{where}: split must be train, val or test; got {named(words['split'])}."
            )
        label, domain = named(words["label"]), named(words.get("domain", ""))
        rows.append(Row(file.parent / words["path"], label, domain, split, where))
    labels = {row.label for row in rows}
    notes = tuple(f"a class is named {label}" for label in sorted(labels & MISSING))
    numbers = {label: int(label) for label in labels if label.isdecimal() and len(label) < 19}
    if len(numbers) < len(labels):
        return Listed(rows, {label: label for label in sorted(labels)}, notes=notes)
    order = sorted(labels, key=lambda label: (numbers[label], label))
    return Listed(rows, {label: label for label in order}, notes=_gaps({*numbers.values()}))


def _gaps(labels: set[int]) -> tuple[str, ...]:
    """Say which numbers of labels do not occur."""
    low, high, number = min(labels, default=0), max(labels, default=0), len(labels)
    told = f"{number} labels from {low} to {high} have gaps, and are numbered in their order"
    return (told,) * (high - low >= number > 0)


def _coop(file: Path) -> Listed:
    """Read a list of CoOp: file, label and class name of each image, for each split."""
    rule = "must have lists train, val and test of entries [file, label, class name]"
    try:
        sides = json.loads(file.read_text(encoding="utf-8"))
        entries = [(side, n, k, named(t)) for side in sides for n, k, t in sides[side]]
        wrong = [e for e in entries if not isinstance(e[1], str) or type(e[2]) is not int]
        if not {*sides} <= {*SPLITS.values()} or wrong or min(k for _, _, k, _ in entries) < 0:
            raise ValueError(f"got {few(map(named, sides))}")
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{named(file)} {rule}; {named(error)}.") from error
    first = entries[0][1]
    below = (sorted(file.parent.glob(levels)) for levels in ("[!.]*/", "[!.]*/[!.]*/"))
    folders = [file.parent, *chain(*below)]
    base = next((folder for folder in folders if (folder / first).exists()), None)
    if base is None:
        missing = f"{named(first)}, which is not in {named(file.parent)} or a folder of it"
        raise FileNotFoundError(f"{named(file)} lists {missing}.{slashed(first)}")
    titles, owners = defaultdict[int, dict[str, None]](dict), defaultdict[str, set[int]](set)
    for _, _, k, title in entries:
        titles[k][title] = None
        owners[title].add(k)
    doubts = [f"label {k}: {both(names)}" for k, names in titles.items() if len(names) > 1]
    twice = {title: sorted(labels) for title, labels in owners.items() if len(labels) > 1}
    doubts += [f"`{title}`: labels {few(map(str, labels))}" for title, labels in twice.items()]
    rows = [Row(base / n, str(k), "", side, named(file)) for side, n, k, _ in entries]
    names = {str(k): next(reversed(titles[k])) for k in sorted(titles)}
    return Listed(rows, names, {"label-names": doubts}, _gaps({*titles}))


def worded(file: Path, titles: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the names of classes in a file of words, and classes that have the same one.

    Raises:
        ValueError: If a class has no name.
    """
    lines = file.read_text(encoding="utf-8-sig", errors="replace").splitlines()
    pairs = [named(line).strip().partition(" ") for line in lines]
    names = {name: words.strip() for name, _, words in pairs if words.strip()}
    if missing := [name for name in titles if name not in names]:
        rule = "must have a line `FOLDER NAME IN WORDS` for each class"
        raise ValueError(f"{named(file)} {rule}; got none for {few(missing)}.")
    found = {name: names[name] for name in titles}
    owners = defaultdict[str, list[str]](list)
    for name, words in found.items():
        owners[words].append(name)
    return found, [f"`{w}`: {both(owned)}" for w, owned in owners.items() if len(owned) > 1]


def slashed(name: str) -> str:
    """Say how paths of Windows are written, if a name has a backslash."""
    remedy = "Write paths with / in place of the backslash, and relative to the list."
    return f" {remedy}" if "\\" in name else ""
