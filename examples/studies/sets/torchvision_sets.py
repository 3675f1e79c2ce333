"""Data sets that torchvision reads, in the splits of their authors."""

from pathlib import Path

from torchvision import datasets

from studies.sets.readers import ImageSet, Line, by_torchvision, image_set, in_memory, listed, words

NUMERALS = tuple("0123456789")


def cifar(root: Path, size: int, *, kind: type) -> ImageSet:
    """Read CIFAR-10 or CIFAR-100."""
    names = [file for file, _ in kind.train_list + kind.test_list] + [kind.meta["filename"]]
    files = [f"{kind.base_folder}/{file}" for file in names]
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
    return ImageSet("", *images, NUMERALS)


def mnist(root: Path, size: int, *, kind: type) -> ImageSet:
    """Read MNIST or FashionMNIST."""
    folder = f"{kind.__name__}/raw"
    files = [f"{folder}/{Path(file).stem}" for file, _ in kind.resources]
    sides = [by_torchvision(kind, root, files, train=train) for train in (True, False)]
    images = [in_memory(side.data[:, None], side.targets) for side in sides]
    names = NUMERALS if kind is datasets.MNIST else tuple(kind.classes)
    return ImageSet("", *images, names)


def flowers102(root: Path, size: int) -> ImageSet:
    """Read Flowers102; its validation images are training images here."""
    files = [f"flowers-102/{file}" for file in ("jpg", "imagelabels.mat", "setid.mat")]
    splits = {"train": "train", "val": "train", "test": "test"}
    lines: list[Line] = []
    for split, side in splits.items():
        found = by_torchvision(datasets.Flowers102, root, files, split=split)
        pairs = zip(found._image_files, found._labels, strict=True)
        lines += [(path, int(label), 0, side) for path, label in pairs]
    names = [name.rstrip("?") for name in datasets.Flowers102.classes]
    return image_set(listed(root / "flowers-102", lines, names), names, size)
