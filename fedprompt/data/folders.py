"""Labels, domains and splits of a folder of images, from the names of its folders or from a list.

No image is read. A folder that can be read in two ways is refused with both of them.
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64, Shaped

import fedprompt._refusals as check
from fedprompt._files import path_of
from fedprompt.data import doubts
from fedprompt.data.doubts import Doubt
from fedprompt.data.lists import (
    LISTS,
    SPLITS,
    WORDS,
    Listed,
    Row,
    fault_of,
    listed,
    lists_of,
    remedies,
    slashed,
    worded,
)
from fedprompt.data.wording import SHOWN, counted, few, named

READ = (
    "CLASS/*, {train,val,test}/CLASS/*, a CSV with path and label, and a list split_zhou_*.json of "
    "CoOp are read as they are; every deeper folder needs its layout, such as domain/class"
)
"""What a folder may be, in the words of the command, the pages and the errors."""
IMAGES = {".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"}
"""Extensions of images in lower case, as in torchvision."""
LEVELS = {"class", "domain", "split"}
"""Levels of folders in a layout. Those of ``_`` are passed over."""
RESULTS = {"bars.png", "seeds.csv"}
"""Picture of ``fedprompt compare``, and the table that it always has next to it."""

Skipped = defaultdict[str, list[Path]]
"""Files and folders that are left out, by the reason."""
Found = list[tuple[tuple[str, ...], Path]]
"""Image files with the names of their folders below the root."""


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
        doubts: Facts that make a table wrong, of names and lists; :func:`examine` finds others.
        notes: Other facts about the list.

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
    doubts: tuple[Doubt, ...] = ()
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.paths)

    def at(self, positions: Any) -> Folder:
        """Return the images at some positions; classes and domains keep their numbers."""
        given = np.asarray(positions)
        chosen = np.arange(len(self))[given if given.size else []]
        parts = {name: getattr(self, name)[chosen] for name in ("labels", "domains", "split")}
        return replace(self, paths=tuple(self.paths[i] for i in chosen), **parts)

    def __str__(self) -> str:
        """Describe layout, classes, domains, the images of each, and what was left out."""
        kinds = [counted(len(self), "image"), counted(len(self.class_names), "class")]
        if self.domain_names != ("",):
            kinds.append(counted(len(self.domain_names), "domain"))
        lines = [f"{named(self.file or self.root)}: layout {self.layout}, {', '.join(kinds)}"]
        for number, name in enumerate(self.domain_names[:SHOWN]):
            counts = Counter(self.split[self.domains == number].tolist())
            sides = ", ".join(f"{side} {counts[side]}" for side in counts)
            lines.append(f"  {name or 'images'}: {sides or 'none'}")
        if more := np.bincount(self.domains, minlength=len(self.domain_names))[SHOWN:].tolist():
            lines.append(f"  {len(more)} more domains: from {min(more)} to {max(more)} images")
        sizes = np.bincount(self.labels, minlength=len(self.class_names)).tolist()
        each = [f"{name} {size}" for name, size in zip(self.class_names, sizes, strict=True)]
        spread = f", from {min(sizes)} to {max(sizes)} images" if len(sizes) > SHOWN else ""
        lines.append(f"  classes: {few(each)}{spread}")
        trained = set(self.labels[self.split == "train"].tolist())
        if missing := [n for i, n in enumerate(self.class_names) if i not in trained]:
            lines.append(f"  classes without training images: {few(missing)}")
        for reason, paths in self.skipped.items():
            lines.append(f"  left out: {len(paths)} ({reason}), such as {named(paths[0])}")
        lines += [f"  {note}" for note in self.notes]
        lines += [f"  doubt {doubt}" for doubt in self.doubts]
        return "\n".join(lines)


def read_folder(
    root: str | os.PathLike[str], *, layout: str | None = None, skip: bool = False
) -> Folder:
    r"""Find the images of a folder with their classes, domains and splits.

    These are read as they are:

    - ``CLASS/*``, as for ``ImageFolder`` of torchvision;
    - ``{train,val,test}/CLASS/*``. As in timm, ``training``, ``valid``, ``validation`` and ``eval``
      are also names of splits;
    - a CSV with columns ``path`` and ``label``, and possibly ``client`` (or ``domain``) and
      ``split``, in `root` or as `root`. Paths are relative to the list;
    - a list ``split_zhou_*.json`` of CoOp, in `root` or as `root`.

    Every deeper folder needs its layout, because depth alone does not decide it: ``cat/day/*`` can
    be a class with subfolders, or a domain with a class. A layout names the levels of folders, such
    as ``"domain/class"`` (``DOMAIN/CLASS/*``), ``"domain/split/class"`` (``CLIENT/train/CLASS/*``)
    or ``"domain/_/class"``, where the names of one level are passed over. Folders below the last
    level are read as a part of it. A folder that can be read in two ways is refused with both.

    Hidden files, files without an extension of images, folders without images and links to a folder
    that is read already are left out, and so is the picture of ``fedprompt compare`` in its folder
    of results. ``print(folder)`` has their numbers, and doubts about names.

    If `root` has a file ``classnames.txt`` with lines ``FOLDER NAME IN WORDS``, it names the
    classes, for example those of ImageNet.

    Args:
        root: Folder of images, or a list.
        layout: Levels of folders, ``"csv"`` or ``"coop"``. If None, see above.
        skip: Whether to leave out what is otherwise an error: empty, missing and unreadable files,
            and images outside of the folders of classes. Their numbers are in the description.

    Returns:
        Paths and labels. Names are in Unicode's composed form (NFC), so that accents are the same
        from all systems. Characters that are not printed are escaped.

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
        ...     folder = read_folder(root, layout="domain/class")
        >>> folder.class_names, folder.domain_names
        (('cat', 'dog'), ('art', 'photo'))
        >>> folder.labels, folder.domains
        (array([0, 1, 0]), array([0, 0, 1]))
    """
    check.flag("skip", skip)
    path, wanted = path_of("root", root, of="folder"), _layout(layout)
    if not path.exists():
        place = named(path)
        raise FileNotFoundError(f"`root` must be a folder or a list of images; {place} is missing.")
    lists = lists_of(path)["images"] if wanted is None or wanted in LISTS else []
    lists = [(kind, file) for kind, file in lists if wanted in (None, kind)]
    if path.is_file() or wanted in LISTS:
        rule = "be or have one list of images: split_zhou_*.json, or a CSV with path and label"
        got = few(named(file) for _, file in lists) or named(path)
        _require(len(lists) == 1, rule, got, path)
        return _from_list(*lists[0], skip)
    found, skipped = _in_folders(path, skip or bool(lists))
    decided = _decided(found)
    names = [f"layout={kind!r} ({named(file.name)})" for kind, file in lists]
    if decided and not any(_faults(_rows(decided, found)[0])):
        names.append(_told(decided, found))
    rule = "be read in one way; choose it by `layout`"
    _require(not lists or len(names) == 1, rule, " and ".join(names), path)
    if lists:
        return _from_list(*lists[0], skip)
    left = {"outside of folders": [file for names, file in found if not names], **skipped}
    got = "".join(f", {len(paths)} ({reason})" for reason, paths in left.items() if paths)
    rule = f"have images ({', '.join(sorted(IMAGES))}) in folders of classes, or a list of them"
    _require(any(names for names, _ in found), rule, f"none{got}", path)
    layout = wanted or decided
    if layout is None:
        readings = " or as ".join(_told(reading, found) for reading in _readings(found))
        told = f"{named(path)} can be read as {readings}. Choose by `layout`: {READ}"
        raise ValueError(f"`root` must be read in one way; {told}.{remedies(path)}")
    rows, outside = _rows(layout, found)
    if outside:
        _leave(skipped, skip, f"outside of the layout {layout}", outside)
    return _folder(path, layout, Listed(rows, {}), skipped, {names for names, _ in found})


def flags(text: str) -> str:
    """Return the text of an error with flags of the command in place of arguments."""
    text = re.sub(r"`?(layout|allow)='([^']+)'`?", r"--\1 \2", text)
    return text.replace("`layout`", "--layout").replace("`skip=True`", "--skip-damaged")


def _layout(layout: object) -> str | None:
    """Check a layout, in which clients are domains."""
    if layout is None:
        return None
    wanted = str(layout).replace("client", "domain")
    levels = [level for level in wanted.split("/") if level != "_"]
    fits = "class" in levels and {*levels} <= LEVELS and len({*levels}) == len(levels)
    rule = "be csv, coop, or levels of folders, such as class, domain/class or domain/_/class"
    check.require(fits or wanted in LISTS, "layout", rule, check.kind(layout))
    return wanted


def _require(holds: bool, rule: str, got: str, path: Path) -> None:
    """Require a condition of the root; the error has what helps."""
    if not holds:
        raise ValueError(f"`root` must {rule}; got {got} in {named(path)}.{remedies(path)}")


def _leave(
    skipped: Skipped, skip: bool, reason: str, paths: Sequence[Path], where: str = ""
) -> None:
    """Leave files out and count them, or raise an error that names the first."""
    if not skip:
        text = f"{where}{named(paths[0])} is {reason}"
        text += ". Correct it, or leave such files out by `skip=True`."
        raise ValueError(text + slashed(paths[0].name) * (reason == "missing"))
    skipped[reason] += paths


def _in_folders(root: Path, skip: bool) -> tuple[Found, Skipped]:
    """Find the images of a root, without those beside the folders of classes."""
    found, skipped = _walk(root, skip)
    loose = [path for names, path in found if not names]
    if 0 < len(loose) < len(found):
        _leave(skipped, skip, "not in the folder of a class", loose)
        found = [pair for pair in found if pair[0]]
    return found, skipped


def _walk(root: Path, skip: bool) -> tuple[Found, Skipped]:
    """Find the images in the folders of a root, in the order of their names.

    A folder is visited once: by its own place if it is below the root, and else by the first link.
    """
    skipped: Skipped = defaultdict(list)
    found, visited = Found(), set[tuple[int, int]]()
    folders, links = deque([(root, tuple[str, ...]())]), deque[tuple[Path, tuple[str, ...]]]()
    above = {_place(parent) for parent in root.resolve().parents}
    while folders or links:
        folder, names = (folders or links).popleft()
        before = len(found), len(folders), len(links)
        try:
            if (place := _place(folder)) in visited | above:
                skipped["a link to a folder that is read already"].append(folder)
                continue
            visited.add(place)
            entries = sorted(folder.iterdir())
        except OSError as error:
            _leave(skipped, skip, f"unreadable ({error.strerror})", [folder])
            continue
        results = {path.name for path in entries} >= RESULTS
        for path in entries:
            suffix = path.suffix.lower()
            if is_hidden(path.name):
                skipped["hidden"].append(path)
            elif path.is_dir():
                (links if path.is_symlink() else folders).append((path, (*names, named(path.name))))
            elif suffix not in IMAGES:
                known = re.fullmatch(r"\.[a-z][a-z0-9]{0,5}", suffix)
                skipped[f"{suffix} is not read" if known else "not an image"].append(path)
            elif results and path.name in RESULTS:
                skipped["results of fedprompt compare"].append(path)
            elif fault := fault_of(path):
                _leave(skipped, skip, fault, [path])
            else:
                found.append((names, path))
        if names and (len(found), len(folders), len(links)) == before:
            skipped["a folder without images"].append(folder)
    found.sort(key=lambda pair: ([*pair[0], named(pair[1].name)], pair[1].name))
    return found, skipped


def is_hidden(name: str) -> bool:
    """Return whether a file or a folder is left out because of its name."""
    return name.startswith(".") or name == "__MACOSX"


def _place(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino


def _is_split(name: str) -> bool:
    return name.lower() in SPLITS


def _decided(found: Found) -> str | None:
    """Return the layout if depth and the names of splits decide it."""
    tops, depths = {names[0] for names, _ in found if names}, {len(names) for names, _ in found}
    if depths == {1} and not any(map(_is_split, tops)):
        return "class"
    inner = {names[-1] for names, _ in found if names}
    trained = "train" in {SPLITS.get(name.lower()) for name in tops}
    splits = trained and all(map(_is_split, tops)) and not any(map(_is_split, inner))
    return "split/class" if depths == {2} and splits else None


def _readings(found: Found) -> list[str]:
    """Return likely layouts of a folder. The class is the innermost level, or the outermost."""
    depth, levels = max(len(names) for names, _ in found), list[str]()
    below = [{names[k] for names, _ in found if len(names) > k} for k in range(depth)]
    for names in below:
        split = all(map(_is_split, names)) and "split" not in levels
        levels.append("split" if split else "_" if len(names) == 1 else "")
    free = [k for k, level in enumerate(levels) if not level] or [depth - 1]
    readings = list[str]()
    for inner in (free[0], free[-1]):
        told = [level or "_" for level in levels]
        told[free[0]], told[inner] = "domain", "class"
        while told[-1] == "_":
            told.pop()
        readings.append("/".join(told))
    mixed = depth > 1 and not levels[0] and any(map(_is_split, below[0]))
    return [*dict.fromkeys(readings), *["split/class"] * mixed]


def _rows(layout: str, found: Found) -> tuple[list[Row], list[Path]]:
    """Read images in a layout, and return those outside of it."""
    levels, rows, outside = layout.split("/"), list[Row](), list[Path]()
    for parents, path in found:
        names = dict(zip(levels, parents, strict=False))
        split = SPLITS.get(names.get("split", "train").lower())
        if len(parents) < len(levels) or split is None:
            outside.append(path)
        else:
            rows.append(Row(path, names["class"], names.get("domain", ""), split))
    return rows, outside


def _told(layout: str, found: Found) -> str:
    """Describe a folder in a layout, and what speaks against it."""
    rows, outside = _rows(layout, found)
    told = []
    for kind, names in (("domain", {r.domain for r in rows}), ("class", {r.label for r in rows})):
        if kind in layout:
            told.append(f"{counted(len(names), kind)}: {few(sorted(names))}")
        told += [
            f"`{name}` would be a {kind}, and is the name of a split"
            for name in sorted(filter(_is_split, names))[:1]
        ]
    told += _faults(rows)
    told += ["no image is for training"] * ("train" not in {row.split for row in rows})
    skipped = [k for k, level in enumerate(layout.split("/")) if level == "_"]
    over = {names[k] for names, _ in found for k in skipped if k < len(names)}
    told += [f"folder `{few(sorted(over))}` is passed over"] * bool(over)
    deep = sum(len(parents) > layout.count("/") + 1 for parents, _ in found)
    told += [f"{counted(len(outside), 'image')} outside of it"] * bool(outside)
    told += [f"{counted(deep, 'image')} in subfolders"] * bool(deep)
    return f"layout={layout!r} (" + "; ".join(told) + ")"


def _faults(rows: Sequence[Row]) -> Iterator[str]:
    """Say why rows are of no use in any layout."""
    if len({row.label for row in rows}) < 2:
        yield "all images are in one class" if rows else "no image fits"
    trained = {row.label for row in rows if row.split == "train"}
    tested = {row.label for row in rows if row.split != "train"}
    if trained and tested and not trained & tested:
        yield f"no class of the test images, such as `{min(tested)}`, has training images"


def _from_list(kind: str, file: Path, skip: bool) -> Folder:
    """Read the images of a list, and leave out those that are missing."""
    images, skipped = listed(kind, file), Skipped(list)
    kept = list[Row]()
    for row in images.rows:
        if fault := fault_of(row.path):
            _leave(skipped, skip, fault, [row.path], f"{row.where}: ")
        else:
            kept.append(row)
    return _folder(file.parent, kind, images._replace(rows=kept), skipped, file=file)


def _folder(
    root: Path,
    layout: str,
    images: Listed,
    skipped: Skipped,
    folders: Collection[tuple[str, ...]] = (),
    file: Path | None = None,
) -> Folder:
    """Number the classes and domains of images.

    Raises:
        ValueError: If the images are of no use.
    """
    rows = images.rows
    faults = "; ".join(_faults(rows))
    _require(not faults, "have training images of several classes", faults, file or root)
    titles = images.titles or {name: name for name in sorted({row.label for row in rows})}
    examples = dict(images.doubts)
    if layout != "coop" and (words := root / WORDS).is_file():
        titles, examples["label-names"] = worded(words, titles)
    domains = sorted({row.domain for row in rows})
    label, domain = ({name: n for n, name in enumerate(names)} for names in (titles, domains))
    examples |= doubts.of_names(tuple(dict.fromkeys(titles.values())), domains, folders)
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
        doubts.doubted(examples),
        images.notes,
    )
