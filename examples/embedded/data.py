"""Target data: scikit-learn's 1797 real handwritten digits, in several visual domains.

None of the embedded models was pretrained on handwritten digits.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from sklearn.datasets import load_digits
from torch import Tensor

from embedded.canvas import Canvases, cluttered
from embedded.pixels import enlarge, warp

Images = Float[Tensor, "batch 1 height width"]


class Digits(NamedTuple):
    """Split of the digits into training and test images, with the digits as labels."""

    train_images: Images
    train_labels: Int[Tensor, "batch"]
    test_images: Images
    test_labels: Int[Tensor, "batch"]


def raw(images: Images) -> Images:
    """Return the digits unchanged, upright and white on black like the printed glyphs."""
    return images


def inverted(images: Images) -> Images:
    """Return the negative of the images."""
    return 1 - images


def rotated(images: Images) -> Images:
    """Rotate the images counterclockwise by 90 degrees."""
    return images.rot90(dims=(-2, -1))


def inverted_rotated(images: Images) -> Images:
    """Invert the images and rotate them by 90 degrees, as in the default target domain."""
    return rotated(inverted(images))


def noisy(images: Images, generator: torch.Generator, *, deviation: float = 0.3) -> Images:
    """Add Gaussian noise of the given standard deviation to every pixel."""
    return images + deviation * torch.randn(images.shape, generator=generator, device=images.device)


def digits(
    seed: int, *, num_test: int = 597, domain: Callable[[Images], Images] = inverted_rotated
) -> Digits:
    """Split the 1797 digits at random into training and test images.

    Args:
        seed: Seed of the split. The global random state does not change.
        num_test: Number of test images.
        domain: Function that is applied to all images, for example
            `functools.partial(noisy, generator=generator)`.

    Returns:
        float32 images of 1 x 16 x 16 pixels and int64 labels.

    Example:
        >>> train_images, train_labels, test_images, test_labels = digits(0)
        >>> train_images.shape, test_images.shape
        (torch.Size([1200, 1, 16, 16]), torch.Size([597, 1, 16, 16]))
    """
    images, labels = _all_digits()
    if not 0 < num_test < len(labels):
        raise ValueError(f"`num_test` must lie between 1 and {len(labels) - 1}; got {num_test}.")
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    train, test = order[num_test:], order[:num_test]
    images = domain(images)
    return Digits(images[train], labels[train], images[test], labels[test])


def on_canvases(
    images: Images,
    generator: torch.Generator,
    *,
    domains: Sequence[str],
    smallest: float,
    largest: float,
) -> tuple[Canvases, Int[Tensor, "batch"]]:
    """Put digits on cluttered canvases and assign these to domains in turn.

    Args:
        images: Digits in the domain `raw`, in an order that is independent of their labels.
        generator: Generator of places, sizes, clutter and noise.
        domains: Names in `DOMAINS`.
        smallest: Side of the smallest digit in pixels; a canvas has 32.
        largest: Side of the largest digit in pixels, at most 32.

    Returns:
        The canvases, and the index of the domain of each.
    """
    canvases, _ = cluttered(images, generator, smallest=smallest, largest=largest)
    owner = torch.arange(len(images)) % len(domains)
    for index, name in enumerate(domains):
        canvases[owner == index] = DOMAINS[name](canvases[owner == index], generator)
    return canvases, owner


DOMAINS: dict[str, Callable[[Images, torch.Generator], Images]] = {
    "plain": lambda images, generator: raw(images),
    "inverted": lambda images, generator: inverted(images),
    "noisy": noisy,
}
"""Domains that the captions of the embedded CLIP can name."""


def augment(images: Images, generator: torch.Generator) -> Images:
    """Augment training images of any domain by small random warps."""
    return warp(images, generator, rotation=0.08, scale=0.06, shear=0.06, shift=0.04)


@cache
def _all_digits() -> tuple[Images, Int[Tensor, "batch"]]:
    """Load the digits once, in the order of scikit-learn."""
    bunch = load_digits()
    return enlarge(torch.from_numpy(bunch.images).float()), torch.from_numpy(bunch.target).long()
