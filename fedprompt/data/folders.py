"""Labels, domains and splits of a folder of images, from the names of its folders or from a list.

No image is read. A folder that can be read in two ways is refused with both of them.
"""

import csv
import json
import os
import stat
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple
from unicodedata import normalize

import numpy as np
from jaxtyping import Int64, Shaped

import fedprompt._refusals as check
from fedprompt._files import path_of

IMAGES = {".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"}
"""Extensions of images in lower case, as in torchvision."""
SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "eval"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}
"""Split by the name of its folder in lower case, with the synonyms of timm."""
TREES = ("class", "split/class", "domain/class", "domain/split/class", "split/domain/class")
LISTS = {"coop": "split_zhou_*.json", "csv": "*.csv"}
"""Layouts by names of folders, and lists by their layout."""
ROW = {"path", "label", "domain", "split"}
COLUMNS = {"file_name": "path", "client": "domain"}
"""Columns of a list, and other names of two."""
RESULTS = {"bars.png", "seeds.csv"}
"""Picture of ``fedprompt compare``, and the table that it always has next to it."""
SHOWN = 10
"""Largest number of names in a description."""


class Row(NamedTuple):
    """One image: its file, and the names of its class, domain and split."""

    path: Path
    label: str
    domain: str = ""
    split: str = "train"


Skipped = defaultdict[str, list[Path]]
"""Files and folders that are left out, by the reason."""


@dataclass(frozen=True, eq=False)
class Folder:
    """Image files with their labels, domains and splits. ``print(folder)`` describes it.

    Attributes:
        root: Folder, or folder of the list.
        layout: Layout in which it was read.
        paths: Image files, in an order that is the same on all systems.
        labels: Class of each image, a position in `class_names`.
        domains: Domain or client of each image, a position in `domain_names`.
        split: ``"train"``, ``"val"`` or ``"test"`` for each image; ``"train"`` if the layout has no
            splits.
        class_names: Names of the classes, sorted; in the order of a list if it has numbers.
        domain_names: Names of the domains or clients, sorted; one empty name if the layout has
            none.
        skipped: Files and folders that were left out, by the reason.
        file: List that was read, or None.

    Example:
        Lists of your own can be a folder, too.

        >>> files = Path("1.png"), Path("2.png"), Path("3.png")
        >>> labels, split = np.array([1, 0, 1]), np.array(["train", "train", "test"])
        >>> folder = Folder(Path("."), "own", files, labels, 0 * labels, split, ("cat", "dog"))
        >>> print(folder)
        .: layout own, 3 images, 2 classes
          images: train 2, test 1
          classes: cat 1, dog 2
        >>> folder.at(folder.split == "test").paths == files[2:]
        True
    """

    root: Path
    layout: str
    paths: tuple[Path, ...]
    labels: Int64[np.ndarray, " images"]
    domains: Int64[np.ndarray, " images"]
    split: Shaped[np.ndarray, " images"]
    class_names: tuple[str, ...]
    domain_names: tuple[str, ...] = ("",)
    skipped: Mapping[str, tuple[Path, ...]] = field(default_factory=dict)
    file: Path | None = None

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.paths)

    def at(self, positions: Any) -> "Folder":
        """Return the images at some positions; classes and domains keep their numbers."""
        given = np.asarray(positions)
        chosen = np.arange(len(self))[given if given.size else []]
        parts = {name: getattr(self, name)[chosen] for name in ("labels", "domains", "split")}
        return replace(self, paths=tuple(self.paths[i] for i in chosen), **parts)

    def __str__(self) -> str:
        """Describe layout, classes, domains, the images of each, and what was left out."""
        kinds = [_count(len(self), "image"), _count(len(self.class_names), "class")]
        if self.domain_names != ("",):
            kinds.append(_count(len(self.domain_names), "domain"))
        lines = [f"{self.file or self.root}: layout {self.layout}, {', '.join(kinds)}"]
        for number, name in enumerate(self.domain_names[:SHOWN]):
            counts = Counter(self.split[self.domains == number].tolist())
            sides = ", ".join(f"{side} {counts[side]}" for side in counts)
            lines.append(f"  {name or 'images'}: {sides or 'none'}")
        if more := np.bincount(self.domains, minlength=len(self.domain_names))[SHOWN:].tolist():
            lines.append(f"  {len(more)} more domains: from {min(more)} to {max(more)} images")
        sizes = np.bincount(self.labels, minlength=len(self.class_names)).tolist()
        each = [f"{name} {size}" for name, size in zip(self.class_names, sizes, strict=True)]
        spread = f", from {min(sizes)} to {max(sizes)} images" if len(sizes) > SHOWN else ""
        lines.append(f"  classes: {_few(each)}{spread}")
        trained = set(self.labels[self.split == "train"].tolist())
        if missing := [n for i, n in enumerate(self.class_names) if i not in trained]:
            lines.append(f"  classes without training images: {_few(missing)}")
        for reason, paths in self.skipped.items():
            lines.append(f"  left out: {len(paths)} ({reason}), such as {paths[0]}")
        return _nfc("\n".join(lines))


