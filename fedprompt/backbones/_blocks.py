"""Blocks of open_clip's transformers, with the projections of attention as single products."""

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from fedprompt.backbones._probe import changes


def run_block(
    block: Any,
    tokens: Float[Tensor, "batch seq dim"],
    mask: Float[Tensor, "seq seq"] | None = None,
    read: Int[Tensor, "batch queries"] | None = None,
) -> Float[Tensor, "batch queries dim"]:
    """Run one block in eval mode, and return the tokens `read`, all by default.

    PyTorch's ``nn.MultiheadAttention`` transposes batches. A frozen projection of a transposed
    tensor is computed as one small product for each sample. The plain block of open_clip is
    therefore written out here, with projections of contiguous tensors. Other blocks are called,
    also those with hooks or replaced methods.
    """
    if not _is_plain(block):
        return tokens_at(block(tokens, attn_mask=mask), read)
    if read is not None and mask is not None:
        mask = mask[read][:, None]
    mixed = _attention(block.attn, block.ln_1(tokens), mask, read)
    hidden: Tensor = tokens_at(tokens, read) + block.ls_1(mixed)
    result: Tensor = hidden + block.ls_2(block.mlp(block.ln_2(hidden)))
    return result


def _is_plain(block: Any) -> bool:
    from open_clip.transformer import ResidualAttentionBlock

    known = type(block) is ResidualAttentionBlock and type(block.attn) is nn.MultiheadAttention
    return known and not changes(block) and not changes(block.attn)


def tokens_at(
    tokens: Float[Tensor, "batch seq dim"], read: Int[Tensor, "batch queries"] | None
) -> Float[Tensor, "batch queries dim"]:
    """Return some tokens of each sample, all by default."""
    if read is None:
        return tokens
    return tokens.gather(1, read[..., None].expand(-1, -1, tokens.shape[-1]))


def _attention(
    attention: nn.MultiheadAttention, tokens: Tensor, mask: Tensor | None, read: Tensor | None
) -> Tensor:
    weight, bias = attention.in_proj_weight, attention.in_proj_bias
    dim = tokens.shape[-1]
    sizes = [3 * dim] if read is None else [dim, 2 * dim]  # one product, if all tokens are read
    inputs = (tokens,) if read is None else (tokens_at(tokens, read), tokens)
    parts = zip(inputs, torch.split(weight, sizes), torch.split(bias, sizes), strict=True)
    query, key, value = (
        rearrange(part, "batch seq (heads dim) -> batch heads seq dim", heads=attention.num_heads)
        for arguments in parts
        for part in torch.split(F.linear(*arguments), dim, -1)
    )
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    output = attention.out_proj
    return F.linear(
        rearrange(mixed, "batch heads seq dim -> batch seq (heads dim)"), output.weight, output.bias
    )
