"""Parts of a text tower, from the models of open_clip or transformers."""

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import torch
import torch.nn as nn
from torch import Tensor

from fedprompt.backbones._models import libraries
from fedprompt.backbones.text._open_clip import OpenClipText


@runtime_checkable
class TextParts(Protocol):
    """Parts of the text tower of one library's models.

    Attributes:
        images: Beginnings of the names of the image tower's parameters.
        context_length: Number of positions.
        causal: Whether a token attends to earlier ones only, and features are read at the end of
            text.
        pooled_at: Position at which features are read. None for the end of text.
        depth: Number of blocks.
    """

    images: tuple[str, ...]
    context_length: int
    causal: bool
    pooled_at: int | None
    depth: int

    def modules(self) -> Iterator[nn.Module]:
        """Iterate over the parts that sentences run through."""

    @property
    def embedding(self) -> nn.Embedding:
        """Embedding of token ids."""

    @property
    def positions(self) -> Tensor:
        """Embeddings (context_length, dim) of the positions."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tokens in the blocks."""

    @property
    def mask(self) -> Tensor | None:
        """Additive mask of whole sentences, if there is one."""

    def block(self, layer: int, tokens: Tensor, mask: Tensor | None, read: Tensor | None) -> Tensor:
        """Run one block, and return the tokens `read`, all if it is None."""

    def project(self, tokens: Tensor) -> Tensor:
        """Apply the last norm and the projection to pooled tokens."""


def text_parts(clip_model: nn.Module) -> TextParts:
    """Find the parts of a model, or refuse it."""
    if "transformers" in libraries(clip_model):
        from fedprompt.backbones.text._transformers import HuggingText

        return HuggingText(clip_model)
    return OpenClipText(clip_model)
