"""Trunks of timm's vision transformers, with the embedding, blocks and pooling of the model."""

from collections.abc import Iterable
from typing import Any

import torch.nn as nn
from jaxtyping import Float
from torch import Tensor

from fedprompt._checks import wrong_type, wrong_value
from fedprompt.backbones._adapted import check_unadapted
from fedprompt.backbones._trainable import chosen_parameters
from fedprompt.backbones._trunk import Context, FrozenTrunk
from fedprompt.freezing import freeze
from fedprompt.interfaces import TrainableTrunk

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


def vit_trunk(
    model: nn.Module,
    *,
    attention_mask: Float[Tensor, "seq seq"] | None = None,
    trainable: Iterable[nn.Parameter | nn.Module] | None = None,
) -> TrainableTrunk:
    """Make a frozen trunk from a timm ``VisionTransformer`` or ``Eva``, shared by all clients.

    Embedding and pooling are the model's own code. This includes class and register tokens,
    distillation tokens, pre-norm, fc-norm, attention pooling, dynamic image sizes and rotary
    positions. The model is put into eval mode and its gradients are turned off (:func:`freeze`).
    Its gradient checkpointing (``model.set_grad_checkpointing()``) is respected.

    The trunk is a plain object and not a submodule. ``.to(device)`` of a client module does not
    move it, so move the model first. A deep copy of a client shares the trunk.

    Parameters of LoRA, adapters or norms can be trained with the prompts. ``trunk.trainable`` is a
    module that has them under their names in the model, for optimizers, :func:`collect` and
    :func:`load_values`. Clients that share such a trunk take turns, and a copy is refused. The
    model stays in eval mode, so dropout of adapters is off.

    Args:
        model: Model from timm. Its classifier is never run.
        attention_mask: Mask (seq, seq) over class tokens, registers and patches, added to the
            attention scores of every block: 0 to attend, ``-inf`` to mask. Prompts attend to all
            tokens and all tokens attend to them.
        trainable: Parameters or modules of `model` that are not frozen. If None, all are frozen.

    Returns:
        A :class:`~fedprompt.interfaces.TrainableTrunk`.

    Raises:
        TypeError: If prompts cannot be inserted into this kind of model. The text gives the
            reason.
        ValueError: If only some parameters of `model` are trained, or adapters such as LoRA's
            are and are not in `trainable`, because they would be frozen silently. If `trainable`
            does not belong to `model`. If `attention_mask` is not square or
            contains NaN. When used: if the mask does not fit the tokens of an image, or the
            model is no longer frozen or in eval mode.

    Example:
        >>> from timm.models.vision_transformer import VisionTransformer
        >>> model = VisionTransformer(img_size=16, patch_size=4, embed_dim=8, depth=2, num_heads=2)
        >>> trunk = vit_trunk(model)
        >>> trunk.prefix, trunk.dim, trunk.depth, trunk.num_features, trunk.patch_size
        (1, 8, 2, 8, 4)
    """
    from timm.models.eva import Eva
    from timm.models.vision_transformer import VisionTransformer

    for family, trunk in ((VisionTransformer, _ViTTrunk), (Eva, _EvaTrunk)):
        # A subclass with another forward pass may do anything between the blocks.
        if isinstance(model, family) and type(model).forward_features is family.forward_features:
            chosen = chosen_parameters(model, trainable)
            check_unadapted("model", model.named_parameters(), set(chosen))
            made = trunk(freeze(model), attention_mask)
            made.train_parameters(chosen)
            return made
    module = type(model).__module__.rpartition(".")[2]
    rule = f"be a timm VisionTransformer or Eva ({_REFUSED.get(module, _OTHER)})"
    raise wrong_type("model", rule, type(model).__name__)


class _TimmTrunk(FrozenTrunk):
    """Base of the trunks of both families."""

    def __init__(self, model: Any, attention_mask: Tensor | None) -> None:
        super().__init__(model, attention_mask)
        self.prefix = model.num_prefix_tokens
        self.dim = model.embed_dim
        self.blocks = model.blocks
        self.depth = len(model.blocks)
        self.num_features = model.head_hidden_size
        self.patch_size = model.patch_embed.feat_ratio()

    def run_block(self, layer: int, tokens: Tensor, **arguments: Tensor | None) -> Tensor:
        block, checkpointing = self.model.blocks[layer], self.model.grad_checkpointing
        return self.run(block, tokens, checkpointing=checkpointing, **arguments)

    def grid(self, tokens: Tensor, image_size: tuple[int, int] | None) -> tuple[int, int] | None:
        """Return the rows and columns of the patches, or None if the model takes any number."""
        patch_embed = self.model.patch_embed
        if image_size is None and self.model.dynamic_img_size:
            return None
        own = image_size is None
        rows, columns = patch_embed.grid_size if own else patch_embed.dynamic_feat_size(image_size)
        if tokens.shape[1] != self.prefix + rows * columns:
            count = self.prefix + rows * columns
            rule = f"have {count} tokens without prompts, for {rows} x {columns} patches"
            raise wrong_value("images", rule, tokens.shape[1])
        return rows, columns

    def normalize(self, tokens: Tensor) -> Tensor:
        # One of the two is the identity: timm normalizes either before or after the pooling.
        normalized: Tensor = self.model.fc_norm(self.model.norm(tokens))
        return normalized

    def pool(self, tokens: Tensor) -> Tensor:
        pooled: Tensor = self.model.forward_head(self.model.norm(tokens), pre_logits=True)
        return pooled


class _ViTTrunk(_TimmTrunk):
    def rotary_table(self, tokens: Tensor, image_size: tuple[int, int] | None) -> None:
        self.grid(tokens, image_size)  # only for its check

    def embed(self, images: Tensor) -> tuple[Tensor, Context]:
        self.check_frozen()
        model = self.model
        tokens = model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(images))))
        return tokens, self.context(tokens)

    def block(self, layer: int, tokens: Tensor, context: Context, num_prompts: int) -> Tensor:
        _, mask = context.with_prompts(None, self.prefix, num_prompts)
        return self.run_block(layer, tokens, attn_mask=mask)


class _EvaTrunk(_TimmTrunk):
    def embed(self, images: Tensor) -> tuple[Tensor, Context]:
        self.check_frozen()
        tokens, rotary = self.model._pos_embed(self.model.patch_embed(images))
        return self.model.norm_pre(tokens), self.context(tokens, rotary)

    def rotary_table(self, tokens: Tensor, image_size: tuple[int, int] | None) -> Tensor | None:
        grid, rope = self.grid(tokens, image_size), self.model.rope
        if rope is None:
            return None
        if grid is None:
            rule = "be given, because positions depend on height and width"
            raise wrong_value("image_size", rule, None)
        # Without a shape, timm returns the table of a fixed size.
        fixed = not self.model.dynamic_img_size and hasattr(rope, "feat_shape")
        table: Tensor = rope.get_embed() if fixed else rope.get_embed(shape=grid)
        return table

    def block(self, layer: int, tokens: Tensor, context: Context, num_prompts: int) -> Tensor:
        layer_rotary = context.rotary
        if layer_rotary is not None and getattr(self.model, "rope_mixed", False):
            layer_rotary = layer_rotary[layer]
        rotary, mask = context.with_prompts(layer_rotary, self.prefix, num_prompts)
        return self.run_block(layer, tokens, rope=rotary, attn_mask=mask)
