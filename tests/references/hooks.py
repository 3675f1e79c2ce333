"""Prompts in the forward pass of any vision transformer, by hooks on its blocks.

The reference knows the list of blocks and the number of tokens in front. It contains no code for
embeddings, masks, norms or pooling, so it applies to every library.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

import torch
import torch.nn as nn
from torch import Tensor


def hooked_blocks(
    run: Callable[[], Tensor],
    blocks: Sequence[nn.Module],
    layers: Mapping[int, Tensor],
    *,
    prefix: int,
    replace: bool = False,
) -> tuple[Tensor, Tensor]:
    """Run a model with prompts (prompts, dim) before each of `layers` and none after the blocks.

    Rotary attention of timm skips its first `num_prefix_tokens` tokens. That number is increased
    while prompts follow the prefix.

    Returns:
        The result of `run`, and the prompts after the last block, before any norm.
    """
    inside, outputs = 0, []

    def rotary(block: nn.Module) -> bool:
        return hasattr(block, "attn") and hasattr(block.attn, "num_prefix_tokens")

    def insert(layer: int, block: nn.Module, tokens: Tensor) -> Tensor:
        nonlocal inside
        if layer in layers:
            new = layers[layer].to(tokens.dtype).expand(len(tokens), -1, -1)
            kept = 0 if replace else inside
            rest = tokens[:, prefix + inside :]
            tokens = torch.cat([tokens[:, : prefix + kept], new, rest], 1)
            inside = kept + new.shape[1]
        if rotary(block):
            block.attn.num_prefix_tokens = prefix + inside
        return tokens

    def remove(tokens: Tensor) -> Tensor:
        outputs.append(tokens[:, prefix : prefix + inside])
        return torch.cat([tokens[:, :prefix], tokens[:, prefix + inside :]], 1)

    with ExitStack() as stack:
        for layer, block in enumerate(blocks):
            if rotary(block):
                stack.callback(setattr, block.attn, "num_prefix_tokens", prefix)
            hook = block.register_forward_pre_hook(
                lambda block, args, layer=layer: (insert(layer, block, args[0]), *args[1:])
            )
            stack.callback(hook.remove)
        stack.callback(
            blocks[-1].register_forward_hook(lambda block, args, tokens: remove(tokens)).remove
        )
        return run(), outputs[0]