def read_folder(
    root: str | os.PathLike[str], *, layout: str | None = None, skip: bool = False
) -> Folder:
    r"""Find the images of a folder with their classes, domains and splits.

    Layouts are told apart by the names of folders:

    - ``"class"``: ``CLASS/*``, as for ``ImageFolder`` of torchvision;
    - ``"split/class"``: ``train/CLASS/*``, and the same for ``val`` or ``test``. As in timm,
      ``training``, ``valid``, ``validation`` and ``eval`` are also names of splits;
    - ``"domain/class"``: ``DOMAIN/CLASS/*``, such as PACS or Office-Home;
    - ``"domain/split/class"``: ``CLIENT/train/CLASS/*``, and the same for ``val`` or ``test``;
    - ``"split/domain/class"``: ``train/DOMAIN/CLASS/*``;
    - ``"coop"``: a list ``split_zhou_*.json`` of CoOp, in `root` or as `root`;
    - ``"csv"``: a list with columns ``path`` and ``label``, and possibly ``client`` (or ``domain``)
      and ``split``, in `root` or as `root`. Paths are relative to the list.

    A folder with two readings is refused. For example, ``a/x/*`` and ``b/y/*`` can be two domains
    without a common class, or two classes with subfolders, and ``train/*`` can be a class or a
    split. With `layout` you decide, and images may then be in subfolders of their class.

    Hidden files, files without an extension of images, folders without images and links to a
    parent folder are left out, and so is the picture of ``fedprompt compare`` in its folder of
    results. ``print(folder)`` has their numbers.

    Args:
        root: Folder of images, or a list.
        layout: Layout. If None, it is found.
        skip: Whether to leave out what is otherwise an error: empty, missing and unreadable files,
            and images outside of the folders of classes. Their numbers are in the description.

    Returns:
        Paths and labels. Names are compared in Unicode's composed form (NFC), so that accents are
        the same from all systems.

    Raises:
        ValueError: If the folder has no images, all images are in one class, no class of the test
            images has training images, or the folder can be read in two ways. The message has the
            readings.
        FileNotFoundError: If `root` is missing, or the folder of the images of CoOp's list.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as root:
        ...     for name in ("art/cat/1.png", "art/dog/2.png", "photo/cat/3.png"):
        ...         path = Path(root, name)
        ...         path.parent.mkdir(parents=True, exist_ok=True)
        ...         _ = path.write_bytes(b"an image")
        ...     folder = read_folder(root)
        >>> folder.layout, folder.class_names, folder.domain_names
        ('domain/class', ('cat', 'dog'), ('art', 'photo'))
        >>> folder.labels, folder.domains
        (array([0, 1, 0]), array([0, 0, 1]))
    """
    check.flag("skip", skip)
    path = path_of("root", root, of="folder")
    wanted = layout if layout is None else str(layout).replace("client", "domain")
    if wanted not in (None, *TREES, *LISTS):
        raise check.wrong("layout", f"be one of {', '.join((*TREES, *LISTS))}", check.kind(layout))
    if not path.exists():
        raise FileNotFoundError(f"`root` must be a folder or a list of images; {path} is missing.")
    lists = [] if wanted in TREES else _lists(path, wanted)
    if path.is_file() or wanted in LISTS:
        rule = "be or have one list of images: split_zhou_*.json, or a CSV with path and label"
        check.require(len(lists) == 1, "root", rule, _few(map(str, lists)) or path)
        return _listed(*lists[0], skip)
    found, skipped = _walk(path, skip or bool(lists))
    readings = [_reading(tree, found) for tree in ((wanted,) if wanted else TREES)]
    if lists and (len(lists) > 1 or any(not reading.doubts for reading in readings)):
        names = [f"layout={kind!r} ({file.name})" for kind, file in lists]
        names += [str(reading) for reading in readings if not reading.doubts]
        raise check.wrong("root", "be read in one way", f"{path}, with " + " and ".join(names))
    if lists:
        return _listed(*lists[0], skip)
    reading = readings[0] if wanted else _only(path, readings, skipped)
    if reading.outside:
        _leave(skipped, skip, f"outside of the layout {reading.layout}", reading.outside)
    return _folder(path, reading.layout, reading.rows, skipped)


