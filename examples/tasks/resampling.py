"""Crops, flips and resizing of batches of uint8 images, on any device.

Resizing is linear in each direction, so it is two products with matrices, one set for each image.
Random crops and flips are other matrices, and cost nothing more. When an image shrinks, the filter
is widened by the same factor, as in Pillow, so there is no aliasing.
"""

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

ATTEMPTS = 10
RATIOS = (3 / 4, 4 / 3)
"""Smallest and largest ratio of width to height of a random crop, as in torchvision."""


class Boxes(NamedTuple):
    """Crops of a batch of images: the first row and column, and the size; each (batch,)."""

    top: Tensor
    left: Tensor
    height: Tensor
    width: Tensor


def triangle(distance: Tensor) -> Tensor:
    """Evaluate the bilinear filter."""
    return (1 - distance.abs()).clamp(min=0)


def cubic(distance: Tensor) -> Tensor:
    """Evaluate the bicubic filter of Pillow, whose parameter is -0.5."""
    x = distance.abs()
    near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    return torch.where(x < 1, near, torch.where(x < 2, far, 0))


FILTERS = {"bilinear": triangle, "bicubic": cubic}


def filter_matrix(
    start: Tensor, length: Tensor, *, source: int, target: int, interpolation: str
) -> Tensor:
    """Make the matrix that resizes a part of each row to `target` pixels.

    Args:
        start: First pixel of the part, (batch,).
        length: Number of its pixels, (batch,).
        source: Number of pixels of a row.
        target: Number of pixels of the result.
        interpolation: Name in `FILTERS`.

    Returns:
        Matrices (batch, target, source). Each of their rows has the sum 1 and is 0 outside the
        part.
    """
    start, length = (each[:, None, None].float() for each in (start, length))
    scale = length / target
    pixels = torch.arange(source, device=start.device) + 0.5
    centers = start + scale * (torch.arange(target, device=start.device)[:, None] + 0.5)
    weights = FILTERS[interpolation]((pixels - centers) / scale.clamp(min=1))
    weights = weights * ((pixels > start) & (pixels < start + length))
    return weights / weights.sum(-1, keepdim=True)


def resample(
    images: Tensor,
    boxes: Boxes,
    *,
    size: int,
    interpolation: str = "bicubic",
    flipped: Tensor | None = None,
) -> Tensor:
    """Crop every image by its own box, and resize the crop.

    Args:
        images: Images (batch, channels, height, width), uint8.
        boxes: Crops on the device of `images`, one for each image or one for all.
        size: Side of the results in pixels.
        interpolation: "bicubic" or "bilinear".
        flipped: Whether each image is mirrored, (batch,).

    Returns:
        Images (batch, channels, size, size), uint8. They are rounded, and cut off at 0 and 255,
        once at the end. Pillow does so after each direction.
    """
    make = partial(filter_matrix, target=size, interpolation=interpolation)
    rows = make(boxes.top, boxes.height, source=images.shape[-2])
    columns = make(boxes.left, boxes.width, source=images.shape[-1])
    if flipped is not None:
        columns = torch.where(flipped[:, None, None], columns.flip(1), columns)
    with torch.autocast(images.device.type, enabled=False):
        resized = rows[:, None] @ images.float() @ columns[:, None].mT
    return resized.round_().clamp_(0, 255).byte()


def whole(images: Tensor) -> Boxes:
    """Return the box of all pixels, one for all images."""
    zero = torch.zeros(1, device=images.device)
    return Boxes(zero, zero, zero + images.shape[-2], zero + images.shape[-1])


def random_boxes(
    batch: int, height: int, width: int, *, smallest: float, generator: torch.Generator
) -> Boxes:
    """Draw crops as in torchvision's ``RandomResizedCrop``.

    The share of the image is uniform, and the ratio of the sides is log-uniform in `RATIOS`. A crop
    that does not fit is drawn again, ten times at most. Then it is the largest crop in the middle
    whose ratio is allowed.

    Args:
        batch: Number of crops.
        height: Height of the images in pixels.
        width: Width of the images in pixels.
        smallest: Smallest share of the image, above 0 and at most 1.
        generator: Generator on the CPU, so that crops do not depend on the device of the images.
    """
    share, ratio, down, right = torch.rand(4, batch, ATTEMPTS, generator=generator, device="cpu")
    area = height * width * (smallest + share * (1 - smallest))
    low, high = (math.log(each) for each in RATIOS)
    ratio = (low + ratio * (high - low)).exp()
    widths, heights = (area * ratio).sqrt().round(), (area / ratio).sqrt().round()
    fits = (widths > 0) & (widths <= width) & (heights > 0) & (heights <= height)
    chosen = fits.int().argmax(1, keepdim=True)
    found = fits.any(1)
    widths, heights, down, right = (
        each.gather(1, chosen)[:, 0] for each in (widths, heights, down, right)
    )
    last_width = min(width, round(height * RATIOS[1]))
    last_height = min(height, round(width / RATIOS[0]))
    widths = torch.where(found, widths, last_width)
    heights = torch.where(found, heights, last_height)
    top = torch.where(found, (down * (height - heights + 1)).floor(), (height - last_height) // 2)
    left = torch.where(found, (right * (width - widths + 1)).floor(), (width - last_width) // 2)
    return Boxes(top, left, heights, widths)


def augment(
    images: Tensor,
    generator: torch.Generator,
    *,
    size: int,
    crop: float = 0.08,
    flip: bool = True,
    interpolation: str = "bicubic",
    device: torch.device | str | None = None,
) -> Tensor:
    """Crop, resize and mirror every image at random.

    Args:
        images: Images (batch, channels, height, width), uint8.
        generator: Generator on the CPU.
        size: Side of the results in pixels.
        crop: Smallest share of an image in a random crop. If 1, images are not cropped.
        flip: Whether each image is mirrored with probability 0.5.
        interpolation: "bicubic" or "bilinear".
        device: Device to which the images are moved first. If None, they stay where they are.

    Returns:
        Images (batch, channels, size, size), uint8.
    """
    check_uint8(images)
    if not 0 < crop <= 1:
        raise ValueError(f"`crop` must be above 0 and at most 1; got {crop}.")
    batch, _, height, width = images.shape
    boxes = whole(images)
    if crop < 1:
        boxes = random_boxes(batch, height, width, smallest=crop, generator=generator)
    flipped = torch.rand(batch, generator=generator, device="cpu") < (0.5 if flip else 0)
    images = moved(images, images.device if device is None else device)
    boxes, flipped = Boxes(*(each.to(images.device) for each in boxes)), flipped.to(images.device)
    return resample(images, boxes, size=size, interpolation=interpolation, flipped=flipped)


def moved(images: Tensor, device: torch.device | str) -> Tensor:
    """Move images to a device, without waiting for a GPU that still computes."""
    if torch.device(device).type == "cuda" and images.device.type == "cpu":
        images = images.pin_memory()
    return images.to(device, non_blocking=True)


def check_uint8(images: Tensor) -> None:
    """Require a batch of stored images."""
    if images.dtype != torch.uint8 or images.dim() != 4:
        rule = "be uint8 of shape (batch, channels, height, width)"
        got = f"{images.dtype} of shape {tuple(images.shape)}"
        raise ValueError(f"`images` must {rule}; got {got}.")
