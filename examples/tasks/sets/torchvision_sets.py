"""Data sets that torchvision reads, in the splits of their authors."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torchvision import datasets

from tasks.sets.readers import (
    ImageSet,
    by_torchvision,
    decoded_sides,
    in_memory,
    shared_out,
    squared,
    subset,
    words,
)

NUMBER = ('a photo of the number: "{}".',)
NUMERALS = tuple("0123456789")
TEMPLATES = {
    "dtd": ("{} texture.",),
    "flowers102": ("a photo of a {}, a type of flower.",),
    "food101": ("a photo of {}, a type of food.",),
    "pets": ("a photo of a {}, a type of pet.",),
    "caltech101": ("a photo of a {}.",),
}
"""The sentences of CoOp."""


def cifar(root: Path, size: int, *, kind: type) -> ImageSet:
    """Read CIFAR-10 or CIFAR-100."""
    own = [file for file, _ in kind.train_list + kind.test_list] + [kind.meta["filename"]]
    files = [f"{kind.base_folder}/{file}" for file in own]
    sides = [by_torchvision(kind, root, files, train=train) for train in (True, False)]
    images = [in_memory(side.data.transpose(0, 3, 1, 2), side.targets) for side in sides]
    return ImageSet("", *images, words(sides[0].classes))


def svhn(root: Path, size: int) -> ImageSet:
    """Read SVHN; its extra training images are not used."""
    sides = [
        by_torchvision(datasets.SVHN, root, [f"{split}_32x32.mat"], split=split)
        for split in ("train", "test")
    ]
    images = [in_memory(side.data, side.labels) for side in sides]
    return ImageSet("", *images, NUMERALS, templates=NUMBER)


def mnist(root: Path, size: int, *, kind: type) -> ImageSet:
    """Read MNIST or FashionMNIST."""
    folder = f"{kind.__name__}/raw"
    files = [f"{folder}/{Path(file).stem}" for file, _ in kind.resources]
    sides = [by_torchvision(kind, root, files, train=train) for train in (True, False)]
    images = [in_memory(side.data[:, None], side.targets) for side in sides]
    if kind is datasets.MNIST:
        return ImageSet("", *images, NUMERALS, templates=NUMBER)
    return ImageSet("", *images, tuple(kind.classes))


def dtd(root: Path, size: int) -> ImageSet:
    """Read DTD; its validation images are training images here."""
    make = partial(_images, datasets.DTD, root, ["dtd/dtd/labels", "dtd/dtd/images"])
    train, val, test = (make(size, split=split) for split in ("train", "val", "test"))
    sides = decoded_sides([train + val], [test], root / "dtd", "dtd", size)
    return ImageSet("", *sides, words(train.classes), templates=TEMPLATES["dtd"])


def flowers102(root: Path, size: int) -> ImageSet:
    """Read Flowers102; its validation images are training images here."""
    files = [f"flowers-102/{file}" for file in ("jpg", "imagelabels.mat", "setid.mat")]
    make = partial(_images, datasets.Flowers102, root, files)
    train, val, test = (make(size, split=split) for split in ("train", "val", "test"))
    sides = decoded_sides([train + val], [test], root / "flowers-102", "flowers102", size)
    names = tuple(name.rstrip("?") for name in datasets.Flowers102.classes)
    return ImageSet("", *sides, names, templates=TEMPLATES["flowers102"])


def food101(root: Path, size: int) -> ImageSet:
    """Read Food101."""
    files = [f"food-101/{file}" for file in ("meta/train.json", "meta/test.json", "images")]
    make = partial(_images, datasets.Food101, root, files)
    train, test = (make(size, split=split) for split in ("train", "test"))
    sides = decoded_sides([train], [test], root / "food-101", "food101", size)
    return ImageSet("", *sides, words(train.classes), templates=TEMPLATES["food101"])


def pets(root: Path, size: int) -> ImageSet:
    """Read the Oxford-IIIT pets."""
    names = ("annotations/trainval.txt", "annotations/test.txt", "images")
    files = [f"oxford-iiit-pet/{name}" for name in names]
    make = partial(_images, datasets.OxfordIIITPet, root, files)
    train, test = (make(size, split=split) for split in ("trainval", "test"))
    sides = decoded_sides([train], [test], root / "oxford-iiit-pet", "pets", size)
    return ImageSet("", *sides, tuple(train.classes), templates=TEMPLATES["pets"])


def caltech101(root: Path, size: int) -> ImageSet:
    """Read Caltech101 without the background and the folder "Faces_easy", so 100 classes.

    The data set has no split. As in CoOp, half of each class is for training and three tenths are
    for testing; the rest is for validation in CoOp and is not used here. The images of each part
    are drawn with seed 0.
    """
    files = ["caltech101/101_ObjectCategories"]
    whole = _images(datasets.Caltech101, root, files, size)
    kept = [name for name in whole.categories if name != "Faces_easy"]
    number = {whole.categories.index(name): label for label, name in enumerate(kept)}
    whole.target_transform = number.__getitem__
    labels = torch.tensor([number.get(label, -1) for label in whole.y])
    own = (labels >= 0).nonzero()[:, 0]
    train, test, _ = (
        subset(whole, own[part]) for part in shared_out(labels[own], shares=(0.5, 0.3, 0.2))
    )
    sides = decoded_sides([train], [test], root / "caltech101", "caltech101", size)
    singular = {"airplanes": "airplane", "Faces": "face", "Leopards": "leopard"}
    singular["Motorbikes"] = "motorbike"
    return ImageSet("", *sides, words([singular.get(name, name) for name in kept]))


def _images(kind: type, root: Path, files: Sequence[str], size: int, **values: Any):
    transform = partial(squared, size=size)
    return by_torchvision(kind, root, files, transform=transform, **values)