def _few(names: Iterable[str]) -> str:
    """List some names in their order."""
    listed = list(names)
    more = f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
    return ", ".join(listed[:SHOWN]) + more


def _count(number: int, noun: str) -> str:
    """Say a number of things."""
    return f"{number} {noun}" + ("" if number == 1 else "es" if noun.endswith("s") else "s")


def _nfc(name: str) -> str:
    """Compose accents, and escape the bytes of a name that is not in UTF-8."""
    return normalize("NFC", os.fsencode(name).decode("utf-8", "backslashreplace"))


def _leave(
    skipped: Skipped, skip: bool, reason: str, paths: Sequence[Path], where: str = ""
) -> None:
    """Leave files out and count them, or raise an error that names the first."""
    if not skip:
        text = f"{where or paths[0]} is {reason}"
        raise ValueError(f"{text}. Correct it, or leave such files out by `skip=True`.")
    skipped[reason] += paths


Found = list[tuple[tuple[str, ...], Path]]
"""Image files with the names of their folders below the root."""


def _walk(root: Path, skip: bool) -> tuple[Found, Skipped]:
    """Find the images in the folders of a root, in the order of their names."""
    skipped: Skipped = defaultdict(list)
    found: Found = []

    def visit(folder: Path, names: tuple[str, ...], above: tuple[Path, ...]) -> None:
        before = len(found)
        try:
            entries = sorted(folder.iterdir(), key=lambda path: (_nfc(path.name), path.name))
        except OSError as error:
            _leave(skipped, skip, f"unreadable ({error.strerror})", [folder])
            return
        results = {path.name for path in entries} >= RESULTS
        for path in entries:
            if path.name.startswith(".") or path.name == "__MACOSX":
                skipped["hidden"].append(path)
            elif path.is_dir():
                real = path.resolve()
                if any(real in (parent, *parent.parents) for parent in above):
                    skipped["a link to a parent folder"].append(path)
                else:
                    visit(path, (*names, _nfc(path.name)), (*above, real))
            elif path.suffix.lower() not in IMAGES:
                skipped["not an image"].append(path)
            elif results and path.name in RESULTS:
                skipped["results of fedprompt compare"].append(path)
            elif fault := _fault(path):
                _leave(skipped, skip, fault, [path])
            else:
                found.append((names, path))
        if names and len(found) == before:
            skipped["a folder without images"].append(folder)

    visit(root, (), (root.resolve(),))
    loose = [path for names, path in found if not names]
    if 0 < len(loose) < len(found):
        _leave(skipped, skip, "not in the folder of a class", loose)
        found = [pair for pair in found if pair[0]]
    return found, skipped


def _fault(path: Path) -> str:
    """Return why a file cannot be an image, without reading it."""
    try:
        status = path.stat()
    except OSError:
        return "missing"
    if not stat.S_ISREG(status.st_mode):
        return "not a file"
    return "" if status.st_size else "empty"


@dataclass(frozen=True)
class _Reading:
    """A folder as one layout, the images outside of it, and what speaks against it."""

    layout: str
    rows: list[Row]
    outside: list[Path]
    doubts: list[str]

    def __str__(self) -> str:
        names = {"domain": {r.domain for r in self.rows}, "class": {r.label for r in self.rows}}
        told = [
            f"{_count(len(found), kind)}: {_few(sorted(found))}"
            for kind, found in names.items()
            if kind in self.layout
        ]
        return f"layout={self.layout!r} (" + "; ".join(told + self.doubts) + ")"


