"""Frozen networks whose first part runs once: late blocks of a ViT, and convolutional networks.

Inputs of a federation are the positions of images, as floats (batch, 1, 1, 1). Each network looks
up what it needs, which is tokens after its first blocks, or images. So networks of different kinds
share the inputs of one federation, and methods run unchanged.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

import fedprompt as fp
from fedprompt.interfaces import ResumableTrunk
from fedprompt.methods import VitSetting
from fedprompt.methods.models import PromptedModel, Tune


def as_inputs(positions: Tensor) -> Tensor:
    """Return the inputs of a federation for the images at some positions."""
    return positions.float()[:, None, None, None]


def positions_of(inputs: Tensor) -> Tensor:
    """Return the positions behind inputs."""
    return inputs.flatten().long()


@dataclass(eq=False)
class TailTrunk:
    """Last blocks of a frozen ViT over stored tokens, as a trunk whose first block is `start`.

    Attributes:
        whole: Trunk with all blocks.
        tokens: Tokens of all images before block `start`, (images, seq, dim).
        start: First block.
        end: Number of blocks of the network. If it is smaller than that of `whole`, the last norm
            and the pooling follow after block ``end - 1``.
        image_size: Side of the images in pixels.
        with_patches: Whether the features are those of `whole` and the mean of the patches.
        center: Features that are subtracted from all features.
        start_tokens: Mean patch tokens before each block, at which prompts start, or None.
    """

    whole: ResumableTrunk
    tokens: Tensor
    start: int
    end: int
    image_size: int
    with_patches: bool = False
    center: Tensor | None = None
    start_tokens: fp.Weighted | None = None

    def __post_init__(self) -> None:
        self.depth = self.end - self.start
        self.dim, self.prefix = self.whole.dim, self.whole.prefix
        self.patch_size = self.whole.patch_size
        self.num_features = self.whole.num_features + self.with_patches * self.dim

    def __deepcopy__(self, memo: dict[int, Any]) -> "TailTrunk":
        return self

    @property
    def trainable(self) -> nn.Module:
        """Trained parameters of the blocks."""
        return self.whole.trainable

    def tuned(self, tune: Tune) -> "TailTrunk":
        """Return the trunk with a copy of its blocks, whose chosen parameters are in float32."""
        model, parameters = tune(self.whole.model)
        late = set(model.blocks[self.start : self.end].parameters())
        for parameter in parameters:
            parameter.requires_grad_(parameter in late)
        chosen = [parameter for parameter in parameters if parameter in late]
        for parameter in chosen:
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
        # The whole model cannot run: its first blocks have another dtype.
        return replace(self, whole=fp.vit_trunk(model, trainable=chosen, probe=False))

    def embed(self, images: Tensor) -> tuple[Tensor, Any]:
        """Look up the tokens of images."""
        found = self.tokens[positions_of(images)]
        size = (self.image_size, self.image_size)
        return self.whole.resume(found, start=self.start, image_size=size)

    def block(self, layer: int, tokens: Tensor, context: Any, num_prompts: int) -> Tensor:
        """Run block `layer`, counted from `start`; trained parameters stay in float32."""
        mixed = tokens.dtype is torch.bfloat16 and any(True for _ in self.trainable.parameters())
        with torch.autocast(tokens.device.type, torch.bfloat16, mixed):
            found = self.whole.block(self.start + layer, tokens, context, num_prompts)
        return found.to(tokens.dtype)

    def normalize(self, tokens: Tensor) -> Tensor:
        """Apply the last norm."""
        return self.whole.normalize(tokens)

    def pool(self, tokens: Tensor) -> Tensor:
        """Return features minus the center, in float32 at least."""
        pooled = self.whole.pool(tokens)
        if self.with_patches:
            patches = self.whole.normalize(tokens[:, self.prefix :]).mean(1)
            pooled = torch.cat([pooled, patches], 1)
        pooled = pooled.to(torch.promote_types(pooled.dtype, torch.float32))
        return pooled if self.center is None else pooled - self.center

    def adapted(self, public: Tensor) -> "TailTrunk":
        """Return the trunk with the center and the start of prompts of public inputs."""
        plain = replace(self, center=None)
        features = fp.precompute(
            lambda inputs: fp.encode_prompted(plain, inputs).pooled, public, batch_size=64
        )
        means = fp.mean_patch_tokens(plain, public)
        return replace(self, center=features.mean(0), start_tokens=means)


@dataclass(eq=False)
class Convolutional:
    """Convolutional network with what a client trains before it.

    Attributes:
        prepare: Function from inputs of a federation to normalized images.
        num_features: Width of the features.
        prompts: Function that makes what a client trains before the head: prompts, or the network.
        model: Frozen network; without one, the client trains its own in place of prompts.
        center: Features that are subtracted from all features.
    """

    prepare: Callable[[Tensor], Tensor]
    num_features: int
    prompts: Callable[[], nn.Module]
    model: nn.Module = field(default_factory=nn.Identity)
    center: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Convolutional":
        return self

    def features(self, prompts: nn.Module, inputs: Tensor) -> Tensor:
        """Encode the images behind inputs."""
        found = self.model(prompts(self.prepare(inputs)))
        return found if self.center is None else found - self.center

    def adapted(self, public: Tensor) -> "Convolutional":
        """Return the network with the center of public inputs; without a network, as it is."""
        if isinstance(self.model, nn.Identity):
            return self
        features = fp.precompute(
            lambda inputs: replace(self, center=None).features(self.prompts(), inputs),
            public,
            batch_size=32,
        )
        return replace(self, center=features.mean(0))


class ConvolutionalModel(PromptedModel):
    """What a client trains before the head of a convolutional network, and the head.

    Args:
        trunk: Network, with `features(prompts, images)` and the maker of `prompts`.
        num_classes: Number of classes.
        num_features: Width of the features after a learned projection, or None.
    """

    def __init__(self, trunk: Any, num_classes: int, *, num_features: int | None = None) -> None:
        super().__init__(trunk, num_classes, num_features=num_features)
        self.prompts = trunk.prompts()

    def features(self, images: Tensor) -> Tensor:
        """Encode inputs behind what the client trains."""
        return self.projection(self.trunk.features(self.prompts, images))


@dataclass(kw_only=True)
class BorderSetting(VitSetting):
    """Setting whose trunks may be convolutional, with a border of pixels or a trained network."""

    def model_class(self, trunk: Any) -> type[PromptedModel]:
        """Return the class of models with this trunk."""
        return ConvolutionalModel if isinstance(trunk, Convolutional) else PromptedModel


def small_network(width: int = 16) -> nn.Module:
    """Make a network of three convolutions, which a client trains from its first value."""
    layers: list[nn.Module] = []
    for inner, outer in ((3, width), (width, 2 * width), (2 * width, 4 * width)):
        layers += [nn.Conv2d(inner, outer, 3, stride=2, padding=1), nn.GroupNorm(4, outer)]
        layers += [nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
