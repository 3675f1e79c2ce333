"""Blocks of open_clip's transformers, with the projections of attention as single products."""

import torch.nn as nn
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor


def run_block(
    block: nn.Module,
    tokens: Float[Tensor, "batch seq dim"],
    mask: Float[Tensor, "seq seq"] | None = None,
) -> Float[Tensor, "batch seq dim"]:
    """Run one block in eval mode.

    PyTorch's ``nn.MultiheadAttention`` transposes batches. A frozen projection of a transposed
    tensor is computed as one small product for each sample. The plain block of open_clip is
    therefore written out here, with projections of contiguous tensors. Other blocks are called.
    """
    from open_clip.transformer import ResidualAttentionBlock

    if type(block) is not ResidualAttentionBlock or type(block.attn) is not nn.MultiheadAttention:
        called: Tensor = block(tokens, attn_mask=mask)
        return called
    hidden: Tensor = tokens + block.ls_1(_attention(block.attn, block.ln_1(tokens), mask))
    return hidden + block.ls_2(block.mlp(block.ln_2(hidden)))


def _attention(attention: nn.MultiheadAttention, tokens: Tensor, mask: Tensor | None) -> Tensor:
    projected = F.linear(tokens, attention.in_proj_weight, attention.in_proj_bias)
    query, key, value = rearrange(
        projected,
        "batch seq (parts heads dim) -> parts batch heads seq dim",
        parts=3,
        heads=attention.num_heads,
    )
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    output = attention.out_proj
    return F.linear(
        rearrange(mixed, "batch heads seq dim -> batch seq (heads dim)"), output.weight, output.bias
    )