def _reading(layout: str, found: Found) -> _Reading:
    """Read a folder as a layout."""
    axes, rows, outside, deep = layout.split("/"), [], list[Path](), 0
    for parents, path in found:
        names = dict(zip(axes, parents, strict=False))
        split = SPLITS.get(names.get("split", "train").lower())
        if "class" not in names or split is None:
            outside.append(path)
            continue
        rows.append(Row(path, names["class"], names.get("domain", ""), split))
        deep += len(parents) > len(axes)
    doubts = list(_doubts(rows, axes))
    doubts += [f"{_count(len(outside), 'image')} outside of it"] * bool(outside)
    doubts += [f"{_count(deep, 'image')} in subfolders"] * bool(deep)
    return _Reading(layout, rows, outside, doubts)


def _doubts(rows: Sequence[Row], axes: Sequence[str]) -> Iterator[str]:
    """Say what speaks against a reading."""
    yield from _faults(rows)
    for kind, names in (("class", {r.label for r in rows}), ("domain", {r.domain for r in rows})):
        if words := sorted(name for name in names if name.lower() in SPLITS):
            yield f"`{words[0]}` would be a {kind}, and is the name of a split"
    if "split" in axes and not any(row.split == "train" for row in rows):
        yield "no image is for training"
    if axes[-2:] == ["domain", "class"]:
        owned: dict[str, set[str]] = {}
        for row in rows:
            owned.setdefault(row.domain, set()).add(row.label)
        shared = Counter(name for names in owned.values() for name in names)
        if alone := [d for d, names in owned.items() if max(shared[n] for n in names) < 2]:
            yield f"`{alone[0]}` has no class in common with another domain"


def _faults(rows: Sequence[Row]) -> Iterator[str]:
    """Say why rows are of no use in any layout."""
    if len({row.label for row in rows}) < 2:
        yield "all images are in one class" if rows else "no image fits"
    trained = {row.label for row in rows if row.split == "train"}
    tested = {row.label for row in rows if row.split != "train"}
    if trained and tested and not trained & tested:
        yield f"no class of the test images, such as `{min(tested)}`, has training images"


def _only(root: Path, readings: Sequence[_Reading], skipped: Skipped) -> _Reading:
    """Return the reading without doubts, of which there is at most one.

    Raises:
        ValueError: If there is none. The message has the most likely readings.
    """
    for reading in readings:
        if not reading.doubts:
            return reading
    likely = sorted((r for r in readings if r.rows), key=lambda r: (len(r.outside), len(r.doubts)))
    if not likely:
        left = {"outside of folders": readings[0].outside, **skipped}
        told = "".join(f", {len(paths)} ({reason})" for reason, paths in left.items() if paths)
        raise check.wrong("root", "have images in folders of classes", f"none in {root}{told}")
    told = " or as ".join(map(str, likely[:2]))
    raise ValueError(
        f"`root` must be read in one way; {root} can be read as {told}. Choose by `layout`."
    )


