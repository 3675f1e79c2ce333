"""Real handwritten digits, in several visual domains.

None of the networks in this folder was trained on handwritten digits.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

import fedprompt._refusals as check
from fedprompt.samples._pixels import Images, enlarge, warp


class Digits(NamedTuple):
    """Split of the digits into training and test images. The labels are the digits."""

    train_images: Float[Tensor, "train 1 16 16"]
    train_labels: Int[Tensor, " train"]
    test_images: Float[Tensor, "test 1 16 16"]
    test_labels: Int[Tensor, " test"]


def raw(images: Images) -> Images:
    """Return the digits unchanged, upright and white on black like the printed characters.

    Args:
        images: Images in [0, 1].

    Returns:
        The same images.

    Example:
        >>> samples.raw(torch.tensor([[[[0.25, 1.0]]]])).flatten().tolist()
        [0.25, 1.0]
    """
    return images


def inverted(images: Images) -> Images:
    """Invert the images: black digits on white.

    Args:
        images: Images in [0, 1].

    Returns:
        New images in [0, 1].

    Example:
        >>> samples.inverted(torch.tensor([[[[0.25, 1.0]]]])).flatten().tolist()
        [0.75, 0.0]
    """
    return 1 - images


def rotated(images: Images) -> Float[Tensor, "batch 1 width height"]:
    """Rotate the images counterclockwise by 90 degrees.

    Args:
        images: Images of any values.

    Returns:
        New images.

    Example:
        >>> samples.rotated(torch.tensor([[[[0.25, 1.0]]]])).shape
        torch.Size([1, 1, 2, 1])
    """
    return images.rot90(dims=(-2, -1))


def inverted_rotated(images: Images) -> Float[Tensor, "batch 1 width height"]:
    """Invert the images and rotate them by 90 degrees, which is hard for the frozen networks.

    Args:
        images: Images in [0, 1].

    Returns:
        New images in [0, 1].

    Example:
        >>> samples.inverted_rotated(torch.tensor([[[[0.25, 1.0]]]])).flatten().tolist()
        [0.0, 0.75]
    """
    return rotated(inverted(images))


def noisy(images: Images, generator: torch.Generator, *, deviation: float = 0.3) -> Images:
    """Add Gaussian noise to every pixel.

    Args:
        images: Images of any values.
        generator: Generator on the device of `images`.
        deviation: Standard deviation of the noise.

    Returns:
        New images.

    Example:
        >>> images = samples.noisy(torch.zeros(2, 1, 16, 16), torch.Generator().manual_seed(0))
        >>> 0.2 < images.std().item() < 0.4
        True
    """
    return images + deviation * torch.randn(images.shape, generator=generator, device=images.device)


def augment(images: Images, generator: torch.Generator) -> Images:
    """Augment training images of any domain by small random warps.

    Args:
        images: Images of any values.
        generator: Generator on the device of `images`.

    Returns:
        New images in the same order.

    Example:
        >>> images = samples.digits().train_images[:4]
        >>> samples.augment(images, torch.Generator().manual_seed(0)).shape
        torch.Size([4, 1, 16, 16])
    """
    return warp(images, generator, rotation=0.08, scale=0.06, shear=0.06, shift=0.04)


def digits(
    seed: int = 0, *, num_test: int = 597, domain: Callable[[Tensor], Tensor] | None = None
) -> "Digits":
    """Split 1,797 real handwritten digits at random into training and test images.

    The images have 1 x 16 x 16 pixels in [0, 1]. They are the test set of "Optical Recognition of
    Handwritten Digits" at the UCI Machine Learning Repository, licensed under CC BY 4.0.

    Args:
        seed: Seed of the split, at least 0. The global random state does not change.
        num_test: Number of test images, from 1 to 1,796.
        domain: Function that is applied to all images, such as :func:`inverted` or
            ``partial(noisy, generator=generator)``. If None, images are :func:`raw`.

    Returns:
        float32 images and int64 labels.

    Example:
        >>> train_images, train_labels, test_images, test_labels = samples.digits()
        >>> train_images.shape, test_images.shape
        (torch.Size([1200, 1, 16, 16]), torch.Size([597, 1, 16, 16]))

    References:
        Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning
        Repository, 1998, https://doi.org/10.24432/C50P49.
    """
    check.count("seed", seed, at_least=0)
    check.count("num_test", num_test)
    rule = "be a function of images, such as samples.inverted"
    check.optional(check.function, "domain", domain, rule)
    images, labels = _all_digits()
    rule = f"be less than all {len(labels)} digits"
    check.require(num_test < len(labels), "num_test", rule, num_test)
    draw = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(labels), generator=draw, device="cpu")
    train, test = order[num_test:], order[:num_test]
    if domain is not None:
        images = domain(images.clone())  # which may be in place
    return Digits(images[train], labels[train], images[test], labels[test])


@cache
def _all_digits() -> tuple[Images, Int[Tensor, " batch"]]:
    """Read the digits once, in the order of scikit-learn."""
    with np.load(Path(__file__).parent / "digits.npz") as file:
        images, labels = (torch.from_numpy(file[name]) for name in ("images", "labels"))
    return enlarge(images.float()), labels.long()
