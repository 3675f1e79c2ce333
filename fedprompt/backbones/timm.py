"""timm's vision transformers as trunks: embedding, blocks and pooling as the model itself has them."""

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

_REFUSED = {
    "swin_transformer": "attention within windows has no place for tokens that every patch sees",
    "swin_transformer_v2": "attention within windows has no place for tokens that every patch sees",
    "beit": "its table of relative position biases has no rows for prompts",
    "vision_transformer_relpos": "its table of relative position biases has no rows for prompts",
    "naflexvit": "its packed sequences of patches of many images have no fixed place for prompts",
    "vision_transformer_sam": "attention within windows has no place for tokens that every patch sees",
}


def vit_trunk(model: nn.Module, *, attention_mask: Float[Tensor, "seq seq"] | None = None) -> Trunk:
    """Make a frozen trunk of a timm ``VisionTransformer`` or ``Eva``, to be shared by all clients.

    Class token or not, registers, distillation token, pre-norm, fc-norm, attention pooling, dynamic image size, rotary positions: the
    model's own code does all of it. The model is put into eval mode and its gradients are turned off (:func:`freeze`); its gradient
    checkpointing (``model.set_grad_checkpointing()``) is honoured. The trunk is a plain object, so ``.to(device)`` of a client
    module does not reach it: move the model before. A deep copy of a client shares the trunk.

    Args:
        model: The timm model; its classifier is never run.
        attention_mask: Added to the attention of every block, (seq, seq) over class tokens, registers and patches: 0 where a token may
            look, ``-inf`` where not. Prompts see and are seen by everything.

    Returns:
        A :class:`Trunk`.

    Raises:
        TypeError: If prompts cannot be inserted into this kind of model, with the reason.
        ValueError: If some parameters of `model` are trained and others are not, or adapters such as LoRA's are trained: they would be
            frozen silently. If `attention_mask` is not square or holds NaN.
            (when used) If it does not fit the tokens of an image, or the model
            was unfrozen or put back into training.

    Example:
        >>> from timm.models.vision_transformer import VisionTransformer
        >>> trunk = vit_trunk(VisionTransformer(img_size=16, patch_size=4, num_classes=0, embed_dim=8, depth=2, num_heads=2))
        >>> trunk.prefix, trunk.dim, trunk.depth
        (1, 8, 2)
    """
    from timm.models.eva import Eva
    from timm.models.vision_transformer import VisionTransformer

    for family, trunk in ((VisionTransformer, _ViTTrunk), (Eva, _EvaTrunk)):
        # A subclass with a forward of its own may do anything between the blocks.
        if isinstance(model, family) and type(model).forward_features is family.forward_features:
            check_unadapted("model", model.named_parameters())
            return trunk(freeze(model), attention_mask)
    room = type(model).__module__.rpartition(".")[2]
    reason = _REFUSED.get(
        room,
        "it is neither, or has a forward pass of its own; for convolutional networks there is PadPrompts",
    )
    raise wrong_type(
        "model", f"be a timm VisionTransformer or Eva ({reason})", type(model).__name__
    )


@dataclass(frozen=True)
class _Context:
    """What each block gets beside the tokens: a rotary table of the patches and a mask over all tokens but prompts."""

    rotary: Tensor | None
    mask: Tensor | None

    def with_prompts(
        self, layer_rotary: Tensor | None, prefix: int, num_prompts: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """Add rows for prompts: the identity rotation, and nothing masked."""
        rotary, mask = layer_rotary, self.mask
        if num_prompts and rotary is not None:
            half = rotary.shape[-1] // 2
            shape = (*rotary.shape[:-2], num_prompts, half)
            rotary = torch.cat(
                [torch.cat([rotary.new_zeros(shape), rotary.new_ones(shape)], -1), rotary], -2
            )
        if num_prompts and mask is not None:
            size = len(mask) + num_prompts
            old = torch.cat([torch.arange(prefix), torch.arange(prefix + num_prompts, size)]).to(
                mask.device
            )
            mask = mask.new_zeros(size, size).index_put((old[:, None], old), mask)
        return rotary, mask


class _TimmTrunk:
    """What both families share."""

    def __init__(self, model: Any, attention_mask: Tensor | None) -> None:
        if attention_mask is not None:
            _check_mask(attention_mask)
        self.model = model
        self.mask = attention_mask
        self.prefix: int = model.num_prefix_tokens
        self.dim: int = model.embed_dim
        self.depth = len(model.blocks)
        # Looked through at every pass, so kept as flat lists.
        self._all_modules = list(model.modules())
        self._all_parameters = list(model.parameters())

    def __deepcopy__(self, memo: dict[int, Any]) -> "_TimmTrunk":
        return self

    def check_frozen(self) -> None:
        if torch.compiler.is_compiling():
            return
        if any(module.training for module in self._all_modules):
            raise wrong_value(
                "trunk", "stay in eval mode, as freeze(model) left it", "a model in train mode"
            )
        if any(parameter.requires_grad for parameter in self._all_parameters):
            raise wrong_value(
                "trunk",
                "stay frozen, as freeze(model) left it",
                "a model with parameters that require gradients",
            )

    def context(self, tokens: Tensor, rotary: Tensor | None) -> _Context:
        if self.mask is None:
            return _Context(rotary, None)
        if len(self.mask) != tokens.shape[1]:
            raise wrong_value(
                "attention_mask",
                f"have shape (seq, seq) for the {tokens.shape[1]} tokens",
                tuple(self.mask.shape),
            )
        return _Context(rotary, self.mask.to(tokens))

    def run(self, layer: int, tokens: Tensor, **arguments: Tensor | None) -> Tensor:
        block = self.model.blocks[layer]
        if self.model.grad_checkpointing and tokens.requires_grad:
            output: Tensor = checkpoint(partial(block, **arguments), tokens, use_reentrant=False)
        else:
            output = block(tokens, **arguments)
        return output

    def normalize(self, tokens: Tensor) -> Tensor:
        # Where timm norms before the pooling, fc_norm is the identity, and the other way round.
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
        own = context.rotary
        if own is not None and getattr(self.model, "rope_mixed", False):
            own = own[layer]
        rotary, mask = context.with_prompts(own, self.prefix, num_prompts)
        return self.run(layer, tokens, rope=rotary, attn_mask=mask)


def _check_mask(mask: Tensor) -> None:
    if not isinstance(mask, Tensor) or not mask.is_floating_point():
        raise wrong_type(
            "attention_mask", "be a floating-point tensor of shape (seq, seq)", kind(mask)
        )
    if mask.ndim != 2 or mask.shape[0] != mask.shape[1]:
        raise wrong_value("attention_mask", "have shape (seq, seq)", tuple(mask.shape))
    check_finite("attention_mask", torch.where(mask == -torch.inf, 0.0, mask))
