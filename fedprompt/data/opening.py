"""The door to image files: formats that are allowed by content, and the memory of all threads.

No program is started by a file, and no image is larger than a bound. Images of all threads
together are at most as large as one image may be, so memory does not grow with the cores.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from threading import Condition
from typing import BinaryIO, TypeVar

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageFile, ImageOps

from fedprompt.data.wording import named

PLUGINS = ("Jpeg", "Png", "WebP", "Bmp", "Tiff", "Gif", "Ppm")
"""Formats of Pillow that read a file by themselves. EPS, for example, starts a program."""
MAX_PIXELS = 180_000_000
"""Largest image, about as in Pillow, and sum of all that are open at a time: 720 MB."""
BITS = (8, 10, 12, 14, 16)
"""Bit depths of gray images."""
DEEP = {".png", ".tif", ".tiff", ".pgm"}
"""Extensions of images that can have more than 8 bits."""

T = TypeVar("T")

for plugin in PLUGINS:
    import_module(f"PIL.{plugin}ImagePlugin")

# Blocks of 16 MB, as Pillow allocates them, stay with the thread that freed them.
Image.core.set_block_size(2**26)  # type: ignore[attr-defined]
_open = 0
_changed = Condition()


@contextmanager
def _memory(pixels: int, most: int) -> Iterator[None]:
    """Wait until images of other threads leave room for some pixels."""
    global _open
    with _changed:
        _changed.wait_for(lambda: not _open or _open + pixels <= most)
        _open += pixels
    try:
        yield
    finally:
        with _changed:
            _open -= pixels
            _changed.notify_all()


def opened(
    path: str | os.PathLike[str],
    *,
    bits: int | None = None,
    max_pixels: int = MAX_PIXELS,
    then: Callable[[Image.Image], T] = lambda image: image,  # type: ignore[assignment, return-value]
) -> T:
    """Open an image in RGB with 8 bits, upright as its EXIF orientation says.

    Gray levels above 255 are scaled by their bit depth, and floats from [0, 1]. As in torchvision,
    transparency is ignored.

    Args:
        path: Image file. Its content decides the format, whatever its extension is.
        bits: Bit depth of gray images with levels above 255. If None, it is the smallest of 10, 12,
            14 and 16 that has the largest level of the image.
        max_pixels: Largest number of pixels of an image, and of those that all threads have open.
        then: Function of the image, such as a resize. The memory of the image counts until then.

    Returns:
        Result of `then`, or the image.

    Raises:
        OSError: If the file is damaged, too large, of another format, or has values of unknown
            range. The message has the path.
    """
    try:
        with Path(path).open("rb") as file, _image(file, max_pixels) as image:
            width, height = image.size
            with _memory(width * height, max_pixels):
                return then(_upright(image, bits))
    except MemoryError:
        raise
    except Exception as error:  # decoders raise errors of many types
        text = str(error).rstrip(".") or type(error).__name__
        raise OSError(f"{named(path)} cannot be read as an image: {text}.") from error


def _image(file: BinaryIO, max_pixels: int) -> ImageFile.ImageFile:
    """Read the head of an image.

    Raises:
        ValueError: If its content is of no format of the list, or it has too many pixels.
    """
    start = file.read(16)
    file.seek(0)
    for name in map(str.upper, PLUGINS):
        make, accepts = Image.OPEN[name]
        if accepts is not None and accepts(start) is True:
            image = make(file, file.name)
            pixels = image.width * image.height
            if pixels > max_pixels:
                got = f"{image.width} x {image.height} (`max_pixels` allows more)"
                raise ValueError(f"it must have at most {max_pixels:,} pixels; got {got}")
            return image
    raise ValueError(f"its content must be {', '.join(map(str.upper, PLUGINS))}; got another one")


def _upright(file: ImageFile.ImageFile, bits: int | None) -> Image.Image:
    """Decode an image, turn it, and convert it to RGB, without a copy that is not needed."""
    halved = ";16" in str(file.tile) and not file.mode.startswith("I")
    image: Image.Image = file
    ImageOps.exif_transpose(image, in_place=True)
    if image.mode == "F" or image.mode.startswith("I"):
        image = Image.fromarray(eight_bits(np.asarray(image), bits))
    elif image.mode == "P":  # its transparency may be bytes, which RGB does not take
        image = image.convert("RGBA")
    found = image if image.mode == "RGB" else image.convert("RGB")
    if halved and np.asarray(found).max() < 64:
        raise ValueError("it has colors of less than 16 bits in 16 bits; save it with 8 bits")
    return found


def eight_bits(levels: np.ndarray, bits: int | None) -> UInt8[np.ndarray, "height width"]:
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
    scaled = levels.astype(np.int32)
    scaled *= 255
    scaled //= 2 ** (bits or depth(int(high))) - 1
    return scaled.clip(max=255, out=scaled).astype(np.uint8)


def depth(level: int) -> int:
    """Return the smallest bit depth that has a gray level."""
    return next(bits for bits in BITS if level < 2**bits)


def common_depth(paths: Iterable[Path], *, max_pixels: int = MAX_PIXELS) -> int:
    """Return the bit depth of gray images with levels above 255: that of the highest level."""

    def highest(path: Path) -> int:
        # A damaged file is refused when it is read.
        with suppress(Exception), path.open("rb") as file, _image(file, max_pixels) as image:
            if image.mode.startswith("I"):
                with _memory(image.width * image.height, max_pixels):
                    return int(np.asarray(image).max())
        return 0

    with ThreadPoolExecutor() as pool:
        levels = pool.map(highest, [path for path in paths if path.suffix.lower() in DEEP])
    return depth(min(max(levels, default=0), 2**16 - 1))
