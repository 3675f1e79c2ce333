"""Parts of open_clip's text towers."""

from typing import Any, cast

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fedprompt._refusals as check
from fedprompt.backbones._blocks import run_block


class OpenClipText:
    """Parts of the text tower of open_clip's ``CLIP`` or ``CustomTextCLIP``.

    Attributes:
        images: Beginnings of the names of the image tower's parameters.
        context_length: Number of positions.
        causal: Whether a token attends to earlier ones only, and features are read at the end of
            text.
        pooled_at: Position at which features are read. None for the end of text.
        depth: Number of blocks.
        embedding: Embedding of token ids.
        modules: Parts that sentences run through.
    """

    images: tuple[str, ...] = ("visual.",)

    def __init__(self, clip_model: Any) -> None:
        self._text = text = getattr(clip_model, "text", clip_model)
        if reason := _reason_to_refuse(text, separate=text is not clip_model):
            rule = f"have a text tower that takes embeddings ({reason})"
            raise check.wrong_type("clip_model", rule, type(clip_model).__name__)
        self._clip = clip_model
        self.containers = (clip_model, text, text.transformer, text.token_embedding)
        pool = _pool_type(text)
        # The end of text is recognized by its id, or by the largest id.
        end: Any = getattr(text, "text_eos_id", getattr(text, "eos_id", None))
        by_id = pool == "eos" and end is not None
        self.end: int = end if by_id else text.token_embedding.num_embeddings - 1
        self.context_length: int = text.context_length
        self.causal = text.attn_mask is not None and pool in ("argmax", "eos")
        self.pooled_at: int | None = {"first": 0, "last": self.context_length - 1}.get(pool)
        self.depth = len(text.transformer.resblocks)
        self.embedding: nn.Embedding = text.token_embedding
        parts = (text.transformer, text.ln_final, text.token_embedding, text.text_projection)
        self.modules = [part for part in parts if isinstance(part, nn.Module)]

    @property
    def positions(self) -> Tensor:
        """Embeddings (context_length, dim) of the positions."""
        return cast(Tensor, self._text.positional_embedding)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tokens in the blocks."""
        return cast(torch.dtype, self._text.transformer.get_cast_dtype())

    @property
    def mask(self) -> Tensor | None:
        """Additive mask of whole sentences, if there is one."""
        return cast(Tensor | None, self._text.attn_mask)

    def own_features(self, ids: Tensor) -> Any:
        """Return the features of sentences by the model's own forward pass."""
        return self._clip.encode_text(ids)

    def block(self, layer: int, tokens: Tensor, mask: Tensor | None, read: Tensor | None) -> Tensor:
        """Run one block, and return the tokens `read`, all if it is None."""
        transformer = self._text.transformer
        block = transformer.resblocks[layer]
        if not transformer.grad_checkpointing:
            return run_block(block, tokens, mask, read)
        result: Tensor = checkpoint(run_block, block, tokens, mask, read, use_reentrant=False)
        return result

    def project(self, tokens: Tensor) -> Tensor:
        """Apply the last norm and the projection to pooled tokens."""
        pooled: Tensor = self._text.ln_final(tokens)
        projection = self._text.text_projection
        if projection is None:
            return pooled
        is_module = isinstance(projection, nn.Module)
        return cast(Tensor, projection(pooled) if is_module else pooled @ projection)


def _reason_to_refuse(text: Any, *, separate: bool) -> str | None:
    from open_clip.transformer import TextTransformer

    if separate and not isinstance(text, TextTransformer):
        return "a Hugging Face tower takes token ids only"
    if len(text.positional_embedding) != text.context_length:
        return "it adds a token, as CoCa does"
    if getattr(text, "use_pad_mask", False):
        return "it masks padding by token ids"
    if _pool_type(text) == "none":
        return "it does not pool"
    return None


def _pool_type(text: Any) -> str:
    return cast(str, text.text_pool_type if hasattr(text, "text_pool_type") else text.pool_type)
