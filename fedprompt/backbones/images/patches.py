"""Features of an image and of its patches, from open_clip's image towers."""

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from einops import rearrange, repeat
from jaxtyping import Float
from torch import Tensor

import fedprompt._refusals as check
from fedprompt.backbones._models import inside
from fedprompt.backbones.images._frozen import ANY_SIZE, fitted
from fedprompt.backbones.images._open_clip import tower_sizes
from fedprompt.backbones.images._timm import timm_sizes


def image_tokens(
    clip_model: nn.Module, images: Float[Tensor, "batch channels height width"]
) -> tuple[Float[Tensor, "batch dim"], Float[Tensor, "batch patches dim"]]:
    """Encode images with an open_clip image tower, as a whole and patch by patch.

    The features of a patch are computed by the steps that follow the last block: norm, pooling
    and projection, applied to that patch alone. So patches are in the space of the text
    features. A ViT projects its tokens, a ResNet's attention pool is evaluated at every
    location, and a timm model pools every location separately.

    Args:
        clip_model: Any open_clip model except CoCa with attentional pooling. It must be in eval
            mode, as :func:`freeze` and :class:`TextTower` leave it.
        images: Images normalized for the model, on its device. They are cast to its dtype.

    Returns:
        The pooled features, equal to ``clip_model.encode_image(images)``, and the features of
        the patches, row by row from the top left. Neither has unit norm.

    Raises:
        TypeError: If the image tower has no features of patches. The text gives the reason.
        ValueError: If `clip_model` is in train mode, or does not take the size of the images.

    Example:
        >>> from fedprompt import samples
        >>> pooled, patches = image_tokens(samples.clip(), torch.zeros(2, 3, 32, 32))
        >>> pooled.shape, patches.shape
        (torch.Size([2, 96]), torch.Size([2, 64, 96]))
    """
    from open_clip.modified_resnet import ModifiedResNet
    from open_clip.timm_model import TimmModel
    from open_clip.transformer import VisionTransformer

    visual = getattr(clip_model, "visual", None)
    families = ((VisionTransformer, _vit), (ModifiedResNet, _resnet), (TimmModel, _timm))
    for family, encode in families:
        if isinstance(visual, family):
            rule = "be in eval mode, as freeze(clip_model) leaves it"
            check.require(not visual.training, "clip_model", rule, "an image tower in train mode")
            check.images(images)
            if images.shape[0]:  # not `len`, which makes it a constant in an export
                return encode(visual, images)
            pooled, patches = encode(visual, images.new_zeros(1, *images.shape[1:]))
            return pooled[:0], patches[:0]  # some towers do not take an empty batch
    if wrapped := inside(clip_model, lambda part: hasattr(part, "visual")):
        raise check.wrong_type("clip_model", f"be the model itself ({wrapped})", "a wrapper")
    got = check.kind(clip_model) if visual is None else f"one of type {type(visual).__name__}"
    raise check.wrong_type("clip_model", "have one of open_clip's image towers", got)


def _vit(visual: Any, images: Tensor) -> tuple[Tensor, Tensor]:
    rule = "pool a class token or patches, not by attention, whose queries are not patches"
    fits = visual.attn_pool is None and visual.pool_type in ("tok", "avg")
    check.require(fits, "clip_model", rule, "another pooling", TypeError)
    images = fitted(images, visual, tower_sizes(visual))
    pooled, patches = visual._pool(visual.transformer(visual._embeds(images)))
    if visual.final_ln_after_pool:
        patches = visual.ln_post(patches)
    if visual.proj is None:
        return pooled, patches
    return pooled @ visual.proj, patches @ visual.proj


def _resnet(visual: Any, images: Tensor) -> tuple[Tensor, Tensor]:
    features = visual.stem(fitted(images, visual, tower_sizes(visual)))
    for layer in (visual.layer1, visual.layer2, visual.layer3, visual.layer4):
        features = layer(features)
    pool = visual.attnpool
    tokens = rearrange(features, "batch dim height width -> batch (height width) dim")
    tokens = torch.cat([tokens.mean(1, keepdim=True), tokens], 1)
    tokens = tokens + pool.positional_embedding.to(tokens.dtype)
    # open_clip uses the query of the first token only, the mean. Here every location has a query.
    by_head = "batch seq (heads dim) -> batch heads seq dim"
    query, key, value = (
        rearrange(layer(tokens), by_head, heads=pool.num_heads)
        for layer in (pool.q_proj, pool.k_proj, pool.v_proj)
    )
    attended = F.scaled_dot_product_attention(query, key, value)
    merged = rearrange(attended, "batch heads seq dim -> batch seq (heads dim)")
    projected: Tensor = pool.c_proj(merged)
    return projected[:, 0], projected[:, 1:]


def _timm(visual: Any, images: Tensor) -> tuple[Tensor, Tensor]:
    from timm.layers.hybrid_embed import HybridEmbed
    from timm.layers.patch_embed import PatchEmbed

    trunk = visual.trunk
    if hasattr(visual.head, "pool"):
        got = "an image tower whose head pools feature maps of one fixed size"
        raise check.wrong_type("clip_model", "pool inside timm", got)
    has_patches = isinstance(getattr(trunk, "patch_embed", None), HybridEmbed | PatchEmbed)
    sizes = timm_sizes(trunk) if has_patches else ANY_SIZE
    features = trunk.forward_features(fitted(images, visual, sizes))
    pooled = visual.head(trunk.forward_head(features))
    got = f"features of shape {tuple(pooled.shape)}"
    check.require(pooled.ndim == 2, "clip_model", "pool its image tokens", got, TypeError)
    num_prefix = getattr(trunk, "num_prefix_tokens", 0)
    channels_last = getattr(trunk, "output_fmt", "NCHW") == "NHWC"
    locations = _single_locations(features, num_prefix, channels_last)
    patches = visual.head(trunk.forward_head(locations))
    return pooled, rearrange(
        patches, "(batch patches) dim -> batch patches dim", batch=images.shape[0]
    )


def _single_locations(features: Tensor, num_prefix: int, channels_last: bool) -> Tensor:
    """Turn every location into a feature map (batch * patches, ...) of that location alone."""
    if features.ndim == 4 and channels_last:
        return rearrange(features, "batch height width dim -> (batch height width) 1 1 dim")
    if features.ndim == 4:
        return rearrange(features, "batch dim height width -> (batch height width) dim 1 1")
    # The model's head drops the class and register tokens, or uses the first. So each of them is a
    # copy of the location.
    locations = features[:, num_prefix:]
    copies = num_prefix + 1
    return repeat(locations, "batch patches dim -> (batch patches) copies dim", copies=copies)
