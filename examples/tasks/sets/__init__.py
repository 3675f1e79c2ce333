"""Data sets of the papers' settings: images, labels, domains, class names and sentences for CLIP.

Nothing is downloaded. If a file is missing, the error says what to download and where to put it.
Images of one size are read into memory. Images of differing sizes are decoded once into a file
next to the data, which is mapped in every later run.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchvision import datasets

from fedprompt import samples
from tasks.sets.coop import SPLITS, coop
from tasks.sets.folders import domainnet, five_dataset, folder, office_caltech10, tiny_imagenet
from tasks.sets.readers import Images, ImageSet, in_memory
from tasks.sets.torchvision_sets import (
    NUMBER,
    caltech101,
    cifar,
    dtd,
    flowers102,
    food101,
    mnist,
    pets,
    svhn,
)

__all__ = ["SETS", "SIZE", "ImageSet", "Images", "load"]

SIZE = 256
"""Default side in pixels at which images of differing sizes are kept."""


def load(name: str, root: Path | str = ".", *, size: int | None = None) -> ImageSet:
    """Read a data set.

    Args:
        name: Name in `SETS`, or "folder:PATH" for any folder of images; see `folder`.
        root: Folder of the data sets.
        size: Side in pixels at which images of differing sizes are kept: the short side is resized
            and the middle is cut out. If None, 256. Images of one size keep their own.

    Raises:
        FileNotFoundError: If a file is missing. The message says what to download.
    """
    if size is not None and size < 1:
        raise ValueError(f"`size` must be at least 1; got {size}.")
    root, size = Path(root), SIZE if size is None else size
    if name.startswith("folder:"):
        return folder(root / name.removeprefix("folder:"), size)._replace(name=name)
    if name not in SETS:
        raise ValueError(f"`name` must be one of {', '.join(SETS)} or folder:PATH; got {name!r}.")
    return SETS[name](root, size)._replace(name=name)


def digits(root: Path, size: int) -> ImageSet:
    """Read scikit-learn's digits, inverted and rotated, in the split of seed 0."""
    split = samples.digits(0, domain=samples.inverted_rotated)
    sides = (
        in_memory((images * 255).round().byte(), labels)
        for images, labels in (split[:2], split[2:])
    )
    return ImageSet("digits", *sides, samples.CLASS_NAMES, templates=samples.TEMPLATES[""])


def solar_cells(root: Path, size: int) -> ImageSet:
    """Read the photographs of solar cells; a fifth of the runs of files is for testing."""
    import photographs

    cells = photographs.solar_cells()
    return _photographs(cells, templates=("a photo of a {} solar cell.",))


def mnist_5k(root: Path, size: int, *, shifted: bool) -> ImageSet:
    """Read 5,000 images of MNIST, in four domains if `shifted`; a fifth is for testing."""
    import photographs

    return _photographs(photographs.mnist(shifted=shifted), templates=NUMBER)


def _photographs(found: Any, *, templates: tuple[str, ...]) -> ImageSet:
    """Split photographs by runs of files, with seed 0."""
    import photographs

    whole, rng = torch.arange(len(found.labels)), np.random.default_rng(0)
    sides = (
        Images(found.images[part], found.labels[part], found.domains[part])
        for part in photographs.split_by_runs(found, whole, share=0.2, rng=rng)
    )
    return ImageSet("", *sides, found.class_names, found.domain_names, templates)


SETS: dict[str, Callable[[Path, int], ImageSet]] = {
    "digits": digits,
    "mnist-5k": partial(mnist_5k, shifted=False),
    "mnist-5k-domains": partial(mnist_5k, shifted=True),
    "solar-cells": solar_cells,
    "cifar10": partial(cifar, kind=datasets.CIFAR10),
    "cifar100": partial(cifar, kind=datasets.CIFAR100),
    "svhn": svhn,
    "dtd": dtd,
    "flowers102": flowers102,
    "food101": food101,
    "pets": pets,
    "caltech101": caltech101,
    "tiny-imagenet": tiny_imagenet,
    "fashion-mnist": partial(mnist, kind=datasets.FashionMNIST),
    "five-dataset": five_dataset,
    "office-caltech10": office_caltech10,
    "domainnet": domainnet,
    **{f"{name}-coop": partial(coop, name=name) for name in SPLITS},
}
"""Readers of the data sets by name, functions of the folder and of the side in pixels."""
