"""Trunks of the vision transformers of Hugging Face transformers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fedprompt._conversions as convert
import fedprompt._refusals as check
from fedprompt.backbones.images._frozen import Context, FrozenTrunk, Sizes, check_count

# Other attention functions ignore a mask of scores.
_WITH_MASKS = ("eager", "sdpa")


def transformers_maker(model: object) -> Callable[..., FrozenTrunk] | None:
    """Return the class of trunks for a model of transformers, None for other models.

    Classes are recognized by name, so transformers is not imported.
    """
    bases = (base for base in type(model).__mro__ if base.__module__.startswith("transformers."))
    base: Any = next(bases, None)
    return _TRUNKS.get(getattr(base, "__name__", ""))


class _TransformersTrunk(FrozenTrunk):
    """Base of the trunks of all families.

    Positions are interpolated by the model for images of another size than the model has.
    """

    prefix = 1
    encoder = "encoder"
    last_norm = "post_layernorm"

    def __init__(self, model: Any, attention_mask: Tensor | None) -> None:
        self.vision = getattr(model, "vision_model", model)
        encoder = getattr(self.vision, self.encoder, self.vision)
        config = self.vision.config
        rule = f"be None, or the model's attention one of {', '.join(_WITH_MASKS)}"
        fits = attention_mask is None or config._attn_implementation in _WITH_MASKS
        check.require(fits, "attention_mask", rule, f"a mask for {config._attn_implementation}")
        self.blocks = encoder.layer if hasattr(encoder, "layer") else encoder.layers
        self.dim = config.hidden_size
        self.prefix += getattr(config, "num_register_tokens", 0)
        super().__init__(model, attention_mask, self.vision, encoder)

    @property
    def patch_size(self) -> int:  # type: ignore[override]  # it can change
        return max(convert.height_and_width("patch_size", self.vision.config.patch_size))

    def embedded(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        other_size = tuple(images.shape[2:]) != self.sizes().image
        return self.vision.embeddings(images, interpolate_pos_encoding=other_size), None

    def sizes(self) -> Sizes:
        config = self.vision.config
        image = convert.height_and_width("image_size", config.image_size)
        return Sizes(image, convert.height_and_width("patch_size", config.patch_size))

    def own_features(self, images: Tensor) -> Any:
        whole = hasattr(self.model, "get_image_features")
        forward = self.model.get_image_features if whole else self.model
        return self.read(forward(images, return_dict=True))

    def read(self, output: Any) -> Any:
        """Return the features among the model's outputs."""
        projected = getattr(output, "image_embeds", None)
        return output.pooler_output if projected is None else projected

    def normalize(self, tokens: Tensor) -> Tensor:
        normalized: Tensor = getattr(self.vision, self.last_norm)(tokens)
        return normalized

    def block(self, layer: int, tokens: Tensor, context: Context, num_prompts: int) -> Tensor:
        block: Any = self.blocks[layer]
        checkpointing = block.gradient_checkpointing
        mask = context.mask_with(num_prompts, self.prefix)
        given: dict[str, Any] = {"attention_mask": None if mask is None else mask[None, None]}
        if context.rotary is not None:  # cosine and sine; tokens in front are not rotated
            given["position_embeddings"] = tuple(context.rotary)
        return self.run(block, tokens, checkpointing=checkpointing, **given)


class _ViTTrunk(_TransformersTrunk):
    """ViT: the class token after the last norm, as its classifier reads it, without the pooler."""

    last_norm = "layernorm"

    def read(self, output: Any) -> Any:
        return output.last_hidden_state[:, 0]


class _DeiTTrunk(_ViTTrunk):
    prefix = 2


class _DinoTrunk(_ViTTrunk):
    """DINOv2, whose positions are always interpolated."""

    def embedded(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.vision.embeddings(images), None


class _Dinov3Trunk(_DinoTrunk):
    """DINOv3, with rotary positions of the patches."""

    encoder = "model"
    last_norm = "norm"

    def embedded(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        tokens, _ = super().embedded(images)
        return tokens, torch.stack(self.vision.rope_embeddings(images)).to(tokens.dtype)

    def rotary_table(self, tokens: Tensor, image_size: tuple[int, int] | None) -> Tensor:
        if image_size is None:
            rule = "be given, because positions depend on height and width"
            raise check.wrong("image_size", rule, None)
        size = convert.height_and_width("patch_size", self.vision.config.patch_size)
        rows, columns = (side // step for side, step in zip(image_size, size, strict=True))
        check_count(tokens, self.prefix, rows, columns)
        return torch.stack(self.vision.rope_embeddings(tokens.new_empty(1, 1, *image_size)))


class _ClipTrunk(_TransformersTrunk):
    """CLIP: the class token, projected if the model has a projection."""

    def embedded(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        tokens, rotary = super().embedded(images)
        return self.vision.pre_layrnorm(tokens), rotary

    def pool(self, tokens: Tensor) -> Tensor:
        pooled = self.normalize(tokens[:, 0])
        projection = getattr(self.model, "visual_projection", None)
        return pooled if projection is None else projection(pooled)


class _SiglipTrunk(_TransformersTrunk):
    """SigLIP: attention pooling, or the mean of the patches if the model has no head."""

    prefix = 0

    def pool(self, tokens: Tensor) -> Tensor:
        normalized = self.normalize(tokens)
        return self.vision.head(normalized) if self.vision.use_head else normalized.mean(1)

    def read(self, output: Any) -> Any:
        return output.pooler_output if self.vision.use_head else output.last_hidden_state.mean(1)


_TRUNKS: dict[str, Callable[..., FrozenTrunk]] = {
    "ViTModel": _ViTTrunk,
    "DeiTModel": _DeiTTrunk,
    "Dinov2Model": _DinoTrunk,
    "Dinov2WithRegistersModel": _DinoTrunk,
    "DINOv3ViTModel": _Dinov3Trunk,
    "CLIPVisionModel": _ClipTrunk,
    "CLIPVisionModelWithProjection": _ClipTrunk,
    "CLIPModel": _ClipTrunk,
    "SiglipVisionModel": _SiglipTrunk,
    "SiglipModel": _SiglipTrunk,
}
