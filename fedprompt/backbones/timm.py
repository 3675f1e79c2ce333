"""Trunks of timm's vision transformers, with the embedding, blocks and pooling of the model."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fedprompt._checks import check_finite, kind, wrong_type, wrong_value
from fedprompt.backbones._adapted import check_unadapted
from fedprompt.freezing import freeze
from fedprompt.interfaces import Trunk

_WINDOWS = "attention within windows has no tokens that every patch attends to"
_POSITION_TABLE = "its table of relative position biases has no rows for prompts"
_PACKED = "its packed sequences of patches of many images have no fixed position for prompts"
_REFUSED = {  # by the module of timm that defines the model
    "swin_transformer": _WINDOWS,
    "swin_transformer_v2": _WINDOWS,
    "vision_transformer_sam": _WINDOWS,
    "beit": _POSITION_TABLE,
    "vision_transformer_relpos": _POSITION_TABLE,
    "naflexvit": _PACKED,
}
_OTHER = (
    "it is neither, or has a custom forward pass; for convolutional networks there is PadPrompts"
)


def vit_trunk(model: nn.Module, *, attention_mask: Float[Tensor, "seq seq"] | None = None) -> Trunk:
    """Make a frozen trunk from a timm ``VisionTransformer`` or ``Eva``, shared by all clients.

    Embedding and pooling are the model's own code. This includes class and register tokens,
    distillation tokens, pre-norm, fc-norm, attention pooling, dynamic image sizes and rotary
    positions. The model is put into eval mode and its gradients are turned off (:func:`freeze`).
    Its gradient checkpointing (``model.set_grad_checkpointing()``) is respected.

    The trunk is a plain object and not a submodule. ``.to(device)`` of a client module does not
    move it, so move the model first. A deep copy of a client shares the trunk.

    Args:
        model: Model from timm. Its classifier is never run.
        attention_mask: Mask (seq, seq) over class tokens, registers and patches, added to the
            attention scores of every block: 0 to attend, ``-inf`` to mask. Prompts attend to all
            tokens and all tokens attend to them.

    Returns:
        A :class:`Trunk`.

    Raises:
        TypeError: If prompts cannot be inserted into this kind of model. The text gives the
            reason.
        ValueError: If only some parameters of `model` are trained, or adapters such as LoRA's
            are, because they would be frozen silently. If `attention_mask` is not square or
            contains NaN. When used: if the mask does not fit the tokens of an image, or the
            model is no longer frozen or in eval mode.

    Example:
        >>> from timm.models.vision_transformer import VisionTransformer
        >>> model = VisionTransformer(16, 4, embed_dim=8, depth=2, num_heads=2)
        >>> trunk = vit_trunk(model)
        >>> trunk.prefix, trunk.dim, trunk.depth
        (1, 8, 2)
    """
    from timm.models.eva import Eva
    from timm.models.vision_transformer import VisionTransformer

    for family, trunk in ((VisionTransformer, _ViTTrunk), (Eva, _EvaTrunk)):
        # A subclass with another forward pass may do anything between the blocks.
        if isinstance(model, family) and type(model).forward_features is family.forward_features:
            check_unadapted("model", model.named_parameters())
            return trunk(freeze(model), attention_mask)
    module = type(model).__module__.rpartition(".")[2]
    rule = f"be a timm VisionTransformer or Eva ({_REFUSED.get(module, _OTHER)})"
    raise wrong_type("model", rule, type(model).__name__)


@dataclass(frozen=True)
class _Context:
    """Rotary table of the patches, and mask over all tokens except prompts, for each block."""

    rotary: Tensor | None
    mask: Tensor | None

    def with_prompts(
        self, layer_rotary: Tensor | None, prefix: int, num_prompts: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """Add rows for prompts, with the identity rotation and without masking."""
        rotary, mask = layer_rotary, self.mask
        if num_prompts and rotary is not None:
            shape = (*rotary.shape[:-2], num_prompts, rotary.shape[-1] // 2)
            sine, cosine = rotary.new_zeros(shape), rotary.new_ones(shape)
            rotary = torch.cat([torch.cat([sine, cosine], -1), rotary], -2)
        if num_prompts and mask is not None:
            size = len(mask) + num_prompts
            others = torch.cat([torch.arange(prefix), torch.arange(prefix + num_prompts, size)])
            others = others.to(mask.device)
            mask = mask.new_zeros(size, size).index_put((others[:, None], others), mask)
        return rotary, mask


class _TimmTrunk:
    """Base of the trunks of both families."""

    def __init__(self, model: Any, attention_mask: Tensor | None) -> None:
        if attention_mask is not None:
            _check_mask(attention_mask)
        self.model = model
        self.mask = attention_mask
        self.prefix: int = model.num_prefix_tokens
        self.dim: int = model.embed_dim
        self.depth = len(model.blocks)
        # Checked in every forward pass, so stored as flat lists.
        self._all_modules = list(model.modules())
        self._all_parameters = list(model.parameters())

    def __deepcopy__(self, memo: dict[int, Any]) -> "_TimmTrunk":
        return self

    def check_frozen(self) -> None:
        if torch.compiler.is_compiling():
            return
        if any(module.training for module in self._all_modules):
            rule = "stay in eval mode, as freeze(model) left it"
            raise wrong_value("trunk", rule, "a model in train mode")
        if any(parameter.requires_grad for parameter in self._all_parameters):
            rule = "stay frozen, as freeze(model) left it"
            raise wrong_value("trunk", rule, "a model with parameters that require gradients")

    def context(self, tokens: Tensor, rotary: Tensor | None) -> _Context:
        if self.mask is None:
            return _Context(rotary, None)
        if len(self.mask) != tokens.shape[1]:
            rule = f"have shape (seq, seq) for the {tokens.shape[1]} tokens"
            raise wrong_value("attention_mask", rule, tuple(self.mask.shape))
        return _Context(rotary, self.mask.to(tokens))

    def run(self, layer: int, tokens: Tensor, **arguments: Tensor | None) -> Tensor:
        block = self.model.blocks[layer]
        if self.model.grad_checkpointing and tokens.requires_grad:
            output: Tensor = checkpoint(partial(block, **arguments), tokens, use_reentrant=False)
        else:
            output = block(tokens, **arguments)
        return output

    def normalize(self, tokens: Tensor) -> Tensor:
        # One of the two is the identity: timm normalizes either before or after the pooling.
        normalized: Tensor = self.model.fc_norm(self.model.norm(tokens))
        return normalized

    def pool(self, tokens: Tensor) -> Tensor:
        pooled: Tensor = self.model.forward_head(self.model.norm(tokens), pre_logits=True)
        return pooled


class _ViTTrunk(_TimmTrunk):
    def embed(self, images: Tensor) -> tuple[Tensor, _Context]:
        self.check_frozen()
        model = self.model
        tokens = model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(images))))
        return tokens, self.context(tokens, None)

    def block(self, layer: int, tokens: Tensor, context: _Context, num_prompts: int) -> Tensor:
        _, mask = context.with_prompts(None, self.prefix, num_prompts)
        return self.run(layer, tokens, attn_mask=mask)


class _EvaTrunk(_TimmTrunk):
    def embed(self, images: Tensor) -> tuple[Tensor, _Context]:
        self.check_frozen()
        tokens, rotary = self.model._pos_embed(self.model.patch_embed(images))
        return self.model.norm_pre(tokens), self.context(tokens, rotary)

    def block(self, layer: int, tokens: Tensor, context: _Context, num_prompts: int) -> Tensor:
        layer_rotary = context.rotary
        if layer_rotary is not None and getattr(self.model, "rope_mixed", False):
            layer_rotary = layer_rotary[layer]
        rotary, mask = context.with_prompts(layer_rotary, self.prefix, num_prompts)
        return self.run(layer, tokens, rope=rotary, attn_mask=mask)


def _check_mask(mask: Tensor) -> None:
    if not isinstance(mask, Tensor) or not mask.is_floating_point():
        rule = "be a floating-point tensor of shape (seq, seq)"
        raise wrong_type("attention_mask", rule, kind(mask))
    if mask.ndim != 2 or mask.shape[0] != mask.shape[1]:
        raise wrong_value("attention_mask", "have shape (seq, seq)", tuple(mask.shape))
    check_finite("attention_mask", torch.where(mask == -torch.inf, 0.0, mask))
