"""Readers of the data sets: images in memory, or decoded once into a file that is mapped.

Nothing is downloaded. An error names the missing file and the command or address to get it.
"""

import io
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset
from tqdm import tqdm

from fedprompt.compare.divisions import held_out
from fedprompt.compare.images import ImageFiles, mapped
from fedprompt.compare.trials import Images
from fedprompt.data import Folder


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


@dataclass
class Listed(Dataset):
    """Data set of image files with their labels.

    Attributes:
        files: Image files.
        labels: Class of each.
    """

    files: ImageFiles
    labels: Sequence[int]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.files[index], int(self.labels[index])


def listed(folder: Folder, size: int) -> Listed:
    """Make the data set of a folder, with images of `size` pixels."""
    return Listed(ImageFiles(folder.paths, size), folder.labels)


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
    told = {name: value for name, value in values.items() if name != "transform"}
    given = "".join(f", {name}={value!r}" for name, value in told.items())
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


def fedbn_lists(
    base: Path, domains: Sequence[str], classes: Sequence[str], size: int
) -> list[list[Listed]]:
    """Read FedBN's fixed lists of training and test images, one of each for a domain.

    Returns:
        The training and the test images of each domain, or nothing if the first list is missing.
    """
    if not (base / f"{domains[0]}_train.pkl").exists():
        return []
    sides: list[list[Listed]] = [[], []]
    for side, listed in zip(("train", "test"), sides, strict=True):
        for name in (f"{domain}_{side}.pkl" for domain in domains):
            require(base, [name], "Put FedBN's lists of all domains there, or none.")
            paths, names = ArrayUnpickler(io.BytesIO((base / name).read_bytes())).load()
            # Paths are DOMAIN/CLASS/FILE in a folder whose name differs among systems.
            own = [base.joinpath(*Path(path).parts[-3:]) for path in paths]
            listed.append(Listed(ImageFiles(own, size), [classes.index(name) for name in names]))
    return sides


def fifth_held_out(folder: Folder) -> tuple[Folder, Folder]:
    """Hold out a fifth of each class for testing, drawn with seed 0."""
    tested = held_out(folder.labels, 0.2, np.random.default_rng(0))
    return folder.at(~tested), folder.at(tested)


def decoded(datasets: Sequence[Dataset], folder: Path, name: str, *, size: int) -> Images:
    """Decode images once, and map the resulting file in every later call.

    The name of the file has the name, size and number of images. If images are replaced by as many
    others, delete the file.

    Args:
        datasets: Data sets of (3, size, size) uint8 images and labels; one a domain.
        folder: Folder of the data set, where the file is written.
        name: Name of the data set and split.
        size: Side of the images in pixels.
    """
    counts = [len(dataset) for dataset in datasets]  # type: ignore[arg-type]
    whole, path = ConcatDataset(datasets), folder / f"{name}-{size}px-{sum(counts)}.images"
    bar = partial(tqdm, desc=f"Decoding {path.stem}", unit="batch")
    pixels, labels = mapped(whole.__getitem__, len(whole), path, size=size, bar=bar)
    return Images(pixels, labels, torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)))


def decoded_sides(
    train: Sequence[Dataset], test: Sequence[Dataset], base: Path, name: str, size: int
) -> tuple[Images, Images]:
    """Decode the training and the test images of each domain."""
    sides = {"train": train, "test": test}
    return tuple(decoded(sides[side], base, f"{name}-{side}", size=size) for side in sides)
