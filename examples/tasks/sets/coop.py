"""Data sets of CLIP papers in the splits of CoOp, which FedOTP and others use.

CoOp divides most of these data sets anew, into half for training, a fifth for validation and three
tenths for testing, and publishes one list for each. The images are those that torchvision reads.
"""

import json
from pathlib import Path

from tasks.sets.readers import ImageSet, Listed, decoded_sides, require, words

SPLITS = {
    "dtd": ("DescribableTextures", "dtd", "dtd/images", "{} texture."),
    "flowers102": ("OxfordFlowers", "flowers-102", "jpg", "a photo of a {}, a type of flower."),
    "food101": ("Food101", "food-101", "images", "a photo of {}, a type of food."),
    "pets": ("OxfordPets", "oxford-iiit-pet", "images", "a photo of a {}, a type of pet."),
    "caltech101": ("Caltech101", "caltech101", "101_ObjectCategories", "a photo of a {}."),
}
"""Name in CoOp's list, folder of the data set with the list, folder of its images, and sentence."""


def coop(root: Path, size: int, *, name: str) -> ImageSet:
    """Read the training and test images of CoOp's list; its validation images are not used.

    Args:
        root: Folder of the data sets.
        size: Side of the images in pixels.
        name: Name in `SPLITS`.
    """
    title, folder, images, template = SPLITS[name]
    base, file = root / folder, f"split_zhou_{title}.json"
    how = (
        f"Put the images into {(base / images).resolve()}, and {file} into {base.resolve()}. "
        "https://github.com/KaiyangZhou/CoOp/blob/main/DATASETS.md has the links."
    )
    require(base, (images, file), how)
    lists = json.loads((base / file).read_text())
    train, test = (
        Listed(
            [base / images / name for name, _, _ in lists[side]],
            [int(label) for _, label, _ in lists[side]],
            size,
        )
        for side in ("train", "test")
    )
    names = {int(label): title for _, label, title in lists["train"] + lists["test"]}
    sides = decoded_sides([train], [test], base, f"{name}-coop", size)
    in_order = [names.get(label, f"class {label}") for label in range(max(names) + 1)]
    return ImageSet("", *sides, words(in_order), template=template)
