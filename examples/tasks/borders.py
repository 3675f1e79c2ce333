"""Prompted models for a paper's numbers of images, and those with pixels as prompts."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

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


class BorderedModel(PiecewiseModel, ConvolutionalModel):
    """Border of learnable pixels and a linear head on a frozen convolutional network."""
