"""Prompts for convolutional networks: a learnable border of pixels."""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn as nn
from jaxtyping import Float
from torch import Tensor

from fedprompt._checks import (
    check_count,
    check_initial_generator,
    check_number,
    height_and_width,
    kind,
    wrong_type,
    wrong_value,
)

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class PadPrompts(nn.Module):
    """Surround images with learnable pixels, for any frozen convolutional network (FedHPL on ResNets).

    The pixels start as uniform in [0, 1], as those of a photograph, and pass through the data's normalisation at every forward,
    so images are expected to be normalised already.

    Args:
        image_size: Of the images that come in, in pixels: one number or (height, width).
        padding: Pixels on each of the four sides.
        mean: Of the data's normalisation, one number for each channel.
        std: Likewise.
        generator: For the initial values; None uses torch's global one.

    Attributes:
        rows: Parameter (channels, 2 * padding, width + 2 * padding), the rows above and below, corners included.
        columns: Parameter (channels, height, 2 * padding), the columns left and right.

    Raises:
        TypeError: If a size is not an integer or a number not a number.
        ValueError: If a size is below 1 or neither one number nor two, `mean` and `std` differ in length, or a `std` is not above 0.

    Example:
        >>> pad = PadPrompts(32, padding=3)
        >>> pad(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 3, 38, 38])
        >>> pad.columns.numel(), pad.rows.numel()
        (576, 684)

    References:
        Jia et al., "Visual Prompt Tuning", ECCV 2022, App. A; counts as in FedHPL's Table 8.
    """

    columns: nn.Parameter
    rows: nn.Parameter
    mean: Tensor
    std: Tensor

    def __init__(
        self,
        image_size: int | tuple[int, int],
        *,
        padding: int = 3,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        height, width = height_and_width("image_size", image_size)
        check_count("padding", padding)
        if len(mean) != len(std) or not len(mean):
            raise wrong_value(
                "std",
                f"have one entry for each of the {len(mean)} channels of `mean`, at least one",
                len(std),
            )
        for centre, spread in zip(mean, std, strict=True):
            check_number("mean", centre)
            check_number("std", spread, above=0)
        check_initial_generator(generator)
        device = None if generator is None else generator.device
        draw = partial(torch.rand, generator=generator, device=device)
        self.columns = nn.Parameter(draw(len(mean), height, 2 * padding))
        self.rows = nn.Parameter(draw(len(mean), 2 * padding, width + 2 * padding))
        self.register_buffer(
            "mean", torch.tensor(mean, device=device).reshape(-1, 1, 1), persistent=False
        )
        self.register_buffer(
            "std", torch.tensor(std, device=device).reshape(-1, 1, 1), persistent=False
        )

    def forward(
        self, images: Float[Tensor, "batch channels height width"]
    ) -> Float[Tensor, "batch channels padded_height padded_width"]:
        """Return the images with the border around them."""
        channels, height, twice = self.columns.shape
        expected = (channels, height, self.rows.shape[2] - twice)
        if not isinstance(images, Tensor):
            raise wrong_type(
                "images", "be floating-point and normalised", f"a {type(images).__name__}"
            )
        if images.ndim != 4 or images.shape[1:] != expected:
            raise wrong_value(
                "images",
                f"have shape (batch, {', '.join(map(str, expected))})",
                tuple(images.shape),
            )
        if not images.is_floating_point():
            raise wrong_type("images", "be floating-point and normalised", kind(images))
        rows, columns = ((pixels - self.mean) / self.std for pixels in (self.rows, self.columns))
        top, bottom = _halves(rows, images.shape[0], images.dtype, axis=2)
        left, right = _halves(columns, images.shape[0], images.dtype, axis=3)
        return torch.cat([top, torch.cat([left, images, right], 3), bottom], 2)

    def extra_repr(self) -> str:
        """Show the sizes."""
        channels, height, twice = self.columns.shape
        return (
            f"({height}, {self.rows.shape[2] - twice}), padding={twice // 2}, channels={channels}"
        )


def _halves(pixels: Tensor, batch: int, dtype: torch.dtype, *, axis: int) -> tuple[Tensor, ...]:
    return pixels.to(dtype).expand(batch, -1, -1, -1).chunk(2, axis)
