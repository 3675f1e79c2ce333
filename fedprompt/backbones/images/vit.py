"""Trunks of four libraries by one function, which freezes the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch.nn as nn
from jaxtyping import Float
from torch import Tensor

import fedprompt._refusals as check
from fedprompt.backbones._models import inside, libraries
from fedprompt.backbones.freezing import frozen_except
from fedprompt.backbones.images._frozen import FrozenTrunk, check_mask
from fedprompt.backbones.images._open_clip import open_clip_maker
from fedprompt.backbones.images._timm import timm_maker
from fedprompt.backbones.images._torchvision import torchvision_maker
from fedprompt.backbones.images._transformers import transformers_maker
from fedprompt.interfaces import TrainableTrunk

_MAKERS: dict[str, Callable[[Any], Callable[..., FrozenTrunk] | None]] = {
    "timm": timm_maker,
    "open_clip": open_clip_maker,
    "transformers": transformers_maker,
    "torchvision": torchvision_maker,
}
_WINDOWS = (
    "no trunk can support it, because prompts must be tokens that every patch attends to and "
    "attention within windows has none; use freeze(model) and PadPrompts"
)
_POSITION_TABLE = "its table of relative position biases has no rows for prompts"
_PACKED = "its packed sequences of patches of many images have no fixed position for prompts"
_REASONS = {  # by the beginnings of modules that define models
    _WINDOWS: ("swin_transformer", "modeling_swin", "vision_transformer_sam"),
    _POSITION_TABLE: ("beit", "modeling_beit", "vision_transformer_relpos"),
    _PACKED: ("naflexvit", "modeling_siglip2"),
}
_OTHER_FORWARD_PASS = "its forward pass is not known here"
_WRITE_A_TRUNK = "the how-to page 'Write a trunk' shows how to support it"
_ELSEWHERE = {  # classes of transformers, and the same weights in other libraries
    "Dinov2Backbone": "Dinov2Model of transformers",
    "DINOv3ViTBackbone": "DINOv3ViTModel of transformers",
    "ViTMAE": "timm as vit_base_patch16_224.mae, vit_large_patch16_224.mae and vit_huge",
    "IJepa": "timm as vit_huge_patch14_gap_224.in1k_ijepa",
    "MetaClip2": "open_clip as ViT-H-14-worldwide",
    "Siglip2": "timm and open_clip, as vit_base_patch16_siglip_224.v2_webli and ViT-B-16-SigLIP2",
    "Aimv2": "timm as aimv2_large_patch14_224",
    "InternVL": "timm as vit_intern300m_patch14_448",
}
_NOWHERE = ("AltCLIP", "Blip", "ChineseCLIP", "CLIPSeg", "GroupViT", "MLCD", "Owl", "ViTMSN")
_PAD = "it is convolutional, without tokens; use freeze(model) and PadPrompts"
# Names of the projections in attention layers of timm, torchvision and transformers.
_PROJECTIONS = ("qkv", "qk", "q", "q_proj", "query", "to_qkv", "in_proj_weight")


def vit_trunk(
    model: nn.Module,
    *,
    attention_mask: Float[Tensor, "seq seq"] | None = None,
    trainable: Iterable[nn.Parameter | nn.Module] | None = None,
    probe: bool = True,
) -> TrainableTrunk:
    """Make a frozen trunk from a vision transformer, shared by all clients.

    These models are supported:

    - timm: ``VisionTransformer`` and ``Eva``. Their classifier is never run.
    - open_clip: image towers, ``clip_model.visual``. ``pooled`` is the image feature in the space
      of the texts, without normalization, as of ``clip_model.encode_image``.
    - transformers: ``ViTModel``, ``DeiTModel``, ``Dinov2Model``, ``Dinov2WithRegistersModel`` and
      ``DINOv3ViTModel``, whose feature is the class token; ``CLIPVisionModel`` and
      ``SiglipVisionModel``; ``CLIPModel``, ``SiglipModel`` and ``CLIPVisionModelWithProjection``,
      whose feature is in the space of the texts.
    - torchvision: ``VisionTransformer``, without an attention mask. Its feature is the class token.

    Embedding and pooling are the model's own code. This includes class and register tokens,
    distillation tokens, pre-norm, fc-norm, attention pooling, dynamic image sizes and rotary
    positions. The model is put into eval mode and its gradients are turned off (:func:`freeze`),
    except for a classifier of timm or torchvision: the features do not read it, so you can train
    it as a head. The model's gradient checkpointing is respected. Images are cast to the dtype of
    the embedding. Hooks and replaced methods of a block are respected. Those of the whole model are
    not called, and are an error if they change the features.

    The trunk is a plain object and not a submodule. ``.to(device)`` of a client module does not
    move it, so move the model first. A deep copy of a client shares the trunk.

    Parameters of LoRA, adapters or norms can be trained with the prompts; functions such as
    :func:`fedprompt.tuning.lora` return them with a copy of a model. ``trunk.trainable`` is a
    module that has them under their names in the model, for optimizers, :func:`collect` and
    :func:`load_values`. A deep copy of a client has trained parameters of its own, and shares the
    frozen ones. The model stays in eval mode, so dropout of adapters is off.

    Args:
        model: Model of one of the four libraries.
        attention_mask: Mask (seq, seq) over class tokens, registers and patches, added to the
            attention scores of every block: 0 to attend, ``-inf`` to mask. Prompts attend to all
            tokens and all tokens attend to them.
        trainable: Parameters or modules of `model` to train. If None, all that the features read
            are frozen.
        probe: Whether to compare the trunk with `model` on one image, of which blocks get at most
            16 patches, and to require gradients of prompts at each layer and of `trainable`. It
            takes less than three forward passes, in eval mode, and is repeated when hooks or
            methods of `model` are replaced. Weights that are sharded, offloaded or on the meta
            device are probed at the first use.

    Returns:
        A :class:`~fedprompt.interfaces.TrainableTrunk`.

    Raises:
        TypeError: If prompts cannot be inserted into this kind of model. The text gives the
            reason.
        ValueError: If `model` returns no vector of features for an image, such as one of timm with
            ``global_pool=""``. If only some parameters of `model` are trained, or adapters such as
            LoRA's are and are not in `trainable`, because they would be frozen silently. If
            `trainable` does not belong to `model`, is not read by the features, or is not in
            float32 or float64. If the features of the trunk differ from those of `model`, or a
            layer has no backward pass. If `attention_mask` is not square or contains NaN. When
            used: if images are on another device or have channels or a size that the model does not
            take, the mask does not fit the tokens of an image, or the model is no longer frozen or
            in eval mode.

    Example:
        >>> from timm.models.vision_transformer import VisionTransformer
        >>> model = VisionTransformer(16, 4, embed_dim=8, depth=2, num_heads=2)
        >>> trunk = vit_trunk(model)
        >>> trunk.prefix, trunk.dim, trunk.depth, trunk.num_features, trunk.patch_size
        (1, 8, 2, 8, 4)
    """
    check.flag("probe", probe)
    make = _maker(model)
    if make is None:
        reason = _reason_to_refuse(model)
        rule = "be a vision transformer of timm, open_clip, transformers or torchvision"
        raise check.wrong_type("model", f"{rule} ({reason})", type(model).__name__)
    if attention_mask is not None:
        check_mask(attention_mask)
    with frozen_except(model, trainable) as chosen:
        trunk = make(model, attention_mask)
        trunk.begin(chosen, probe=probe)
    return trunk


def _maker(model: object) -> Callable[[nn.Module, Tensor | None], FrozenTrunk] | None:
    """Return the function that makes a trunk of a frozen model, None if there is none.

    A library is imported only if it defines the model or a base class of it.
    """
    defined_in = libraries(model)
    return next((make(model) for name, make in _MAKERS.items() if name in defined_in), None)


def _reason_to_refuse(model: Any) -> str:
    """Return the reason to refuse a model, and the remedy."""
    if not isinstance(model, nn.Module):
        return "it is not an nn.Module"
    name = type(model).__name__
    if name != "TimmModel" and (wrapped := inside(model, _maker)):
        peft = "get_base_model" in wrapped
        return f"{wrapped}{' and its trained parameters as `trainable=`' * peft}"
    for beginning, place in _ELSEWHERE.items():
        if name.startswith(beginning):
            return f"the same weights are supported in {place}"
    if name.startswith(_NOWHERE):
        return f"its weights are in no library that is supported; {_WRITE_A_TRUNK}"
    timm_model = model.trunk if name == "TimmModel" else model
    module = type(timm_model).__module__.rpartition(".")[2]
    reason = next((text for text, names in _REASONS.items() if module.startswith(names)), None)
    if reason == _WINDOWS:
        return reason
    if reason or _has_attention(model):
        return f"{reason or _OTHER_FORWARD_PASS}; {_WRITE_A_TRUNK}"
    # A single convolution may be the patch embedding.
    num_convolutions = sum(isinstance(module, nn.Conv2d) for module in model.modules())
    return _PAD if num_convolutions > 1 else "it has no attention"


def _has_attention(model: nn.Module) -> bool:
    """Whether patches attend to one another; attention that only pools does not count."""
    return any(
        hasattr(module, name)
        for module in model.modules()
        if "pool" not in type(module).__name__.lower()
        for name in _PROJECTIONS
    )
