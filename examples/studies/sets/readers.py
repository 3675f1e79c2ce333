"""Readers of the data sets: images in memory, or decoded once into a file that is mapped.

Nothing is downloaded. An error names the missing file and the command or address to get it.
"""

import io
import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from fedprompt.backbones.preparation import Preparation
from fedprompt.compare import stamps
from fedprompt.compare.images import decoded
from fedprompt.data import Folder
from fedprompt.data.divisions import held_out
from studies.core import Images

HALF = (0.5,) * 3, (0.5,) * 3
"""Mean and deviation of stored images, which are not normalized here."""


class ImageSet(NamedTuple):
    """Data set with training and test images.

    Attributes:
        name: Name in `SETS`.
        train: Training images.
        test: Test images.
        class_names: Names of the classes as words.
        domain_names: Names of the domains; one empty name for a data set without domains.
        template: Sentence around a class name, for CLIP.
    """

    name: str
    train: Images
    test: Images
    class_names: tuple[str, ...]
    domain_names: tuple[str, ...] = ("",)
    template: str = "a photo of a {}."


def image_set(folder: Folder, names: Sequence[str], size: int, **values: Any) -> ImageSet:
    """Decode the training and the test images of a folder once into files that are mapped.

    Args:
        folder: Image files. Those for validation are not used.
        names: Names of the classes.
        size: Side of the images in pixels.
        values: Further fields of the data set.
    """
    sides = []
    for side in ("train", "test"):
        bar = partial(tqdm, desc=f"Decoding {folder.root.name}, {side}", unit="image")
        part = folder.at(np.flatnonzero(folder.split == side))
        files = [(str(path), path.stat().st_size, path.stat().st_mtime) for path in part.paths]
        how = {"content": stamps.digest(files), "preparation": Preparation(size, *HALF)}
        found, part = decoded(part, folder.root, **how, bar=bar)
        pixels = torch.from_numpy(np.load(found.path, mmap_mode="c"))
        sides.append(Images(pixels, *map(torch.from_numpy, (part.labels, part.domains))))
    return ImageSet("", *sides, words(names), folder.domain_names, **values)


Line = tuple[Path, int, int, str]
"""Image, its label, its domain, and its split."""


def listed(
    base: Path, lines: Iterable[Line], names: Sequence[str], domains: Sequence[str] = ("",)
) -> Folder:
    """Make a folder of listed images."""
    paths, *columns = zip(*lines, strict=True)
    return Folder(base, "list", paths, *map(np.array, columns), tuple(names), tuple(domains))


def require(root: Path, files: Iterable[str], how: str) -> None:
    """Raise a FileNotFoundError that says how to get the first missing file or folder."""
    for file in files:
        if not (root / file).exists():
            raise FileNotFoundError(f"{root / file} is missing. {how}")


def by_torchvision(kind: type, root: Path, files: Iterable[str], **values: Any) -> Any:
    """Make a data set of torchvision without downloading it.

    Args:
        kind: Class in `torchvision.datasets`.
        root: Folder of the data sets.
        files: Files or folders that the class reads, relative to `root`.
        values: Arguments of the class.

    Raises:
        FileNotFoundError: If a file is missing. The message has the call that downloads it.
    """
    given = "".join(f", {name}={value!r}" for name, value in values.items())
    call = f"torchvision.datasets.{kind.__name__}({str(root)!r}{given}, download=True)"
    require(root, files, f"To download the data set to this place, run `{call}`.")
    return kind(root, **values)


def in_memory(pixels: Any, labels: Any) -> Images:
    """Copy uint8 arrays, (n, channels, height, width), and their labels to tensors."""
    labels = torch.as_tensor(np.asarray(labels)).long()
    pixels = torch.as_tensor(pixels).contiguous()
    return Images(pixels, labels, torch.zeros_like(labels))


def words(names: Sequence[str]) -> tuple[str, ...]:
    """Replace underscores in class names by spaces."""
    return tuple(name.replace("_", " ") for name in names)


ARRAYS = {
    *(("numpy.core.multiarray", "_reconstruct"), ("numpy._core.multiarray", "_reconstruct")),
    *(("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")),
}
"""Classes and functions in a pickle of arrays, by module and name."""


class ArrayUnpickler(pickle.Unpickler):
    """Unpickler of arrays, strings and plain containers. All else could run code and is refused."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class or a function that arrays need.

        Raises:
            UnpicklingError: If it is another one.
        """
        if (module, name) not in ARRAYS:
            rule = "must contain arrays and strings only"
            raise pickle.UnpicklingError(f"A list of images {rule}; got {module}.{name}.")
        return super().find_class(module, name)


def fedbn_lists(base: Path, domains: Sequence[str], classes: Sequence[str]) -> Iterator[Line]:
    """Read FedBN's fixed lists of training and test images, if the first one is there."""
    pairs = [(side, domain) for side in ("train", "test") for domain in enumerate(domains)]
    for side, (number, domain) in pairs if (base / f"{domains[0]}_train.pkl").exists() else ():
        file = f"{domain}_{side}.pkl"
        require(base, [file], "Put FedBN's lists of all domains there, or none.")
        content = io.BytesIO((base / file).read_bytes())
        for path, name in zip(*ArrayUnpickler(content).load(), strict=True):
            # Paths are DOMAIN/CLASS/FILE in a folder whose name differs among systems.
            yield base.joinpath(*Path(path).parts[-3:]), classes.index(name), number, side


def fifth_held_out(folder: Folder) -> Folder:
    """Hold out a fifth of each class of each domain for testing, drawn with seed 0."""
    cells = folder.domains * len(folder.class_names) + folder.labels
    tested = held_out(cells, 0.2, np.random.default_rng(0))
    return replace(folder, split=np.where(tested, "test", "train"))
