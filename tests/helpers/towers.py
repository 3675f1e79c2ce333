"""Small image towers of open_clip and transformers; the page of models is made from these rows."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from unittest.mock import patch

import open_clip
import timm
import torch
import torch.nn as nn
from open_clip.model import _build_vision_tower
from torch import Tensor

from models import perturbed

IMAGE_SIZE = 32
FEATURES = 20


class Tower(NamedTuple):
    """An image tower: how to make it, its own forward pass, its blocks and its last norm."""

    name: str
    library: str
    family: str
    make: Callable[[], nn.Module]
    forward: Callable[[Any, Tensor], Tensor]
    blocks: Callable[[Any], Sequence[nn.Module]]
    norm: Callable[[Any], nn.Module]
    refusal: str | None = None


def build_tower(row: Tower) -> nn.Module:
    """Make a tower in float64 and eval mode; no parameter keeps a value of zero or one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return perturbed(row.make())


def tower_images(batch: int = 2, *, seed: int = 1) -> Tensor:
    """Draw images of the size of all towers."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, 3, IMAGE_SIZE, IMAGE_SIZE)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


# --- open_clip

VIT = {"layers": 3, "width": 48, "head_width": 16, "image_size": IMAGE_SIZE, "patch_size": 8}
POOLER = {"attn_pooler_heads": 2, "attn_pooler_queries": 4}
TIMM = {"depth": 3, "embed_dim": 48, "num_heads": 3, "img_size": IMAGE_SIZE}


def _clip_visual(name: str, **changes: object) -> nn.Module:
    """Build the image tower of an open_clip configuration with three blocks of width 48."""
    config = open_clip.get_model_config(name)
    vision = config["vision_cfg"] | VIT | changes
    quick_gelu = config.get("quick_gelu", False)
    return _build_vision_tower(FEATURES, vision, quick_gelu)


def _timm_visual(name: str, sizes: Mapping[str, object]) -> nn.Module:
    """Build an open_clip tower that wraps timm, with other sizes of the timm model."""
    create = timm.create_model
    vision = open_clip.get_model_config(name)["vision_cfg"] | {"image_size": IMAGE_SIZE}
    with patch("timm.create_model", lambda *args, **given: create(*args, **given | sizes)):
        return _build_vision_tower(FEATURES, vision, False)


def _first(features: Any) -> Tensor:
    """Drop the tokens that CoCa returns next to the feature."""
    return features[0] if isinstance(features, tuple) else features


def _visual(name: str, family: str, **changes: object) -> Tower:
    return Tower(
        name,
        "open_clip",
        family,
        lambda: _clip_visual(name, **changes),
        lambda model, images: _first(model(images)),
        lambda model: model.transformer.resblocks,
        lambda model: model.ln_post if model.attn_pool is None else model.attn_pool.ln_k,
    )


def _wrapped(name: str, family: str, sizes: Mapping[str, object] = TIMM) -> Tower:
    return Tower(
        name,
        "open_clip",
        family,
        lambda: _timm_visual(name, sizes),
        lambda model, images: model(images),
        lambda model: model.trunk.blocks,
        lambda model: (
            model.trunk.norm
            if isinstance(model.trunk.fc_norm, nn.Identity)
            else model.trunk.fc_norm
        ),
    )


SMALLER_PATCHES = {**TIMM, "patch_size": 8}
# A convolutional stem fixes the width.
SHALLOWER = {"depth": 2, "img_size": IMAGE_SIZE, "mlp_ratio": 0.25}

OPEN_CLIP = (
    _visual("ViT-B-16", "CLIP"),
    _visual("ViT-L-14-quickgelu", "CLIP, QuickGELU", patch_dropout=0.5),
    _visual("ViT-M-16-alt", "CLIP, layer scale"),
    _visual("ViT-H-14-CLIPA", "CLIPA, mean of the patches"),
    _visual("coca_ViT-B-32", "CoCa, attention pooling", **POOLER),
    _wrapped("ViT-B-16-SigLIP", "SigLIP", SMALLER_PATCHES),
    _wrapped("ViT-B-16-SigLIP2", "SigLIP 2", SMALLER_PATCHES),
    _wrapped("PE-Core-B-16", "Perception Encoder", SMALLER_PATCHES),
    _wrapped("EVA01-g-14", "EVA-CLIP", SMALLER_PATCHES),
    _wrapped("EVA02-B-16", "EVA-02-CLIP", SMALLER_PATCHES),
    _wrapped("MobileCLIP-B", "MobileCLIP", SHALLOWER),
    _wrapped("MobileCLIP2-L-14", "MobileCLIP 2", SMALLER_PATCHES),
    _wrapped("ViTamin-S", "ViTamin", SHALLOWER),
    _wrapped("vit_medium_patch16_gap_256", "ViT, mean of the patches", SMALLER_PATCHES),
)

# --- transformers

SIZES = {
    "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 96,
    "image_size": IMAGE_SIZE, "patch_size": 8,
}  # fmt: skip
TEXT = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
    "vocab_size": 32, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


def _make(name: str, config: str, **sizes: object) -> nn.Module:
    """Make a model of transformers from a configuration, without a download."""
    import transformers

    return getattr(transformers, name)(getattr(transformers, config)(**sizes))


def _vision(
    name: str, config: str, family: str, forward: Callable[[Any, Tensor], Tensor], **changes: object
) -> Tower:
    def vision(model: Any) -> Any:
        return getattr(model, "vision_model", model)

    def blocks(model: Any) -> Sequence[nn.Module]:
        inner = vision(model)
        encoder = getattr(inner, "encoder", getattr(inner, "model", inner))
        return encoder.layer if hasattr(encoder, "layer") else encoder.layers

    def norm(model: Any) -> nn.Module:
        names = ("post_layernorm", "layernorm", "norm")
        return next(getattr(vision(model), name) for name in names if hasattr(vision(model), name))

    both = {"vision_config": SIZES, "text_config": TEXT}
    sizes = both if name in ("CLIPModel", "SiglipModel") else SIZES
    make = lambda: _make(name, config, **sizes | changes)  # noqa: E731
    return Tower(name, "transformers", family, make, forward, blocks, norm)


TRANSFORMERS = (
    _vision("ViTModel", "ViTConfig", "ViT", lambda m, x: m(x).last_hidden_state[:, 0]),
    _vision("Dinov2Model", "Dinov2Config", "DINOv2", lambda m, x: m(x).pooler_output),
    _vision(
        "Dinov2WithRegistersModel",
        "Dinov2WithRegistersConfig",
        "DINOv2, registers",
        lambda m, x: m(x).pooler_output,
    ),
    _vision("DeiTModel", "DeiTConfig", "DeiT", lambda m, x: m(x).last_hidden_state[:, 0]),
    _vision("DINOv3ViTModel", "DINOv3ViTConfig", "DINOv3", lambda m, x: m(x).pooler_output),
    _vision("CLIPVisionModel", "CLIPVisionConfig", "CLIP", lambda m, x: m(x).pooler_output),
    _vision(
        "CLIPVisionModelWithProjection",
        "CLIPVisionConfig",
        "CLIP, projected",
        lambda m, x: m(x).image_embeds,
        projection_dim=FEATURES,
    ),
    _vision(
        "CLIPModel",
        "CLIPConfig",
        "CLIP, image and text",
        lambda m, x: m.get_image_features(x).pooler_output,
        projection_dim=FEATURES,
    ),
    _vision("SiglipVisionModel", "SiglipVisionConfig", "SigLIP", lambda m, x: m(x).pooler_output),
    _vision(
        "SiglipModel",
        "SiglipConfig",
        "SigLIP, image and text",
        lambda m, x: m.get_image_features(x).pooler_output,
    ),
)

# SigLIP without attention pooling has no feature of its own; its classifier reads the mean.
HEADLESS = _vision(
    "SiglipVisionModel",
    "SiglipVisionConfig",
    "SigLIP, mean of the patches",
    lambda m, x: m(x).last_hidden_state.mean(1),
    vision_use_head=False,
)

TOWERS = (*OPEN_CLIP, *TRANSFORMERS)


def tower_named(name: str) -> Tower:
    """Find a tower."""
    return next(row for row in TOWERS if row.name == name)
