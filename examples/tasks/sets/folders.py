"""Data sets that torchvision does not have, as folders of images and lists of files."""

from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torchvision import datasets
from torchvision.transforms.v2 import functional as vision

from fedprompt.compare.images import ImageFiles
from fedprompt.data import Folder, read_folder
from tasks.sets.readers import (
    Images,
    ImageSet,
    Listed,
    decoded_sides,
    fedbn_lists,
    fifth_held_out,
    listed,
    require,
    words,
)
from tasks.sets.torchvision_sets import cifar, mnist, svhn


def tiny_imagenet(root: Path, size: int) -> ImageSet:
    """Read Tiny-ImageNet; its validation images are the test images, as its test labels are secret.

    Images keep their 64 pixels.
    """
    base, side = root / "tiny-imagenet-200", 64
    how = (
        "Download http://cs231n.stanford.edu/tiny-imagenet-200.zip and extract it in "
        f"{root.resolve()}."
    )
    files = ("wnids.txt", "words.txt", "train", "val/images", "val/val_annotations.txt")
    require(base, files, how)
    train = read_folder(base / "train", layout="class")
    lines = (base / "val" / "val_annotations.txt").read_text().splitlines()
    rows = [line.split("\t")[:2] for line in lines]
    files = ImageFiles([base / "val" / "images" / file for file, _ in rows], side)
    test = Listed(files, [train.class_names.index(wnid) for _, wnid in rows])
    meanings = dict(line.split("\t") for line in (base / "words.txt").read_text().splitlines())
    names = tuple(meanings[wnid].split(",")[0] for wnid in train.class_names)
    sides = decoded_sides([listed(train, side)], [test], base, "tiny-imagenet", side)
    return ImageSet("", *sides, names)


def not_mnist(root: Path, size: int) -> ImageSet:
    """Read not-MNIST, the small version, at 32 pixels in RGB.

    The data set has no split: a fifth of each class, drawn with seed 0, is for testing. Files that
    are not images are left out; the archive contains two.
    """
    base, side = root / "notMNIST_small", 32
    how = (
        "torchvision does not have not-MNIST. Download "
        "http://yaroslavvb.com/upload/notMNIST/notMNIST_small.tar.gz and extract it in "
        f"{root.resolve()}."
    )
    require(base, tuple("ABCDEFGHIJ"), how)
    train, test = (listed(part, side) for part in fifth_held_out(_readable(base)))
    names = tuple(f"letter {letter}" for letter in "ABCDEFGHIJ")
    return ImageSet("", *decoded_sides([train], [test], base, "notmnist", side), names)


def _readable(base: Path) -> Folder:
    """Read a folder of classes without the files that are not images."""
    folder = read_folder(base, layout="class", skip=True)

    def is_image(path: Path) -> bool:
        with suppress(UnidentifiedImageError), Image.open(path):
            return True
        return False

    return folder.at(np.array([is_image(path) for path in folder.paths]))


FIVE = {
    "SVHN": (svhn, "street number {}"),
    "CIFAR-10": (partial(cifar, kind=datasets.CIFAR10), "{}"),
    "not-MNIST": (not_mnist, "{}"),
    "FashionMNIST": (partial(mnist, kind=datasets.FashionMNIST), "{}"),
    "MNIST": (partial(mnist, kind=datasets.MNIST), "handwritten digit {}"),
}


def five_dataset(root: Path, size: int) -> ImageSet:
    """Read SVHN, CIFAR-10, not-MNIST, FashionMNIST and MNIST as one data set.

    Each of the five is a domain, and its ten classes are its own: 50 classes. All images are RGB of
    32 pixels, to which the ones of 28 pixels are resized.
    """
    tasks = [read(root, size) for read, _ in FIVE.values()]
    sides = []
    for side in ("train", "test"):
        parts: list[Images] = [getattr(task, side) for task in tasks]
        changed = [
            Images(_rgb(part.pixels, 32), part.labels + 10 * k, part.domains + k)
            for k, part in enumerate(parts)
        ]
        sides.append(Images(*map(torch.cat, zip(*changed, strict=True))))
    names = [
        sentence.format(name)
        for task, (_, sentence) in zip(tasks, FIVE.values(), strict=True)
        for name in task.class_names
    ]
    return ImageSet("", *sides, tuple(names), tuple(FIVE))


