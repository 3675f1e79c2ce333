"""Data sets that torchvision does not have, as folders of images and lists of files."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torchvision import datasets
from torchvision.transforms.v2 import functional as vision

from fedprompt.data import read_folder
from studies.sets.readers import (
    Images,
    ImageSet,
    Line,
    fedbn_lists,
    fifth_held_out,
    image_set,
    listed,
    require,
)
from studies.sets.torchvision_sets import cifar, mnist, svhn


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
    lines = [
        (path, label, 0, "train") for path, label in zip(train.paths, train.labels, strict=True)
    ]
    for line in (base / "val" / "val_annotations.txt").read_text().splitlines():
        file, wnid, *_ = line.split("\t")
        lines.append((base / "val" / "images" / file, train.class_names.index(wnid), 0, "test"))
    meanings = dict(line.split("\t") for line in (base / "words.txt").read_text().splitlines())
    names = [meanings[wnid].split(",")[0] for wnid in train.class_names]
    return image_set(listed(base, lines, names), names, side)


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
    folder = fifth_held_out(read_folder(base, layout="class", skip=True))
    return image_set(folder, [f"letter {letter}" for letter in folder.class_names], side)


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
    whole = read_folder(base, layout="domain/class")
    classes = whole.class_names
    for number, domain in enumerate(OFFICE):
        own = {classes[label] for label in whole.labels[whole.domains == number]}
        if differing := {*classes} - own:
            rule = "must have the same classes as the other folders; only the others have"
            raise ValueError(f"{base / domain} {rule} {sorted(differing)}.")
    lines = list(fedbn_lists(base, OFFICE, classes))
    folder = listed(base, lines, classes, OFFICE) if lines else fifth_held_out(whole)
    names = {"back_pack": "backpack", "laptop_computer": "laptop"}
    titles = [names.get(name, name) for name in classes]
    return image_set(folder, titles, size)


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
    lines = list(fedbn_lists(base, DOMAINNET, TEN)) or list(_lists_of_authors(base))
    return image_set(listed(base, lines, TEN, DOMAINNET), TEN, size)


def _lists_of_authors(base: Path) -> Iterator[Line]:
    how = (
        "Download the archives and the lists of all domains from http://ai.bu.edu/M3SDA/ and "
        f"extract them in {base.resolve()}."
    )
    for split in ("train", "test"):
        require(base, (*(f"{domain}_{split}.txt" for domain in DOMAINNET), *DOMAINNET), how)
        for number, domain in enumerate(DOMAINNET):
            for line in filter(None, (base / f"{domain}_{split}.txt").read_text().splitlines()):
                path = line.rpartition(" ")[0]
                if (name := path.split("/")[1]) in TEN:
                    yield base / path, TEN.index(name), number, split


def _rgb(pixels: torch.Tensor, side: int) -> torch.Tensor:
    if pixels.shape[-1] != side:
        pixels = vision.resize(pixels, [side, side], vision.InterpolationMode.BICUBIC)
    return pixels.expand(-1, 3, -1, -1)
