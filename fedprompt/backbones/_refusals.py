"""Reasons why prompts cannot be inserted into a model, and what to do instead."""

from collections.abc import Callable
from typing import Any

import torch.nn as nn

_WINDOWS = (
    "no trunk can support it, because prompts must be tokens that every patch attends to and "
    "attention within windows has none; use freeze(model) and PadPrompts"
)
_POSITION_TABLE = "its table of relative position biases has no rows for prompts"
_PACKED = "its packed sequences of patches of many images have no fixed position for prompts"
_KNOWN = {  # by the module that defines the model
    "swin_transformer": _WINDOWS,
    "swin_transformer_v2": _WINDOWS,
    "modeling_swin": _WINDOWS,
    "modeling_swinv2": _WINDOWS,
    "vision_transformer_sam": _WINDOWS,
    "beit": _POSITION_TABLE,
    "modeling_beit": _POSITION_TABLE,
    "vision_transformer_relpos": _POSITION_TABLE,
    "naflexvit": _PACKED,
    "modeling_siglip2": _PACKED,
}
_OTHER_FORWARD_PASS = "its forward pass is not known here"
_WRITE_A_TRUNK = "the how-to page 'Write a trunk' shows how to support it"
_PEFT = "it wraps the model; pass model.get_base_model() and its trained parameters as `trainable=`"
_PAD = "it is convolutional, without tokens; use freeze(model) and PadPrompts"
# Names of the projections in attention layers of timm, torchvision and transformers.
_PROJECTIONS = ("qkv", "qk", "q", "q_proj", "query", "to_qkv", "in_proj_weight")


def libraries(model: object) -> set[str]:
    """Return the names of the packages that define the model's class and its base classes."""
    return {base.__module__.partition(".")[0] for base in type(model).__mro__}


def reason_to_refuse(model: Any, is_supported: Callable[[nn.Module], bool]) -> str:
    """Return the reason to refuse a model, and the remedy."""
    if not isinstance(model, nn.Module):
        return "it is not an nn.Module"
    if "peft" in libraries(model) and hasattr(model, "get_base_model"):
        return _PEFT
    inside = [name for name, child in model.named_children() if is_supported(child)]
    if inside and type(model).__name__ != "TimmModel":
        name = inside[0]
        part = f"model.{name}" if name.isidentifier() else f"model.get_submodule({name!r})"
        return f"it contains one; pass {part}"
    timm_model = model.trunk if type(model).__name__ == "TimmModel" else model
    known = _KNOWN.get(type(timm_model).__module__.rpartition(".")[2])
    if known == _WINDOWS:
        return known
    if known or _has_attention(model):
        return f"{known or _OTHER_FORWARD_PASS}; {_WRITE_A_TRUNK}"
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
