"""Trunks of torchvision's vision transformers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fedprompt._refusals as check
from fedprompt.backbones.images._frozen import Context, FrozenTrunk, Sizes


def torchvision_maker(model: object) -> Callable[..., FrozenTrunk] | None:
    """Return the class of trunks for a ``VisionTransformer``, None for other models."""
    from torchvision.models import VisionTransformer

    return _TorchvisionTrunk if isinstance(model, VisionTransformer) else None


class _TorchvisionTrunk(FrozenTrunk):
    prefix = 1

    def __init__(self, model: Any, attention_mask: Tensor | None) -> None:
        rule = "be None, because blocks of torchvision take no mask"
        check.require(attention_mask is None, "attention_mask", rule, "a mask")
        self.blocks = model.encoder.layers
        self.dim = model.hidden_dim
        self.patch_size = model.patch_size
        encoder = model.encoder
        super().__init__(model, attention_mask, encoder, encoder.layers, encoder.dropout)

    def own_features(self, images: Tensor) -> Any:
        return self.model(images)

    def outputs(self, pooled: Tensor) -> Tensor:
        logits: Tensor = self.model.heads(pooled)
        return logits

    def embedded(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        patches = self.model._process_input(images)
        first = self.model.class_token.expand(len(images), -1, -1)
        return torch.cat([first, patches], 1) + self.model.encoder.pos_embedding, None

    def sizes(self) -> Sizes:
        return Sizes((self.model.image_size, self.model.image_size), None)

    def block(self, layer: int, tokens: Tensor, context: Context, num_prompts: int) -> Tensor:
        return self.run(self.blocks[layer], tokens, checkpointing=False)

    def normalize(self, tokens: Tensor) -> Tensor:
        normalized: Tensor = self.model.encoder.ln(tokens)
        return normalized
