"""Prompted models for a paper's numbers of images, and those with pixels as prompts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fedprompt as fp
from fedprompt.methods.setting import PromptedModel
from tasks.networks import ConvolutionalModel

PART = 128
"""Maximum number of images in a forward pass; batches must not have more."""


class PiecewiseModel(PromptedModel):
    """Prompted model that encodes many images, such as all of a client, in parts."""

    def features(self, images: Tensor) -> Tensor:
        """Encode images in parts."""
        return in_parts(super().features, images)


def in_parts(encode: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    """Encode images in parts, whose activations are computed again for gradients.

    The backward pass needs the same parameters. Batches are not divided, so methods may replace
    parameters in their steps.
    """
    if len(images) <= PART:
        return encode(images)
    parts = images.split(PART)
    if torch.is_grad_enabled():
        return torch.cat([checkpoint(encode, part, use_reentrant=False) for part in parts])
    return torch.cat([encode(part) for part in parts])


@dataclass(frozen=True)
class PixelTrunk:
    """Frozen convolutional network with the border around its images.

    Attributes:
        network: Frozen network from normalized images to features.
        num_features: Width of the features.
        prepare: Function from stored to normalized images.
        prompts: Maker of the border.
    """

    network: nn.Module
    num_features: int
    prepare: Callable[[Tensor], Tensor]
    prompts: Callable[[], fp.PadPrompts]

    def __deepcopy__(self, memo: dict[int, Any]) -> "PixelTrunk":
        return self

    def features(self, border: nn.Module, images: Tensor) -> Tensor:
        """Encode stored images in their border."""
        return self.network(border(self.prepare(images)))


class BorderedModel(PiecewiseModel, ConvolutionalModel):
    """Border of learnable pixels and a linear head on a frozen convolutional network."""
