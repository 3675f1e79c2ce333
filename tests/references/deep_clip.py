"""CLIP with prompts of each layer, as in the code of MaPLe, PromptSRC and FedMGP.

The first visual prompts pass the first norm with the embeddings. Before each later layer with
prompts, the outputs at their positions are replaced.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from references.coop import WORD


def encode_images(visual: Any, images: Tensor, prompts: Tensor) -> Tensor:
    """Encode images with prompts (layers, length, width) after the patches."""
    tokens = visual.conv1(images).flatten(2).mT
    tokens = torch.cat([visual.class_embedding.expand(len(images), 1, -1), tokens], 1)
    tokens, count = tokens + visual.positional_embedding, tokens.shape[1]
    first, *later = prompts[:, None].expand(-1, len(images), -1, -1)
    tokens = visual.ln_pre(torch.cat([tokens, first], 1))
    for layer, block in enumerate(visual.transformer.resblocks):
        if 0 < layer < len(prompts):
            tokens = torch.cat([tokens[:, :count], later[layer - 1]], 1)
        tokens = block(tokens)
    return visual.ln_post(tokens[:, 0]) @ visual.proj


def encode_names(
    clip: Any, tokenizer: Callable[..., Tensor], prompts: Tensor, names: Sequence[str]
) -> Tensor:
    """Encode names behind prompts (layers, length, width), which follow the start token."""
    first, *later = prompts
    length = len(first)
    ids = tokenizer([" ".join([WORD] * length + [name]) + " ." for name in names])
    words = clip.token_embedding(ids)
    tokens = torch.cat([words[:, :1], first.expand(len(ids), -1, -1), words[:, 1 + length :]], 1)
    tokens = tokens + clip.positional_embedding
    for layer, block in enumerate(clip.transformer.resblocks):
        if 0 < layer < len(prompts):
            new = later[layer - 1].expand(len(ids), -1, -1)
            tokens = torch.cat([tokens[:, :1], new, tokens[:, 1 + length :]], 1)
        tokens = block(tokens, attn_mask=clip.attn_mask)
    return clip.ln_final(tokens)[range(len(ids)), ids.argmax(1)] @ clip.text_projection
