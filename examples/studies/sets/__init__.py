"""Data sets of the papers' settings: images, labels, domains, class names and sentences for CLIP.

Nothing is downloaded. If a file is missing, the error says what to download and where to put it.
Images of one size are read into memory. Images of differing sizes are decoded once into a file
next to the data, which is mapped in every later run.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from torchvision import datasets

from studies.sets.coop import SPLITS, coop
from studies.sets.folders import domainnet, five_dataset, office_caltech10, tiny_imagenet
from studies.sets.readers import Images, ImageSet
from studies.sets.torchvision_sets import cifar, flowers102, svhn

__all__ = ["SETS", "SIZE", "ImageSet", "Images", "load"]

SIZE = 256
"""Default side in pixels at which images of differing sizes are kept."""

SETS: dict[str, Callable[[Path, int], ImageSet]] = {
    "cifar10": partial(cifar, kind=datasets.CIFAR10),
    "cifar100": partial(cifar, kind=datasets.CIFAR100),
    "svhn": svhn,
    "flowers102": flowers102,
    "tiny-imagenet": tiny_imagenet,
    "five-dataset": five_dataset,
    "office-caltech10": office_caltech10,
    "domainnet": domainnet,
    **{f"{name}-coop": partial(coop, name=name) for name in SPLITS},
}
"""Readers of the data sets by name, functions of the folder and of the side in pixels."""


def load(name: str, root: Path | str = ".", *, size: int = SIZE) -> ImageSet:
    """Read a data set.

    Args:
        name: Name in `SETS`.
        root: Folder of the data sets.
        size: Side in pixels at which images of differing sizes are kept: the short side is resized
            and the middle is cut out. Images of one size keep their own.

    Raises:
        FileNotFoundError: If a file is missing. The message says what to download.
    """
    return SETS[name](Path(root), size)._replace(name=name)