def _folder(
    root: Path,
    layout: str,
    rows: Sequence[Row],
    skipped: Skipped,
    titles: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> Folder:
    """Number the classes and domains of images; `titles` has the names of all classes in order.

    Raises:
        ValueError: If the images are of no use.
    """
    faults = [f"{file or root}: {fault}" for fault in _faults(rows)]
    check.nothing(faults, "root", "have training images of several classes")
    titles = titles or {name: name for name in sorted({row.label for row in rows})}
    domains = sorted({row.domain for row in rows})
    label, domain = ({name: n for n, name in enumerate(names)} for names in (titles, domains))
    return Folder(
        root,
        layout,
        tuple(row.path for row in rows),
        np.array([label[row.label] for row in rows], dtype=np.int64),
        np.array([domain[row.domain] for row in rows], dtype=np.int64),
        np.array([row.split for row in rows]),
        tuple(titles.values()),
        tuple(domains),
        {reason: tuple(paths) for reason, paths in skipped.items()},
        file,
    )


def _lists(path: Path, wanted: str | None) -> list[tuple[str, Path]]:
    """Find the lists of images in a folder, or the one that a path is."""
    if path.is_file():
        kinds = {".json": "coop", ".csv": "csv"}
        found = [(kinds[path.suffix.lower()], path)] if path.suffix.lower() in kinds else []
    else:
        found = [(kind, file) for kind in LISTS for file in sorted(path.glob(LISTS[kind]))]
    return [
        (kind, file)
        for kind, file in found
        if wanted in (None, kind)
        and (kind == "coop" or {"path", "label"} <= {*(_csv(file, head=True) or [{}])[0]})
    ]


def _csv(file: Path, *, head: bool = False) -> list[dict[str, str]]:
    """Read the lines of a table with their places, or only its columns, as keys of one line.

    Raises:
        ValueError: If it is not a table in UTF-8.
    """
    try:
        errors = "replace" if head else "strict"  # the whole table is refused when it is read
        with file.open(newline="", encoding="utf-8-sig", errors=errors) as lines:
            first = lines.readline(10_000)
            lines.seek(0)
            reader = csv.DictReader(lines, delimiter=max(",;\t", key=first.count))
            names = [name.strip().lower() for name in reader.fieldnames or []]
            reader.fieldnames = [COLUMNS.get(name, name) for name in names]
            if head:
                return [dict.fromkeys(reader.fieldnames, "")]
            return [{"": f"{file}, line {reader.line_num}", **row} for row in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        if head:
            return []
        raise ValueError(f"{file} must be a table in UTF-8; {error}.") from error


def _listed(kind: str, file: Path, skip: bool) -> Folder:
    """Read the images of a list, in its order.

    Raises:
        ValueError: If a line is wrong, or an image is listed twice.
    """
    skipped: Skipped = defaultdict(list)
    rows, titles = (_coop if kind == "coop" else _table)(file)
    places = dict[Path, str]()
    for where, row in rows:
        if row.path in places:
            raise ValueError(f"{where}: {row.path} is listed before, at {places[row.path]}.")
        places[row.path] = where
        if fault := _fault(row.path):
            _leave(skipped, skip, fault, [row.path], f"{where}: {row.path}")
    left = {path for paths in skipped.values() for path in paths}
    kept = [row for _, row in rows if row.path not in left]
    return _folder(file.parent, kind, kept, skipped, titles, file)


Rows = tuple[list[tuple[str, Row]], dict[str, str]]
"""Rows of a list with their places, and the names of the classes by label, in order."""


def _table(file: Path) -> Rows:
    """Read a table with columns path and label, and possibly domain and split."""
    rows = []
    for line in _csv(file):
        where, words = line[""], {k: v.strip() for k, v in line.items() if isinstance(v, str)}
        if words.keys() != line.keys() or not all(words.get(k) for k in ROW & line.keys()):
            raise ValueError(f"{where}: must have one entry for each column.")
        split = SPLITS.get(words.get("split", "train").lower())
        if split is None:
            raise ValueError(f"{where}: split must be train, val or test; got {words['split']}.")
        label, domain = _nfc(words["label"]), _nfc(words.get("domain", ""))
        rows.append((where, Row(file.parent / words["path"], label, domain, split)))
    labels = {row.label for _, row in rows}
    numbered = all(label.isdecimal() for label in labels)
    order = sorted(labels, key=lambda label: (int(label) if numbered else 0, label))
    return rows, {label: label for label in order}


def _coop(file: Path) -> Rows:
    """Read a list of CoOp: file, label and class name of each image, for each split."""
    rule = "must have lists train, val and test of entries [file, label, class name]"
    try:
        sides = json.loads(file.read_text(encoding="utf-8"))
        entries = [(side, str(n), int(k), str(t)) for side in sides for n, k, t in sides[side]]
        if not {*sides} <= {*SPLITS.values()} or min(k for _, _, k, _ in entries) < 0:
            raise ValueError(f"got {sorted(sides)}")
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file} {rule}; {error}.") from error
    first = entries[0][1]
    below = (sorted(file.parent.glob(levels)) for levels in ("[!.]*/", "[!.]*/[!.]*/"))
    folders = [file.parent, *chain(*below)]
    base = next((folder for folder in folders if (folder / first).exists()), None)
    if base is None:
        raise FileNotFoundError(
            f"{file} lists {first}, which is not in {file.parent} or a folder of it."
        )
    names = {label: title for _, _, label, title in entries}
    titles = {str(k): names.get(k, f"class {k}") for k in range(max(names) + 1)}
    rows = [(f"{file}", Row(base / n, str(k), "", side)) for side, n, k, _ in entries]
    return rows, titles
