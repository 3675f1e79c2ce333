"""Trunks of timm's vision transformers, with the embedding, blocks and pooling of the model."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

import fedprompt._refusals as check
from fedprompt.backbones.images._frozen import Context, FrozenTrunk, Sizes, check_count


def timm_maker(model: object) -> Callable[..., FrozenTrunk] | None:
    """Return the class of trunks for a ``VisionTransformer`` or ``Eva``, None for other models."""
    from timm.models.eva import Eva
    from timm.models.vision_transformer import VisionTransformer

    return _TimmTrunk if isinstance(model, VisionTransformer | Eva) else None


def timm_sizes(model: Any) -> Sizes:
    """Return the sizes of images that the patch embedding of a model takes."""
    patch_embed = model.patch_embed
    image_size = patch_embed.img_size
    if image_size is not None and patch_embed.strict_img_size:
        return Sizes(image_size, None)
    return Sizes(image_size, (1, 1) if patch_embed.dynamic_img_pad else patch_embed.patch_size)


def _grid(embed: Any, image_size: tuple[int, int]) -> tuple[int, int]:
    """Return the rows and columns of the patches of an image, which may overlap."""
    proj = embed.proj
    if isinstance(proj, nn.Conv2d) and proj.stride < proj.kernel_size:
        sides = zip(image_size, proj.kernel_size, proj.stride, strict=True)
        rows, columns = ((side - size) // stride + 1 for side, size, stride in sides)
        return rows, columns
    rows, columns = embed.dynamic_feat_size(image_size)
    return rows, columns


class _TimmTrunk(FrozenTrunk):
    """Trunk of both families, alone or within an image tower of open_clip."""

    def __init__(self, model: Any, attention_mask: Tensor | None, tower: Any = None) -> None:
        self.vit = model
        self.head = None if tower is None else tower.head
        self.blocks = model.blocks
        self.prefix = model.num_prefix_tokens
        self.dim = model.embed_dim
        super().__init__(model if tower is None else tower, attention_mask, model, model.blocks)

    @property
    def patch_size(self) -> int:  # type: ignore[override]  # it can change
        size: int = self.vit.patch_embed.feat_ratio()
        return size

    def sizes(self) -> Sizes:
        return timm_sizes(self.vit)

    def own_features(self, images: Tensor) -> Any:
        vit = self.vit
        own_forward = type(vit).forward.__module__.partition(".")[0] == "timm"
        if self.head is not None or (vit.num_classes == 0 and own_forward):
            return self.model(images)
        return vit.forward_head(vit.forward_features(images), pre_logits=True)

    def embedded(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        # In eval mode, no patch is dropped. Only Eva returns a rotary table, or None.
        found = self.vit._pos_embed(self.vit.patch_embed(images))
        tokens, rotary = found if isinstance(found, tuple) else (found, None)
        return self.vit.norm_pre(tokens), rotary

    def rotary_table(self, tokens: Tensor, image_size: tuple[int, int] | None) -> Tensor | None:
        embed, grid = self.vit.patch_embed, None
        if image_size is not None or not self.vit.dynamic_img_size:
            grid = embed.grid_size if image_size is None else _grid(embed, image_size)
            check_count(tokens, self.prefix, *grid)
        rope = getattr(self.vit, "rope", None)
        if rope is None:
            return None
        rule = "be given, because positions depend on height and width"
        check.require(grid is not None, "image_size", rule, None)
        # Without a shape, timm returns the table of a fixed size.
        fixed = not self.vit.dynamic_img_size and hasattr(rope, "feat_shape")
        table: Tensor = rope.get_embed() if fixed else rope.get_embed(shape=grid)
        return table

    def block(self, layer: int, tokens: Tensor, context: Context, num_prompts: int) -> Tensor:
        given = {"attn_mask": context.mask_with(num_prompts, self.prefix)}
        if (rotary := context.rotary) is not None:
            if getattr(self.vit, "rope_mixed", False):
                rotary = rotary[layer]
            if num_prompts:  # prompts get the identity rotation
                shape = (*rotary.shape[:-2], num_prompts, rotary.shape[-1] // 2)
                identity = torch.cat([rotary.new_zeros(shape), rotary.new_ones(shape)], -1)
                rotary = torch.cat([identity, rotary], -2)
            given["rope"] = rotary
        checkpointing = self.vit.grad_checkpointing
        return self.run(self.blocks[layer], tokens, checkpointing=checkpointing, **given)

    def normalize(self, tokens: Tensor) -> Tensor:
        # One of the two is the identity: timm normalizes either before or after the pooling.
        normalized: Tensor = self.vit.fc_norm(self.vit.norm(tokens))
        return normalized

    def pool(self, tokens: Tensor) -> Tensor:
        # In a tower of open_clip, timm's classifier is part of the projection.
        pooled: Tensor = self.vit.forward_head(self.vit.norm(tokens), pre_logits=self.head is None)
        return pooled if self.head is None else self.head(pooled)
