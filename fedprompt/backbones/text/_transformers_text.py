"""Parts of the text towers of transformers' CLIP models, and their tokenizers."""

from functools import partial
from typing import Any

import torch
import torch.nn as nn
from jaxtyping import Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fedprompt._refusals as check
from fedprompt.backbones._blocks import tokens_at


class HuggingText:
    """Parts of the text tower of transformers' ``CLIPModel`` or ``CLIPTextModelWithProjection``.

    Attributes:
        images: Beginnings of the names of the image tower's parameters.
        context_length: Number of positions.
        causal: True. CLIP's tokens attend to earlier ones only.
        pooled_at: None. Features are read at the end of text.
        depth: Number of blocks.
        embedding: Embedding of token ids.
        modules: Parts that sentences run through.
        mask: None. Masks are causal.
    """

    images: tuple[str, ...] = ("vision_model.", "visual_projection.")
    causal = True
    pooled_at: int | None = None
    mask: Tensor | None = None

    def __init__(self, clip_model: Any) -> None:
        self._clip, self._text = clip_model, clip_model.text_model
        embeddings = self._text.embeddings
        parts = (embeddings, embeddings.token_embedding, embeddings.position_embedding)
        self.containers = (clip_model, self._text, self._text.encoder, *parts)
        end = self._text.config.eos_token_id  # 2 is the value of old files, for the largest id
        self.end: int = embeddings.token_embedding.num_embeddings - 1 if end == 2 else end
        attention = self._text.config._attn_implementation
        rule = 'be loaded with attn_implementation="sdpa", whose masks can be chosen'
        check.require(attention in ("sdpa", "eager"), "clip_model", rule, repr(attention))
        self.context_length: int = embeddings.position_embedding.num_embeddings
        self.depth = len(self._text.encoder.layers)
        self.embedding: nn.Embedding = embeddings.token_embedding
        self.modules = [self._text, clip_model.text_projection]

    @property
    def positions(self) -> Tensor:
        """Embeddings (context_length, dim) of the positions."""
        positions: Tensor = self._text.embeddings.position_embedding.weight
        return positions

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tokens in the blocks."""
        return self.positions.dtype

    def own_features(self, ids: Tensor) -> Any:
        """Return the features of sentences by the model's own forward pass."""
        if hasattr(self._clip, "get_text_features"):
            return self._clip.get_text_features(ids, return_dict=True).pooler_output
        return self._clip(ids, return_dict=True).text_embeds

    def block(self, layer: int, tokens: Tensor, mask: Tensor | None, read: Tensor | None) -> Tensor:
        """Run one block, and return the tokens `read`, all if it is None.

        Its checkpointing, which is off in eval mode, is done here.
        """
        block = self._text.encoder.layers[layer]
        run = block
        if getattr(block, "gradient_checkpointing", False):
            run = partial(checkpoint, block, use_reentrant=False)
        return tokens_at(run(tokens, None if mask is None else mask[None, None]), read)

    def project(self, tokens: Tensor) -> Tensor:
        """Apply the last norm and the projection to pooled tokens."""
        projected: Tensor = self._clip.text_projection(self._text.final_layer_norm(tokens))
        return projected


def padded_ids(
    tokenizer: Any, texts: list[str], *, context_length: int
) -> Int[Tensor, "texts length"]:
    """Call a tokenizer of transformers like one of open_clip."""
    fixed = {"padding": "max_length", "truncation": True, "max_length": context_length}
    fixed["padding_side"] = "right"
    return torch.tensor(tokenizer(texts, **fixed)["input_ids"])
