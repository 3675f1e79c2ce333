"""Data sets of CLIP papers in the splits of CoOp, which FedOTP and others use.

CoOp divides most of these data sets anew, into half for training, a fifth for validation and three
tenths for testing, and publishes one list for each. The images are those that torchvision reads.
FGVC-Aircraft has its authors' lists, and ImageNet has folders, whose validation images are the test
images.
"""

import json
from collections.abc import Callable
from pathlib import Path

from fedprompt.compare.images import ImageFiles
from tasks.sets.readers import ImageSet, Listed, decoded_sides, require, words

Lists = dict[str, list[tuple[str, int, str]]]
"""File, label and class name of each training and test image."""

PHOTO = "a photo of a {}."
SPLITS = {
    "dtd": ("DescribableTextures", "dtd", "dtd/images", "{} texture."),
    "flowers102": ("OxfordFlowers", "flowers-102", "jpg", "a photo of a {}, a type of flower."),
    "food101": ("Food101", "food-101", "images", "a photo of {}, a type of food."),
    "pets": ("OxfordPets", "oxford-iiit-pet", "images", "a photo of a {}, a type of pet."),
    "caltech101": ("Caltech101", "caltech101", "101_ObjectCategories", PHOTO),
    "eurosat": ("EuroSAT", "eurosat", "2750", "a centered satellite photo of {}."),
    "cars": ("StanfordCars", "stanford_cars", ".", PHOTO),
    "sun397": ("SUN397", "sun397", "SUN397", PHOTO),
    "ucf101": ("UCF101", "ucf101", "UCF-101-midframes", "a photo of a person doing {}."),
    "aircraft": ("", "fgvc-aircraft-2013b/data", "images", "a photo of a {}, a type of aircraft."),
    "imagenet": ("", "imagenet", "images", PHOTO),
}
"""Name of CoOp's list, folder of the data set with the list, folder of its images, and sentence."""


def _aircraft(base: Path) -> Lists:
    names = (base / "variants.txt").read_text().splitlines()
    lists: Lists = {}
    for side in ("train", "test"):
        lines = (base / f"images_variant_{side}.txt").read_text().splitlines()
        pairs = [line.split(" ", 1) for line in lines]
        lists[side] = [(f"{image}.jpg", names.index(name), name) for image, name in pairs]
    return lists


def _imagenet(base: Path) -> Lists:
    kinds = sorted(
        line.split(" ", 1) for line in (base / "classnames.txt").read_text().splitlines()
    )
    lists: Lists = {"train": [], "test": []}
    for side, folder in (("train", "train"), ("test", "val")):
        for label, (wnid, name) in enumerate(kinds):
            files = sorted((base / "images" / folder / wnid).iterdir())
            lists[side] += [(f"{folder}/{wnid}/{file.name}", label, name) for file in files]
    return lists


OTHERS: dict[str, tuple[str, Callable[[Path], Lists]]] = {
    "aircraft": ("variants.txt", _aircraft),
    "imagenet": ("classnames.txt", _imagenet),
}
"""File and reader of the data sets without CoOp's list."""


def coop(root: Path, size: int, *, name: str) -> ImageSet:
    """Read the training and test images of CoOp's list; its validation images are not used.

    All images are decoded once into a file. For ImageNet at 256 pixels it has 260 GB.

    Args:
        root: Folder of the data sets.
        size: Side of the images in pixels.
        name: Name in `SPLITS`.
    """
    title, folder, images, template = SPLITS[name]
    base = root / folder
    file, read = OTHERS.get(name, (f"split_zhou_{title}.json", None))
    how = (
        f"Put the images into {(base / images).resolve()}, and {file} into {base.resolve()}. "
        "https://github.com/KaiyangZhou/CoOp/blob/main/DATASETS.md has the links."
    )
    require(base, (images, file), how)
    lists = read(base) if read else json.loads((base / file).read_text())
    train, test = (
        Listed(
            ImageFiles([base / images / name for name, _, _ in lists[side]], size),
            [int(label) for _, label, _ in lists[side]],
        )
        for side in ("train", "test")
    )
    names = {int(label): title for _, label, title in lists["train"] + lists["test"]}
    sides = decoded_sides([train], [test], base, f"{name}-coop", size)
    in_order = [names.get(label, f"class {label}") for label in range(max(names) + 1)]
    return ImageSet("", *sides, words(in_order), template=template)
