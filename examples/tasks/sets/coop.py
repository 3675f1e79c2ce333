"""Data sets of CLIP papers in the splits of CoOp, which FedOTP and others use.

CoOp divides most of these data sets anew, into half for training, a fifth for validation and three
tenths for testing, and publishes one list for each. The images are those that torchvision reads.
"""

import json
from pathlib import Path
from typing import NamedTuple

from tasks.sets.readers import ImageSet, Listed, decoded_sides, require, words


class Split(NamedTuple):
    """Place of a list of CoOp.

    Attributes:
        title: Name of the data set in the name of the list.
        base: Folder of the data set, which must contain the list.
        images: Folder of the images in `base`.
        template: CoOp's sentence around a class name.
    """

    title: str
    base: str
    images: str
    template: str


SPLITS = {
    "dtd": Split("DescribableTextures", "dtd", "dtd/images", "{} texture."),
    "flowers102": Split(
        "OxfordFlowers", "flowers-102", "jpg", "a photo of a {}, a type of flower."
    ),
    "food101": Split("Food101", "food-101", "images", "a photo of {}, a type of food."),
    "pets": Split("OxfordPets", "oxford-iiit-pet", "images", "a photo of a {}, a type of pet."),
    "caltech101": Split("Caltech101", "caltech101", "101_ObjectCategories", "a photo of a {}."),
}


def coop(root: Path, size: int, *, name: str) -> ImageSet:
    """Read the training and test images of CoOp's list; its validation images are not used.

    Args:
        root: Folder of the data sets.
        size: Side of the images in pixels.
        name: Name in `SPLITS`.
    """
    split = SPLITS[name]
    base, file = root / split.base, f"split_zhou_{split.title}.json"
    how = (
        f"Put the images into {(base / split.images).resolve()}, and {file} into {base.resolve()}. "
        "https://github.com/KaiyangZhou/CoOp/blob/main/DATASETS.md has the links."
    )
    require(base, (split.images, file), how)
    lists = json.loads((base / file).read_text())
    train, test = (
        Listed(
            [base / split.images / name for name, _, _ in lists[side]],
            [int(label) for _, label, _ in lists[side]],
            size,
        )
        for side in ("train", "test")
    )
    names = {int(label): title for _, label, title in lists["train"] + lists["test"]}
    sides = decoded_sides([train], [test], base, f"{name}-coop", size)
    in_order = [names.get(label, f"class {label}") for label in range(max(names) + 1)]
    return ImageSet("", *sides, words(in_order), template=split.template)
