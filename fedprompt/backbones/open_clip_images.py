"""open_clip's image towers: the features of an image, and of each of its patches in the same space."""

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from fedprompt._checks import check_images, kind, wrong_type, wrong_value


def image_tokens(
    clip_model: nn.Module, images: Float[Tensor, "batch channels height width"]
) -> tuple[Float[Tensor, "batch dim"], Float[Tensor, "batch patches dim"]]:
    """Encode images with an open_clip image tower, as a whole and patch by patch.

    A patch goes through what the whole image goes through after its last block: norm, pooling and projection, as if it alone were
    pooled. So patches lie in the space of the text features, whatever the tower: a ViT's tokens are projected, a ResNet's attention
    pool answers for every location, and a timm model pools each location by itself.

    Args:
        clip_model: Any open_clip model, in eval mode (:func:`freeze`, which :class:`TextTower` calls); CoCa's attentional pooling excepted.
        images: Normalised as the model expects, on its device.

    Returns:
        The pooled features, those of ``clip_model.encode_image(images)``, and those of the patches, row by row from the top left; neither
        normalised.

    Raises:
        TypeError: If the image tower has no features of patches, with the reason.
        ValueError: If `clip_model` is in train mode.

    Example:
        >>> import open_clip
        >>> clip_model = open_clip.model.CLIP(
        ...     embed_dim=4, vision_cfg=dict(layers=1, width=8, head_width=4, patch_size=8, image_size=16),
        ...     text_cfg=dict(context_length=16, vocab_size=49408, width=8, heads=2, layers=1))
        >>> pooled, patches = image_tokens(freeze(clip_model), torch.zeros(2, 3, 16, 16))
        >>> pooled.shape, patches.shape
        (torch.Size([2, 4]), torch.Size([2, 4, 4]))
    """
    from open_clip.modified_resnet import ModifiedResNet
    from open_clip.timm_model import TimmModel
    from open_clip.transformer import VisionTransformer

    check_images(images)
    visual = getattr(clip_model, "visual", None)
    for family, encode in (
        (VisionTransformer, _vit),
        (ModifiedResNet, _resnet),
        (TimmModel, _timm),
    ):
        if isinstance(visual, family):
            if visual.training:
                raise wrong_value(
                    "clip_model",
                    "be in eval mode, as freeze(clip_model) leaves it",
                    "an image tower in train mode",
                )
            return encode(visual, images)
    got = kind(clip_model) if visual is None else f"one of type {type(visual).__name__}"
    raise wrong_type("clip_model", "have one of open_clip's image towers", got)


def _vit(visual: Any, images: Tensor) -> tuple[Tensor, Tensor]:
    if visual.attn_pool is not None or visual.pool_type not in ("tok", "avg"):
        raise wrong_type(
            "clip_model",
            "pool a class token or patches (the queries of attentional pooling are no patches)",
            "another pooling",
        )
    pooled, patches = visual._pool(visual.transformer(visual._embeds(images)))
    if visual.final_ln_after_pool:
        patches = visual.ln_post(patches)
    return (
        (pooled, patches) if visual.proj is None else (pooled @ visual.proj, patches @ visual.proj)
    )


def _resnet(visual: Any, images: Tensor) -> tuple[Tensor, Tensor]:
    features = visual.stem(images)
    for layer in (visual.layer1, visual.layer2, visual.layer3, visual.layer4):
        features = layer(features)
    pool = visual.attnpool
    tokens = features.flatten(2).mT
    tokens = torch.cat([tokens.mean(1, keepdim=True), tokens], 1)
    tokens = tokens + pool.positional_embedding.to(tokens.dtype)
    # open_clip asks for the first token alone; the others answer the same question for their location.
    query, key, value = (
        layer(tokens).unflatten(-1, (pool.num_heads, -1)).transpose(1, 2)
        for layer in (pool.q_proj, pool.k_proj, pool.v_proj)
    )
    attended = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
    projected: Tensor = pool.c_proj(attended)
    return projected[:, 0], projected[:, 1:]


def _timm(visual: Any, images: Tensor) -> tuple[Tensor, Tensor]:
    trunk = visual.trunk
    if hasattr(visual.head, "pool"):
        raise wrong_type(
            "clip_model",
            "pool inside timm",
            "an image tower with a pooling of its own, made for one size of feature map",
        )
    features = trunk.forward_features(images)
    pooled = visual.head(trunk.forward_head(features))
    if pooled.ndim != 2:
        raise wrong_type(
            "clip_model", "pool its image tokens", f"features of shape {tuple(pooled.shape)}"
        )
    locations = _each_alone(
        features,
        getattr(trunk, "num_prefix_tokens", 0),
        getattr(trunk, "output_fmt", "NCHW") == "NHWC",
    )
    patches = visual.head(trunk.forward_head(locations))
    return pooled, patches.unflatten(0, (images.shape[0], -1))


def _each_alone(features: Tensor, prefix: int, channels_last: bool) -> Tensor:
    """Make a feature map of one location out of every location, (batch * patches, ...), for the model's own head."""
    if features.ndim == 4 and channels_last:
        return features.flatten(0, 2)[:, None, None]
    if features.ndim == 4:
        return features.permute(0, 2, 3, 1).flatten(0, 2)[..., None, None]
    # Class and register tokens stand in front: the head drops them, or takes the first, so each is a copy of the location.
    return features[:, prefix:].flatten(0, 1)[:, None].expand(-1, prefix + 1, -1)
