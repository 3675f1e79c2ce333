"""Tiny files of each data set in its own format on disk.

The left half of an image has the color of its class. The right half has the color of its domain and
split, so a test finds wrong labels, wrong domains and swapped splits.
"""

import json
import pickle
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
from PIL import Image
from scipy.io import savemat

SPLITS = ("train", "test")
DOMAINS = {
    "office-caltech10": ("amazon", "caltech", "dslr", "webcam"),
    "domainnet": ("clipart", "infograph", "painting", "quickdraw", "real", "sketch"),
}
OFFICE = (
    *("back_pack", "bike", "calculator", "headphones", "keyboard"),
    *("laptop_computer", "monitor", "mouse", "mug", "projector"),
)
TEN = (
    *("bird", "feather", "headphones", "ice_cream", "teapot"),
    *("tiger", "whale", "windmill", "wine_glass", "zebra"),
)


@contextmanager
def unchecked() -> Iterator[None]:
    """Let torchvision's readers accept any file that exists, whatever its checksum."""
    modules = ("cifar", "svhn", "flowers102")

    def exists(path, md5=None):
        return Path(path).is_file()

    with mock.patch.multiple("torchvision.datasets.utils", check_integrity=exists):
        patches = [
            mock.patch(f"torchvision.datasets.{module}.check_integrity", exists)
            for module in modules
        ]
        for patch in patches:
            patch.start()
        try:
            yield
        finally:
            for patch in patches:
                patch.stop()


