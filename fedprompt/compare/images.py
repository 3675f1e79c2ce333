"""Image files as tensors, which are decoded once into a file that is mapped."""

import hashlib
import os
import secrets
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image, ImageOps
from torch import Tensor

from fedprompt.data import Folder

BITS = (8, 10, 12, 14, 16)
"""Bit depths of gray images."""
DEEP = {".png", ".tif", ".tiff", ".pgm"}
"""Extensions of images that can have more than 8 bits."""
CHUNK = 256
"""Number of images that are decoded at a time."""
UNREADABLE = "cannot be read"
"""Reason of images that are left out."""
REMEDY = "Correct it, or leave such files out by `skip=True`."
WIDEST = 64
"""Largest ratio of the sides of an image; of a longer one, only the middle is resized."""

Pixels = UInt8[Tensor, "images 3 size size"]
Bar = Callable[[Sequence[range]], Iterable[range]]


def opened(path: str | os.PathLike[str], *, bits: int | None = None) -> Image.Image:
    """Open an image in RGB with 8 bits, upright as its EXIF orientation says.

    Gray levels above 255 are scaled by their bit depth, and floats from [0, 1]. As in torchvision,
    transparency is ignored.

    Args:
        path: Image file.
        bits: Bit depth of gray images with levels above 255. If None, it is the smallest of 10, 12,
            14 and 16 that has the largest level of the image.

    Raises:
        OSError: If the file is damaged, too large, or has values of unknown range. The message has
            the path.
    """
    try:
        with Image.open(path) as image:
            halved = ";16" in str(image.tile) and not image.mode.startswith("I")
            upright = ImageOps.exif_transpose(image)
            if upright.mode == "F" or upright.mode.startswith("I"):
                upright = Image.fromarray(_eight_bits(np.asarray(upright), bits))
            elif upright.mode == "P":  # its transparency may be bytes, which RGB does not take
                upright = upright.convert("RGBA")
            found = upright.convert("RGB")
        if halved and np.asarray(found).max() < 64:
            raise ValueError("it has colors of less than 16 bits in 16 bits; save it with 8 bits")
        return found
    except MemoryError:
        raise
    except Exception as error:  # decoders raise errors of many types
        text = str(error).rstrip(".") or type(error).__name__
        raise OSError(f"{path} cannot be read as an image: {text}.") from error


def _eight_bits(levels: np.ndarray, bits: int | None) -> UInt8[np.ndarray, "height width"]:
    """Scale gray levels to 8 bits.

    Raises:
        ValueError: If integers are negative or above 65535, or floats outside of [0, 1].
    """
    low, high = levels.min(), levels.max()
    limit = 1 if levels.dtype.kind == "f" else 2**16 - 1
    if not 0 <= low <= high <= limit:
        raise ValueError(f"its levels must lie in [0, {limit}]; got from {low} to {high}")
    if limit == 1:
        return (255 * levels).round().astype(np.uint8)
    largest = 2 ** (bits or depth(int(high))) - 1
    scaled: UInt8[np.ndarray, "height width"]
    scaled = (levels.astype(np.int64) * 255 // largest).clip(max=255).astype(np.uint8)
    return scaled


def depth(level: int) -> int:
    """Return the smallest bit depth that has a gray level."""
    return next(bits for bits in BITS if level < 2**bits)


def squared(image: Image.Image, *, size: int) -> UInt8[Tensor, "3 size size"]:
    """Resize the short side of an image to `size`, bicubic, and cut out the middle, in RGB."""
    from torchvision.transforms import functional as vision  # takes seconds

    image = image.convert("RGB")
    longest = WIDEST * min(image.size)
    if max(image.size) > longest:  # resized, it would be too large for the memory
        image = vision.center_crop(image, [min(side, longest) for side in image.size[::-1]])
    image = vision.resize(image, [size], vision.InterpolationMode.BICUBIC)
    pixels: Tensor = vision.pil_to_tensor(vision.center_crop(image, [size]))
    return pixels.contiguous()


def common_depth(paths: Iterable[Path]) -> int:
    """Return the bit depth of gray images with levels above 255: that of the highest level."""
    highest = 255
    for path in paths:
        if path.suffix.lower() in DEEP:
            with suppress(Exception), Image.open(path) as image:  # refused when it is read
                if image.mode.startswith("I"):
                    highest = max(highest, int(np.asarray(image).max()))
    return depth(min(highest, 2**16 - 1))


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
            return squared(opened(files[place], bits=bits), size=size), place
        except OSError as error:
            if skip:
                return None
            raise ValueError(f"{error} {REMEDY}") from error

    count, bits = len(files), common_depth(files)
    path.parent.mkdir(parents=True, exist_ok=True)
    chunks = [range(start, min(start + CHUNK, count)) for start in range(0, count, CHUNK)]
    part, places = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part"), list[int]()
    try:
        with part.open("wb") as file, ThreadPoolExecutor() as pool, warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
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
