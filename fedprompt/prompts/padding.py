"""Prompts for convolutional networks: a learnable border of pixels."""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn as nn
from jaxtyping import Float
from torch import Tensor

import fedprompt._conversions as convert
import fedprompt._refusals as check
from fedprompt._random_streams import device_of

_IMAGENET_MEAN = (0.485, 0.456, 0.406)
_IMAGENET_STD = (0.229, 0.224, 0.225)


class PadPrompts(nn.Module):
    """Learnable border of pixels around images, for a frozen convolutional network.

    FedHPL uses it with ResNets. Pixels are initialized uniformly in [0, 1], the range of a
    photograph. Every forward pass normalizes them like the data, so images must be normalized
    already.

    Args:
        image_size: Size of the input images in pixels, one number or (height, width).
        padding: Width of the border in pixels, on each of the four sides.
        mean: Mean of the data's normalization, one number for each channel.
        std: Standard deviation of the data's normalization, one number for each channel.
        generator: Generator of the initial values. If None, torch's global generator is used.

    Attributes:
        rows: Parameter (channels, 2 * padding, width + 2 * padding), the rows above and below
            the image, corners included.
        columns: Parameter (channels, height, 2 * padding), the columns left and right of it.

    Raises:
        ValueError: If a size is below 1, `mean` and `std` differ in length, or an entry of
            `std` is not above 0.

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
        mean: Sequence[float] = _IMAGENET_MEAN,
        std: Sequence[float] = _IMAGENET_STD,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        height, width = convert.height_and_width("image_size", image_size)
        check.count("padding", padding)
        for name, numbers in (("mean", mean), ("std", std)):
            check.sequence(name, numbers, "numbers")
        rule = f"have one entry for each of the {len(mean)} channels of `mean`, at least one"
        check.require(len(mean) == len(std) and len(mean), "std", rule, len(std))
        for center, spread in zip(mean, std, strict=True):
            check.number("mean", center)
            check.divisor("std", spread)
        device = device_of(generator)
        draw = partial(torch.rand, generator=generator, device=device)
        self.columns = nn.Parameter(draw(len(mean), height, 2 * padding))
        self.rows = nn.Parameter(draw(len(mean), 2 * padding, width + 2 * padding))
        for name, numbers in (("mean", mean), ("std", std)):
            per_channel = torch.tensor(numbers, device=device)[:, None, None]
            self.register_buffer(name, per_channel, persistent=False)

    def forward(
        self, images: Float[Tensor, "batch channels height width"]
    ) -> Float[Tensor, "batch channels padded_height padded_width"]:
        """Return the images with the border around them."""
        channels, height, twice = self.columns.shape
        expected = (channels, height, self.rows.shape[2] - twice)
        check.number_tensor("images", images, read=True)
        check.shape("images", images, (*images.shape[:1], *expected))
        check.same_device("images", images, self.rows.device, "the prompts' device")
        rows, columns = ((pixels - self.mean) / self.std for pixels in (self.rows, self.columns))
        size = (len(images), -1, -1, -1)
        top, bottom = rows.to(images.dtype).expand(size).chunk(2, 2)
        left, right = columns.to(images.dtype).expand(size).chunk(2, 3)
        return torch.cat([top, torch.cat([left, images, right], 3), bottom], 2)

    def extra_repr(self) -> str:
        """Show the sizes."""
        channels, height, twice = self.columns.shape
        size = (height, self.rows.shape[2] - twice)
        return f"{size}, padding={twice // 2}, channels={channels}"
