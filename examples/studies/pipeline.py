"""From stored uint8 images to the inputs of a model, on the device of the model."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor


class Preparation(nn.Module):
    """Module from stored uint8 images to the float32 inputs of a model.

    Floating-point images from 0 to 255, such as means of stored ones, are not rounded, and have
    gradients.

    Images move to the device of the module, are resized to a square and normalized. A gray image is
    repeated in three channels. It has no parameters, and nothing of it is in ``state_dict()``.

    Args:
        size: Side of the inputs in pixels.
        mean: Mean of each channel, for values in [0, 1].
        std: Standard deviation of each channel.
        interpolation: "bicubic" or "bilinear".
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        size: int,
        mean: Sequence[float] = (0.5, 0.5, 0.5),
        std: Sequence[float] = (0.5, 0.5, 0.5),
        interpolation: str = "bicubic",
    ) -> None:
        super().__init__()
        self.size, self.interpolation = size, interpolation
        for name, values in (("mean", mean), ("std", std)):
            self.register_buffer(name, torch.tensor(values).view(-1, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Prepare images (batch, 1 or 3, height, width)."""
        stored, images = images.dtype == torch.uint8, images.to(self.mean.device).float()
        if images.shape[-2:] != (self.size, self.size):
            how: dict[str, Any] = {"mode": self.interpolation, "antialias": True}
            images = F.interpolate(images, (self.size, self.size), **how).clamp(0, 255)
            images = images.round() if stored else images
        return torch.addcmul(-self.mean / self.std, images, 1 / (255 * self.std))


def flipped(images: Tensor, generator: torch.Generator) -> Tensor:
    """Mirror each image with probability 0.5; the generator is on the CPU."""
    chosen = torch.rand(len(images), 1, 1, 1, generator=generator, device="cpu") < 0.5
    return torch.where(chosen.to(images.device), images.flip(-1), images)
