"""One reading of all files of a folder before anything trains: doubts, notes and a digest."""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

import fedprompt._refusals as check
from fedprompt.data import doubts
from fedprompt.data.doubts import DOUBTS, Doubt, both
from fedprompt.data.folders import Folder
from fedprompt.data.wording import few

Bar = Callable[[Sequence[Path]], Iterable[Path]]


@dataclass(frozen=True)
class Reading:
    """Facts about the files of a folder.

    Attributes:
        doubts: Facts that make a table wrong, of names and of contents.
        notes: Other facts, which are printed.
        digest: SHA-256 of the names and the bytes of all files, which does not depend on the place
            of the folder. Equal digests are equal images.

    Example:
        >>> reading = data.Reading((), ("3 images are gray.",), "")
        >>> reading.check()  # no doubts
        >>> reading.notes
        ('3 images are gray.',)
    """

    doubts: tuple[Doubt, ...]
    notes: tuple[str, ...]
    digest: str

    def check(self, allow: Collection[str] = ()) -> None:
        """Refuse a folder with doubts that are not allowed by their name.

        Raises:
            ValueError: If there are others, each with examples and its remedy, or if a name that is
                allowed is of no doubt.
        """
        unknown = [name for name in allow if name not in DOUBTS]
        check.nothing(unknown, "allow", f"have names of doubts: {', '.join(DOUBTS)}")
        if left := [doubt for doubt in self.doubts if doubt.name not in allow]:
            names = ",".join(doubt.name for doubt in left)
            told = " ".join(f"({k}) {doubt}" for k, doubt in enumerate(left, 1))
            raise ValueError(f"The folder is doubted: {told} Or allow it by `allow={names!r}`.")


def examine(
    folder: Folder,
    *,
    test: Folder | None = None,
    words: bool = False,
    shots: int | None = None,
    leave_one_out: bool = False,
    max_pixels: int = 180_000_000,
    bar: Bar = iter,
) -> Reading:
    """Read all files of a folder once, and doubt it where names or contents make a table wrong.

    The doubts are

    - ``train-and-test`` and ``two-classes``: the same image, by its bytes;
    - ``similar-names``, ``part-names``, ``machine-folders`` and ``label-names``, of names;
    - ``no-words`` (with `words`): numbers or codes as class names for a CLIP;
    - ``unreadable-class``: a class of which no image can be read.

    Args:
        folder: Images. Draw tests for a folder without a split first, because their copies among
            the training images are found here.
        test: Folder of further tests. Its files belong to the digest, too.
        words: Whether class names are read by a text tower.
        shots: Number of training images of each class that will be drawn.
        leave_one_out: Whether each domain in turn has the tests.
        max_pixels: Largest number of pixels of an image; larger ones cannot be read.
        bar: Function that wraps the files in a progress bar.

    Returns:
        Doubts, notes and the digest. ``reading.check(allow)`` refuses doubts.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from PIL import Image
        >>> from fedprompt.data import read_folder
        >>> with TemporaryDirectory() as root:
        ...     for number, name in enumerate(("train/cat", "train/dog", "test/cat", "test/dog")):
        ...         Path(root, name).mkdir(parents=True)
        ...         Image.new("L", (8, 8), number % 3).save(Path(root, name, "1.png"))
        ...     reading = examine(read_folder(root))
        >>> for doubt in reading.doubts:
        ...     print(doubt)
        train-and-test: the same image is in training and in tests: `test/dog/1.png` and
        `train/cat/1.png`. Delete one of the two files.
        two-classes: the same image is in two classes: `test/dog/1.png` and `train/cat/1.png`.
        Delete the wrong file.
    """
    check.instance("folder", folder, Folder, "be a folder of read_folder")
    check.optional(check.instance, "test", test, Folder, "be a folder of read_folder")
    for name, flag in (("words", words), ("leave_one_out", leave_one_out)):
        check.flag(name, flag)
    check.optional(check.count, "shots", shots)
    check.count("max_pixels", max_pixels)
    folders = [each for each in (folder, test) if each is not None]
    classes = [folder.at(folder.labels == k).paths for k in range(len(folder.class_names))]
    with ThreadPoolExecutor() as pool:
        files = list(pool.map(_digest, bar([path for each in folders for path in each.paths])))
        errors = list(pool.map(partial(_unreadable, max_pixels), classes))
    hashed, rest = hashlib.sha256(), iter(files)
    for each in folders:
        for path, digest in zip(each.paths, rest, strict=False):
            hashed.update(repr((os.path.relpath(path, each.root), digest)).encode())
    sides = folder.domains if leave_one_out else folder.split == "train"
    found, notes = _copies(_places(folder, sides) + (_places(test) if test else []), files)
    named_errors = zip(folder.class_names, errors, strict=True)
    found["unreadable-class"] = [f"`{name}`: {error}" for name, error in named_errors if error]
    if words:
        found |= doubts.of_words(folder.class_names)
    notes = [*folder.notes, *_counts(folder, shots), *notes]
    return Reading((*folder.doubts, *doubts.doubted(found)), tuple(notes), hashed.hexdigest())


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _unreadable(max_pixels: int, paths: Iterable[Path]) -> str:
    """Return the error of the first image of a class of which no image can be read."""
    from fedprompt.data.opening import opened  # Pillow is not imported with the library

    errors = []
    for path in paths:
        try:
            opened(path, then=lambda image: None, max_pixels=max_pixels)
        except OSError as error:
            errors.append(str(error).rstrip("."))
        else:
            return ""
    return errors[0] if errors else ""


