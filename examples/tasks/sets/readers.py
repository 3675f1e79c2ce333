"""Readers of the data sets: images in memory, or decoded once into a file that is mapped.

Nothing is downloaded. An error names the missing file and the command or address to get it.
"""

import io
import os
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.transforms.v2 import functional as vision
from tqdm import tqdm

from fedprompt.compare.trials import Images, held_out

MANY = 1000
"""Number of images from which on worker processes decode."""


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
    """Data set of the image files of a list.

    Attributes:
        paths: Image files.
        labels: Class of each.
        size: Side in pixels at which images are returned.
    """

    paths: Sequence[Path]
    labels: Sequence[int]
    size: int

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return squared(opened(self.paths[index]), size=self.size), self.labels[index]


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


def opened(path: Path | str) -> Image.Image:
    """Open an image in RGB; of gray levels above 255, 16 bits become 8."""
    with Image.open(path) as image:
        if image.mode.startswith("I") and image.getextrema()[1] > 255:
            image = Image.fromarray((np.asarray(image) // 257).clip(0, 255).astype(np.uint8))
        return image.convert("RGB")


def squared(image: Image.Image, *, size: int) -> Tensor:
    """Resize the short side to `size`, cut out the middle, and return the RGB pixels as uint8."""
    image = vision.resize(image.convert("RGB"), [size], vision.InterpolationMode.BICUBIC)
    return vision.pil_to_tensor(vision.center_crop(image, [size]))


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
            listed.append(Listed(own, [classes.index(name) for name in names], size))
    return sides


def fifth_held_out(dataset: Any) -> tuple[Subset, Subset]:
    """Hold out a fifth of each class for testing, drawn with seed 0."""
    tested = held_out(torch.as_tensor(dataset.targets), 0.2, np.random.default_rng(0))
    return tuple(Subset(dataset, side.nonzero()[:, 0].tolist()) for side in (~tested, tested))


def is_image(path: str) -> bool:
    """Return whether a file is an image that can be opened; archives contain a few broken files."""
    if not path.lower().endswith(IMG_EXTENSIONS):
        return False
    try:
        with Image.open(path):
            return True
    except UnidentifiedImageError:
        return False


class ClassFolders(ImageFolder):
    """Folder with one folder of images for each class.

    Args:
        folder: Folder.
        size: Side of the images.
        classes: Names of the classes, of which some may be missing. If None, those of the folders.
        values: Further arguments of ``ImageFolder``.
    """

    def __init__(
        self, folder: Path, size: int, classes: Sequence[str] | None = None, **values: Any
    ) -> None:
        self.given = classes
        values |= {"transform": partial(squared, size=size), "loader": opened}
        super().__init__(str(folder), allow_empty=classes is not None, **values)

    def find_classes(self, directory: str) -> tuple[list[str], dict[str, int]]:
        """Return the names of the classes, and their labels."""
        if self.given is None:
            return super().find_classes(directory)
        return list(self.given), {name: label for label, name in enumerate(self.given)}


def decoded(datasets: Sequence[Dataset], folder: Path, name: str, *, size: int) -> Images:
    """Decode images once, and map the resulting file in every later call.

    The name of the file has the name, size and number of images. It contains the pixels and then
    the labels. It is written under another name and renamed when it is complete; a process that is
    killed can leave a file that ends in ``.part``, which is never read. Changes of the returned
    pixels are not written to the file. If images are replaced by as many others, delete the file.

    Args:
        datasets: Data sets of (3, size, size) uint8 images and labels; one a domain.
        folder: Folder of the data set, where the file is written.
        name: Name of the data set and split.
        size: Side of the images in pixels.
    """
    counts = [len(dataset) for dataset in datasets]  # type: ignore[arg-type]
    count = sum(counts)
    path = folder / f"{name}-{size}px-{count}.images"
    num_pixels = count * 3 * size * size
    if not path.exists():
        _decode(ConcatDataset(datasets), path)
    if path.stat().st_size != num_pixels + 8 * count:
        raise ValueError(f"{path} must have {num_pixels + 8 * count} bytes. Delete it.")
    raw = torch.from_file(str(path), size=num_pixels + 8 * count, dtype=torch.uint8)
    pixels = raw[:num_pixels].view(count, 3, size, size)
    labels = raw[num_pixels:].clone().view(torch.int64)
    return Images(pixels, labels, torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)))


def decoded_sides(
    train: Sequence[Dataset], test: Sequence[Dataset], base: Path, name: str, size: int
) -> tuple[Images, Images]:
    """Decode the training and the test images of each domain."""
    sides = {"train": train, "test": test}
    return tuple(decoded(sides[side], base, f"{name}-{side}", size=size) for side in sides)


def _decode(dataset: ConcatDataset, path: Path) -> None:
    """Write the pixels of all images, then their labels."""
    workers = min(8, os.cpu_count() or 1) if len(dataset) >= MANY else 0
    batches = DataLoader(dataset, batch_size=64, num_workers=workers)
    partial_path = path.with_name(f"{path.name}.{os.getpid()}.part")
    labels = []
    try:
        with partial_path.open("wb") as file:
            for pixels, batch_labels in tqdm(batches, desc=f"Decoding {path.stem}", unit="batch"):
                file.write(pixels.numpy().data)
                labels.append(batch_labels)
            file.write(torch.cat(labels).numpy().data)
        partial_path.replace(path)
    finally:
        partial_path.unlink(missing_ok=True)
