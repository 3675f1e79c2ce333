"""Image files as tensors, which are decoded once into a file that is mapped."""

import hashlib
import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor

from fedprompt.data import Folder
from fedprompt.data.images import common_depth, opened

CHUNK = 256
"""Number of images that are decoded at a time."""
UNREADABLE = "cannot be read"
"""Reason of images that are left out."""
REMEDY = "Correct it, or leave such files out by `skip=True`."
WIDEST = 64
"""Largest ratio of the sides of an image; of a longer one, only the middle is resized."""

Pixels = UInt8[Tensor, "images 3 size size"]
Bar = Callable[[Sequence[range]], Iterable[range]]


def squared(image: Image.Image, *, size: int) -> UInt8[Tensor, "3 size size"]:
    """Resize the short side of an image to `size`, bicubic, and cut out the middle, in RGB."""
    from torchvision.transforms import functional as vision  # takes seconds

    image = image if image.mode == "RGB" else image.convert("RGB")
    longest = WIDEST * min(image.size)
    if max(image.size) > longest:  # resized, it would be too large for the memory
        image = vision.center_crop(image, [min(side, longest) for side in image.size[::-1]])
    image = vision.resize(image, [size], vision.InterpolationMode.BICUBIC)
    pixels: Tensor = vision.pil_to_tensor(vision.center_crop(image, [size]))
    return pixels.contiguous()


def decoded(
    folder: Folder, cache: Path, *, size: int, skip: bool = False, bar: Bar = iter
) -> tuple[Pixels, Folder]:
    """Decode the images of a folder once, and map the resulting file in every later call.

    Gray images with levels above 255 have the bit depth of the highest level in all files.

    The name of the file has a hash of the names, sizes and times of all images. The file has the
    pixels and then the positions of the images. It is written under another name and renamed when
    it is complete. A process that is killed can leave a file that ends in ``.part``, which is never
    read. Changes of the returned pixels are not written to the file.

    Args:
        folder: Image files.
        cache: Folder of the file, which is made if it does not exist.
        size: Side of the images in pixels.
        skip: Whether to leave out images that cannot be read.
        bar: Function that wraps the chunks of images in a progress bar.

    Returns:
        Images, and the folder without the ones that were left out.

    Raises:
        ValueError: If an image cannot be read, or the file is damaged.
    """
    path, count = cache / f"{stamp(folder)}-{size}px.images", len(folder)
    if not path.exists():
        _write(folder.paths, size, path, skip, bar)
    each = 3 * size * size + 8
    kept, rest = divmod(path.stat().st_size, each)
    if rest or kept > count or not kept:
        raise ValueError(f"{path} must have {each} bytes for each of {count} images. Delete it.")
    raw = torch.from_file(str(path), size=kept * each, dtype=torch.uint8)
    pixels, places = raw[: kept * (each - 8)], raw[kept * (each - 8) :].clone().view(torch.int64)
    if kept < count:
        lost = folder.at(np.setdiff1d(np.arange(count), places)).paths
        if not skip:
            few = f"{len(lost)} of {count} images"
            raise ValueError(f"{few} {UNREADABLE}, such as {lost[0]}. {REMEDY}")
        skipped = {**folder.skipped, UNREADABLE: lost}
        folder = replace(folder.at(places), skipped=skipped)
    return pixels.view(kept, 3, size, size), folder


def stamp(folder: Folder) -> str:
    """Return a hash of the names, sizes and times of the images of a folder."""
    hashed = hashlib.sha256()
    for path in folder.paths:
        found = path.stat()
        name = os.path.relpath(path, folder.root)
        hashed.update(repr((name, found.st_size, found.st_mtime_ns)).encode())
    return hashed.hexdigest()[:12]


def _write(files: Sequence[Path], size: int, path: Path, skip: bool, bar: Bar) -> None:
    """Write the pixels of all images that can be read, then their positions."""

    def read(place: int) -> tuple[Tensor, int] | None:
        try:
            resize = partial(squared, size=size)
            return opened(files[place], bits=bits, then=resize), place
        except OSError as error:
            if skip:
                return None
            raise ValueError(f"{error} {REMEDY}") from error

    count, bits = len(files), common_depth(files)
    path.parent.mkdir(parents=True, exist_ok=True)
    chunks = [range(start, min(start + CHUNK, count)) for start in range(0, count, CHUNK)]
    part, places = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part"), list[int]()
    try:
        with part.open("wb") as file, ThreadPoolExecutor() as pool:
            for chunk in bar(chunks):
                for pixels, place in filter(None, pool.map(read, chunk)):
                    file.write(pixels.numpy().data)
                    places.append(place)
            if not places:
                raise ValueError(f"None of {count} images can be read for {path}.")
            file.write(np.array(places, dtype=np.int64).data)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
