"""Data sets of CLIP papers in the splits of CoOp, which FedOTP and others use.

CoOp divides most of these data sets anew, into half for training, a fifth for validation and three
tenths for testing, and publishes one list for each. The images are those that torchvision reads.
FGVC-Aircraft has its authors' lists, and ImageNet has folders, whose validation images are the test
images.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedprompt.data import Folder, read_folder
from studies.core import content
from studies.sets.readers import ImageSet, image_set, listed, require

SPLITS = content("coop")
"""Name of CoOp's list, folder of the data set with the list, folder of its images, and sentence."""


def _aircraft(base: Path) -> Folder:
    names = (base / "variants.txt").read_text().splitlines()
    lines = [
        (base / "images" / f"{image}.jpg", names.index(name), 0, side)
        for side in ("train", "test")
        for line in (base / f"images_variant_{side}.txt").read_text().splitlines()
        for image, name in [line.split(" ", 1)]
    ]
    return listed(base, lines, names)


def _imagenet(base: Path) -> Folder:
    lines = (base / "classnames.txt").read_text().splitlines()
    names = dict(line.split(" ", 1) for line in lines)
    found = read_folder(base / "images", layout="split/class")
    split = np.where(found.split == "val", "test", found.split)
    titles = tuple(names[wnid] for wnid in found.class_names)
    return replace(found, root=base, split=split, class_names=titles)


OTHERS: dict[str, tuple[str, Callable[[Path], Folder]]] = {
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
    folder = read(base) if read else read_folder(base / file)
    return image_set(folder, folder.class_names, size, template=template)