class _Place(NamedTuple):
    """A file, its side of the division into training and tests, and its class, if they count."""

    name: str
    side: object
    label: int | None


def _places(folder: Folder, sides: np.ndarray | None = None) -> list[_Place]:
    """Return the places of images. Without sides, those of further tests."""
    if sides is not None:
        names = (os.path.relpath(path, folder.root) for path in folder.paths)
        return list(map(_Place, names, sides.tolist(), folder.labels.tolist()))
    tested = folder.split != "train"
    tests = np.where(tested | ~tested.any(), "tests", None)  # type: ignore[call-overload]
    return [
        _Place(str(path), side, None)
        for path, side in zip(folder.paths, tests.tolist(), strict=True)
    ]


def _copies(
    places: Iterable[_Place], files: Iterable[str]
) -> tuple[dict[str, list[str]], list[str]]:
    """Find equal files in training and tests and in two classes, and note the others."""
    copies = defaultdict[str, list[_Place]](list)
    for place, digest in zip(places, files, strict=True):
        if place.side is not None:
            copies[digest].append(place)
    found, same = {"train-and-test": list[str](), "two-classes": list[str]()}, 0
    for first, *others in copies.values():
        sides = [each for each in others if each.side != first.side]
        labels = [each for each in others if each.label not in (None, first.label)]
        for name, apart in (("train-and-test", sides), ("two-classes", labels)):
            found[name] += [both((first.name, each.name)) for each in apart[:1]]
        same += bool(others) and not sides and not labels
    return found, [f"images that occur twice in their class: {same}"] * bool(same)


def _counts(folder: Folder, shots: int | None) -> Iterable[str]:
    """Note classes with few images, and those that only training or only tests have."""
    number = len(folder.class_names)
    sizes = np.bincount(folder.labels, minlength=number)
    train = np.bincount(folder.labels[folder.split == "train"], minlength=number)
    lacking: Mapping[str, np.ndarray] = {
        "classes with one image": sizes == 1,
        "classes without images": sizes == 0,
        "classes without training images": (train == 0) & (sizes > 0),
        "classes without tests": (train == sizes) & (train.sum() < sizes.sum()),
        f"classes with fewer than {shots} training images": (train > 0) & (train < (shots or 0)),
    }
    for what, where in lacking.items():
        if names := [folder.class_names[k] for k in np.flatnonzero(where)]:
            yield f"{what}: {few(names)}"
