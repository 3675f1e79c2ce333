"""Preparation of images that are averages of stored ones, with gradients."""

import torch
import torch.nn as nn
from torch import Tensor

from studies.pipeline import Preparation
from studies.resampling import filter_matrix, whole


class FloatPreparation(nn.Module):
    """Preparation that also takes floating-point images from 0 to 255, and has their gradients.

    Args:
        prepare: Preparation of stored images.
    """

    def __init__(self, prepare: Preparation) -> None:
        super().__init__()
        self.prepare = prepare

    def forward(self, images: Tensor) -> Tensor:
        """Prepare images (batch, 3, height, width); floating-point values are not rounded."""
        if not images.is_floating_point():
            return self.prepare(images)
        size, boxes = self.prepare.size, whole(images)
        if images.shape[-2:] != (size, size):
            how = {"target": size, "interpolation": self.prepare.interpolation}
            rows = filter_matrix(boxes.top, boxes.height, source=images.shape[-2], **how)
            columns = filter_matrix(boxes.left, boxes.width, source=images.shape[-1], **how)
            images = (rows[:, None] @ images @ columns[:, None].mT).clamp(0, 255)
        mean, std = self.prepare.mean, self.prepare.std
        return torch.addcmul(-mean / std, images, 1 / (255 * std))
