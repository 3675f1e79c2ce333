"""Frozen convolutional networks whose prompts are pixels around the images."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn as nn
from torch import Tensor

import fedprompt as fp
from methods.federation import PromptedModel


@dataclass(frozen=True)
class PixelTrunk:
    """Frozen convolutional network with the border around its images.

    Attributes:
        network: Frozen network from normalized images to features.
        num_features: Width of the features.
        prepare: Function from stored to normalized images.
        border: Maker of the border.
    """

    network: nn.Module
    num_features: int
    prepare: Callable[[Tensor], Tensor]
    border: Callable[[], fp.PadPrompts]

    def __deepcopy__(self, memo: dict[int, Any]) -> "PixelTrunk":
        return self


class BorderedModel(PromptedModel):
    """Border of learnable pixels and a linear head on a frozen convolutional network."""

    trunk: Any

    def features(self, images: Tensor, *streams: fp.PromptStream) -> Tensor:
        """Encode images in their border; streams of prompts are not possible."""
        if streams:
            raise ValueError("`streams` must be empty for convolutional networks.")
        if self.prompts is None:
            raise ValueError("`prompts` must be a border of pixels; got None.")
        return self.projection(self.trunk.network(self.prompts(self.trunk.prepare(images))))