def color(number: int) -> tuple[int, int, int]:
    """Return one of 216 colors that differ by at least 51 in a channel."""
    return tuple(51 * (number // power % 6) for power in (1, 6, 36))


def mark(split: str, domain: int = 0) -> int:
    """Return the number of the color of a domain and split."""
    return domain + 7 * SPLITS.index(split)


def painted(label: int, right: int, *, height: int = 32, width: int = 32) -> np.ndarray:
    """Make an RGB image (height, width, 3) of two colors."""
    pixels = np.empty((height, width, 3), np.uint8)
    pixels[:, : width // 2], pixels[:, width // 2 :] = color(label), color(right)
    return pixels


def gray(label: int, right: int) -> np.ndarray:
    """Make an image (28, 28) of two gray levels, 20 for each number."""
    pixels = np.empty((28, 28), np.uint8)
    pixels[:, :14], pixels[:, 14:] = 20 * label, 20 * right
    return pixels


def write_photo(path: Path, label: int, right: int, **sides: int) -> None:
    """Write a JPEG, wider than high unless `sides` says otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(painted(label, right, **({"height": 16, "width": 24} | sides)))
    image.save(path, "JPEG", quality=95, subsampling=0)


def labels_of(classes: int, count: int) -> np.ndarray:
    """List `count` images of each class in a shuffled order."""
    return np.random.default_rng(0).permutation(np.arange(classes).repeat(count))


def named(classes: int) -> list[str]:
    """Make sorted class names with an underscore."""
    return [f"kind_{label:03d}" for label in range(classes)]


def _pickled(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(content))


def _cifar(root: Path, fine: bool, train: int, test: int) -> None:
    folder = root / ("cifar-100-python" if fine else "cifar-10-batches-py")
    key = "fine_labels" if fine else "labels"
    files = {"train": ["train"] if fine else [f"data_batch_{k}" for k in range(1, 6)]}
    files["test"] = ["test"] if fine else ["test_batch"]
    for split, count in zip(SPLITS, (train, test), strict=True):
        labels = labels_of(100 if fine else 10, count)
        for k, file in enumerate(files[split]):
            own = labels[k :: len(files[split])]
            rows = [painted(label, mark(split)).transpose(2, 0, 1).ravel() for label in own]
            _pickled(folder / file, {"data": np.stack(rows), key: own.tolist()})
    names = [f"kind_{label}" for label in range(100 if fine else 10)]
    meta = {"fine_label_names": names} if fine else {"label_names": names}
    _pickled(folder / ("meta" if fine else "batches.meta"), meta)


def cifar10(root: Path, *, train: int = 2, test: int = 1) -> None:
    _cifar(root, False, train, test)


def cifar100(root: Path, *, train: int = 2, test: int = 1) -> None:
    _cifar(root, True, train, test)


def svhn(root: Path, *, train: int = 2, test: int = 1) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for split, count in zip(SPLITS, (train, test), strict=True):
        labels = labels_of(10, count)
        images = np.stack([painted(label, mark(split)) for label in labels], axis=-1)
        numbers = np.where(labels == 0, 10, labels)[:, None].astype(np.uint8)
        savemat(root / f"{split}_32x32.mat", {"X": images, "y": numbers})


def _idx(root: Path, kind: str, train: int, test: int) -> None:
    folder = root / kind / "raw"
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in zip(SPLITS, (train, test), strict=True):
        labels, part = labels_of(10, count), "train" if split == "train" else "t10k"
        images = np.stack([gray(label, mark(split)) for label in labels])
        header = struct.pack(">IIII", 0x803, len(labels), 28, 28)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        header = struct.pack(">II", 0x801, len(labels))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(header + bytes(labels.tolist()))


def fashion_mnist(root: Path, *, train: int = 2, test: int = 1) -> None:
    _idx(root, "FashionMNIST", train, test)


def mnist(root: Path, *, train: int = 2, test: int = 1) -> None:
    _idx(root, "MNIST", train, test)


def not_mnist(root: Path, *, train: int = 4, test: int = 1) -> None:
    """Write `train + test` images of each letter, and two broken files as in the archive."""
    for label, letter in enumerate("ABCDEFGHIJ"):
        folder = root / "notMNIST_small" / letter
        folder.mkdir(parents=True)
        for index in range(train + test):
            Image.fromarray(gray(label, 0)).save(folder / f"{index}.png")
    for letter in "AF":
        (root / "notMNIST_small" / letter / "broken.png").write_bytes(b"")


def five_dataset(root: Path, *, train: int = 4, test: int = 1) -> None:
    for write in (svhn, cifar10, not_mnist, fashion_mnist, mnist):
        write(root, train=train, test=test)


def flowers102(root: Path, *, train: int = 1, test: int = 1) -> None:
    folder, ids, labels = root / "flowers-102", {}, []
    for key, count in (("trnid", train), ("valid", train), ("tstid", test)):
        own = labels_of(102, count)
        ids[key] = np.arange(len(labels) + 1, len(labels) + 1 + len(own))
        for number, label in zip(ids[key], own, strict=True):
            right = mark("test" if key == "tstid" else "train")
            write_photo(folder / "jpg" / f"image_{number:05d}.jpg", label, right)
        labels.extend(own + 1)
    savemat(folder / "setid.mat", ids)
    savemat(folder / "imagelabels.mat", {"labels": np.array(labels)})


def tiny_imagenet(root: Path, *, train: int = 2, test: int = 1, classes: int = 5) -> None:
    folder, sides = root / "tiny-imagenet-200", {"height": 64, "width": 64}
    wnids = [f"n{label:08d}" for label in range(classes)]
    for label, wnid in enumerate(wnids):
        for index in range(train):
            path = folder / "train" / wnid / "images" / f"{wnid}_{index}.JPEG"
            write_photo(path, label, mark("train"), **sides)
        (folder / "train" / wnid / f"{wnid}_boxes.txt").write_text("")
    rows = []
    for index, label in enumerate(labels_of(classes, test)):
        rows.append(f"val_{index}.JPEG\t{wnids[label]}\t0\t0\t63\t63")
        write_photo(folder / "val" / "images" / f"val_{index}.JPEG", label, mark("test"), **sides)
    (folder / "val" / "val_annotations.txt").write_text("\n".join(rows) + "\n")
    (folder / "wnids.txt").write_text("\n".join(wnids[::-1]) + "\n")
    meanings = [f"{wnid}\tthing {label}, item" for label, wnid in enumerate(wnids)]
    (folder / "words.txt").write_text("\n".join(["n99999999\tentity", *meanings[::-1]]) + "\n")


def office_caltech10(root: Path, *, train: int = 4, test: int = 1) -> None:
    """Write `train + test` images of each class, and twice as many in the second domain."""
    for domain, name in enumerate(DOMAINS["office-caltech10"]):
        for label, kind in enumerate(OFFICE):
            for index in range((train + test) * (2 if domain == 1 else 1)):
                path = root / "office_caltech_10" / name / kind / f"frame_{index}.jpg"
                write_photo(path, label, mark("train", domain))


def domainnet(root: Path, *, train: int = 2, test: int = 1) -> None:
    """Write the ten classes and an eleventh, whose number comes first in the lists."""
    folder = root / "domainnet"
    for domain, name in enumerate(DOMAINS["domainnet"]):
        for split, count in zip(SPLITS, (train, test), strict=True):
            rows = []
            for number, kind in enumerate(("aircraft_carrier", *TEN)):
                for index in range(count):
                    rows.append(f"{name}/{kind}/{name}_{split}_{index}.jpg {number}")
                    path = folder / rows[-1].split()[0]
                    write_photo(path, number - 1 if number else 100, mark(split, domain))
            (folder / f"{name}_{split}.txt").write_text("\n".join(rows) + "\n")


COOP = {
    "dtd-coop": ("dtd", "dtd/images", "DescribableTextures"),
    "flowers102-coop": ("flowers-102", "jpg", "OxfordFlowers"),
    "food101-coop": ("food-101", "images", "Food101"),
    "pets-coop": ("oxford-iiit-pet", "images", "OxfordPets"),
    "caltech101-coop": ("caltech101", "101_ObjectCategories", "Caltech101"),
    "eurosat-coop": ("eurosat", "2750", "EuroSAT"),
    "cars-coop": ("stanford_cars", ".", "StanfordCars"),
    "sun397-coop": ("sun397", "SUN397", "SUN397"),
    "ucf101-coop": ("ucf101", "UCF-101-midframes", "UCF101"),
}


def coop(root: Path, *, name: str, train: int = 2, test: int = 1, classes: int = 5) -> None:
    base, images, title = COOP[name]
    lists = {}
    for side, count in (("train", train), ("val", 1), ("test", test)):
        lists[side] = []
        for label in labels_of(classes, count).tolist():
            file = f"{side}/image_{len(lists[side])}.jpg"
            lists[side].append([file, label, named(classes)[label]])
            right = mark("train" if side == "val" else side)
            write_photo(root / base / images / file, label, right)
    (root / base / f"split_zhou_{title}.json").write_text(json.dumps(lists))


def aircraft(root: Path, *, train: int = 2, test: int = 1, classes: int = 5) -> None:
    base, names = root / "fgvc-aircraft-2013b" / "data", named(classes)
    for side, count in (("train", train), ("test", test)):
        rows = []
        for label in labels_of(classes, count).tolist():
            rows.append(f"{side}{len(rows)} {names[label]}")
            write_photo(base / "images" / f"{rows[-1].split()[0]}.jpg", label, mark(side))
        (base / f"images_variant_{side}.txt").write_text("\n".join(rows) + "\n")
    (base / "variants.txt").write_text("\n".join(names) + "\n")


def imagenet(root: Path, *, train: int = 2, test: int = 1, classes: int = 5) -> None:
    base, lines = root / "imagenet", []
    for label, name in enumerate(named(classes)):
        wnid = f"n{label:08d}"
        lines.append(f"{wnid} {name}")
        for folder, side, count in (("train", "train", train), ("val", "test", test)):
            for index in range(count):
                path = base / "images" / folder / wnid / f"{index}.JPEG"
                write_photo(path, label, mark(side))
    (base / "classnames.txt").write_text("\n".join(lines[::-1]) + "\n")


def fedbn_lists(root: Path, folder: str, listed: str, split: dict[str, list[str]]) -> None:
    """Write FedBN's lists of image files, in its old format."""
    for key, files in split.items():
        names = np.array([Path(file).parts[-2] for file in files])
        content = np.array([f"{listed}/{file}" for file in files], dtype=object), names
        text = pickle.dumps(content, protocol=2).replace(b"numpy._core", b"numpy.core")
        (root / folder / f"{key}.pkl").write_bytes(text)


WRITERS: dict[str, Callable[..., None]] = {
    "cifar10": cifar10,
    "cifar100": cifar100,
    "svhn": svhn,
    "flowers102": flowers102,
    "tiny-imagenet": tiny_imagenet,
    "five-dataset": five_dataset,
    "office-caltech10": office_caltech10,
    "domainnet": domainnet,
    **{name: partial(coop, name=name) for name in COOP},
    "aircraft-coop": aircraft,
    "imagenet-coop": imagenet,
}


def fabricate(name: str, root: Path, **values: int) -> None:
    """Write a data set.

    Args:
        name: Name in `WRITERS`.
        root: Folder of the data sets.
        values: Numbers of images of each class, ``train`` and ``test``, and ``classes`` where the
            format leaves it open.
    """
    WRITERS[name](root, **values)
