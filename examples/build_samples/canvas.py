"""Images that fill only a part of a larger canvas, among fragments of other images."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from fedprompt.samples._pixels import Images
from fedprompt.samples.handwritten import inverted, noisy, raw

_SIDE = 32  # of the canvas, in pixels
_SMALLEST = 12  # side of a fragment before it is cut; the largest fills the canvas
_NUM_FRAGMENTS = 10

_Canvases = Float[Tensor, "batch channels side side"]

DOMAINS: dict[str, Callable[[Images, torch.Generator], Images]] = {
    "plain": lambda images, generator: raw(images),
    "inverted": lambda images, generator: inverted(images),
    "noisy": noisy,
}
"""Visual domains of `on_canvases`."""


def on_canvases(
    images: Images,
    generator: torch.Generator,
    *,
    domains: Sequence[str],
    smallest: float,
    largest: float,
) -> tuple[_Canvases, Int[Tensor, " batch"]]:
    """Put each digit at random on a canvas of 32 x 32 pixels, and assign them to domains in turn.

    Clutter is outside of the square of the digit only.

    Args:
        images: Digits in the domain `raw`, in an order that is independent of their labels.
        generator: Generator of places, sizes, clutter and noise.
        domains: Names in ``DOMAINS``.
        smallest: Side of the smallest digit in pixels.
        largest: Side of the largest digit in pixels, at most 32.

    Returns:
        The canvases, and for each the position of its domain in `domains`.
    """
    size = _uniform(images, generator, smallest, largest)
    corner = _uniform(images, generator, 0, (_SIDE - size)[:, None], 2)
    square = _place(torch.ones_like(images[:, :1]), size, corner)
    outside = _clutter(images, generator) * (square == 0)
    canvases = torch.maximum(_place(images, size, corner), outside)
    owner = torch.arange(len(images)) % len(domains)
    for index, name in enumerate(domains):
        canvases[owner == index] = DOMAINS[name](canvases[owner == index], generator)
    return canvases, owner


def _place(
    images: Float[Tensor, "batch channels height width"],
    size: Float[Tensor, " batch"],
    corner: Float[Tensor, "batch 2"],
) -> _Canvases:
    """Scale each image bilinearly to a square on an empty canvas.

    Args:
        images: Images in which 0 is empty.
        size: Sides of the squares, in pixels.
        corner: Top left corners (x, y) of the squares, in pixels. Parts outside the canvas are cut.
    """
    scale = _SIDE / size[:, None]
    offset = scale - 2 * corner / size[:, None] - 1
    affine = torch.cat([torch.diag_embed(scale.expand(-1, 2)), offset[..., None]], -1)
    grid = affine_grid(affine, [len(images), 1, _SIDE, _SIDE], align_corners=False)
    return grid_sample(images, grid, align_corners=False)


def _uniform(
    images: Tensor, generator: torch.Generator, low: float, high: float | Tensor, *shape: int
) -> Tensor:
    """Draw numbers of this shape for each image."""
    drawn = torch.rand(len(images), *shape, generator=generator, device=images.device)
    return low + (high - low) * drawn


def _clutter(
    images: Float[Tensor, "batch channels height width"], generator: torch.Generator
) -> _Canvases:
    """Fill canvases with small fragments of other images of the batch.

    Places, sizes and brightness of the fragments are random.
    """
    canvas = torch.zeros(len(images), images.shape[1], _SIDE, _SIDE, device=images.device)
    pixel = torch.arange(_SIDE, device=images.device) + 0.5
    uniform = partial(_uniform, images, generator)
    for _ in range(_NUM_FRAGMENTS):
        size = uniform(_SMALLEST, _SIDE)
        center = uniform(0, _SIDE, 2)
        seen = uniform(0.2, 0.8, 2)
        reach = uniform(2, 4, 1)
        light = uniform(0.5, 1, 1, 1, 1)
        others = images[torch.randperm(len(images), generator=generator, device=images.device)]
        across, down = ((pixel - center[:, axis, None]).abs() < reach for axis in (0, 1))
        cutting = _place(others, size, center - seen * size[:, None]) * (
            down[:, None, :, None] & across[:, None, None, :]
        )
        canvas = torch.maximum(canvas, light * cutting)
    return canvas