OFFICE = ("amazon", "caltech", "dslr", "webcam")
DOMAINNET = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
"""Domains."""


def office_caltech10(root: Path, size: int) -> ImageSet:
    """Read Office-Caltech10: four domains with the same ten classes.

    The split is that of FedBN's lists, ``amazon_train.pkl`` and so on, if they are in the folder,
    as in FedBN's archive. Otherwise a fifth of each class of each domain, drawn with seed 0, is for
    testing.
    """
    base = root / "office_caltech_10"
    how = (
        "Put the images in one folder for each domain, with one folder for each class. "
        "https://github.com/med-air/FedBN links an archive in this form."
    )
    require(base, OFFICE, how)
    wholes = [read_folder(base / domain, layout="class") for domain in OFFICE]
    classes = wholes[0].class_names
    for whole in wholes:
        if differing := {*classes} ^ {*whole.class_names}:
            rule = "must have the same classes as the other folders; only one has"
            raise ValueError(f"{whole.root} {rule} {sorted(differing)}.")
    found = fedbn_lists(base, OFFICE, classes, size)
    own = [[listed(part, size) for part in fifth_held_out(whole)] for whole in wholes]
    train, test = found or zip(*own, strict=True)
    name = "office-caltech10-fedbn" if found else "office-caltech10"
    sides = decoded_sides(train, test, base, name, size)
    names = {"back_pack": "backpack", "laptop_computer": "laptop"}
    return ImageSet("", *sides, words([names.get(name, name) for name in classes]), OFFICE)


TEN = (
    *("bird", "feather", "headphones", "ice_cream", "teapot"),
    *("tiger", "whale", "windmill", "wine_glass", "zebra"),
)
"""Classes of DomainNet in FedBN and the papers that follow it."""


def domainnet(root: Path, size: int) -> ImageSet:
    """Read ten classes of DomainNet in six domains.

    The split is that of FedBN's lists, ``clipart_train.pkl`` and so on, if they are in the folder.
    Otherwise it is that of DomainNet's authors.
    """
    base = root / "domainnet"
    if found := fedbn_lists(base, DOMAINNET, TEN, size):
        sides = decoded_sides(*found, base, "domainnet-fedbn", size)
        return ImageSet("", *sides, words(TEN), DOMAINNET)
    how = (
        "Download the archives and the lists of all domains from http://ai.bu.edu/M3SDA/ and "
        f"extract them in {base.resolve()}."
    )
    sides = []
    for split in ("train", "test"):
        lists = (f"{domain}_{split}.txt" for domain in DOMAINNET)
        require(base, (*lists, *DOMAINNET), how)
        parts = []
        for domain in DOMAINNET:
            lines = (base / f"{domain}_{split}.txt").read_text().splitlines()
            paths = [line.rpartition(" ")[0] for line in lines if line]
            paths = [path for path in paths if path.split("/")[1] in TEN]
            labels = [TEN.index(path.split("/")[1]) for path in paths]
            parts.append(Listed(ImageFiles([base / path for path in paths], size), labels))
        sides.append(parts)
    return ImageSet("", *decoded_sides(*sides, base, "domainnet", size), words(TEN), DOMAINNET)


def _rgb(pixels: torch.Tensor, side: int) -> torch.Tensor:
    if pixels.shape[-1] != side:
        pixels = vision.resize(pixels, [side, side], vision.InterpolationMode.BICUBIC)
    return pixels.expand(-1, 3, -1, -1)
