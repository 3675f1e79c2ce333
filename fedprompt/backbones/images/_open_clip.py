"""Trunks of open_clip's image towers, with features in the space of the texts."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

import fedprompt._conversions as convert
from fedprompt.backbones._blocks import run_block
from fedprompt.backbones.images._frozen import Context, FrozenTrunk, Sizes
from fedprompt.backbones.images._timm import timm_maker


def open_clip_maker(visual: Any) -> Callable[..., FrozenTrunk] | None:
    """Return the function that makes a trunk of an image tower, None for other models."""
    from open_clip.timm_model import TimmModel
    from open_clip.transformer import VisionTransformer

    if isinstance(visual, TimmModel):
        make = timm_maker(visual.trunk)
        if make is None or hasattr(visual.head, "pool"):
            return None
        return lambda tower, mask: make(tower.trunk, mask, tower)
    if not isinstance(visual, VisionTransformer):
        return None
    single = visual.attn_pool is None or visual.attn_pool_contrastive is None
    return _OpenClipTrunk if single and visual.pool_type in ("tok", "avg") else None


def tower_sizes(visual: Any) -> Sizes:
    """Return the one size of images that a tower of open_clip takes."""
    return Sizes(convert.height_and_width("image_size", visual.image_size), None)


class _OpenClipTrunk(FrozenTrunk):
    prefix = 1

    def __init__(self, visual: Any, attention_mask: Tensor | None) -> None:
        self.blocks = visual.transformer.resblocks
        self.dim = visual.conv1.out_channels
        self.patch_size = max(visual.patch_size)
        super().__init__(visual, attention_mask, visual.transformer)

    def own_features(self, images: Tensor) -> Any:
        features = self.model(images)
        return features[0] if self.model.output_tokens else features

    def embedded(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.model._embeds(images), None

    def sizes(self) -> Sizes:
        return tower_sizes(self.model)

    def block(self, layer: int, tokens: Tensor, context: Context, num_prompts: int) -> Tensor:
        mask = context.mask_with(num_prompts, self.prefix)
        checkpointing = self.model.transformer.grad_checkpointing
        block = partial(run_block, self.blocks[layer])
        return self.run(block, tokens, checkpointing=checkpointing, mask=mask)

    def normalize(self, tokens: Tensor) -> Tensor:
        # After attention pooling, the last norm has the width of the features.
        pooling = self.model.attn_pool
        normalized: Tensor = (self.model.ln_post if pooling is None else pooling.ln_k)(tokens)
        return normalized

    def pool(self, tokens: Tensor) -> Tensor:
        pooled: Tensor = self.model._pool(tokens)[0]
        return pooled if self.model.proj is None else pooled @ self.model.proj
