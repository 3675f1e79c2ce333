"""Whether a block of open_clip is what its class says. Importing this file imports the compiler."""

from typing import Any

import torch
import torch.nn as nn

from fedprompt.backbones._probe import changes


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_plain(block: Any) -> bool:
    """Whether a block and its attention are those of open_clip, without hooks or new methods."""
    from open_clip.transformer import ResidualAttentionBlock

    known = type(block) is ResidualAttentionBlock and type(block.attn) is nn.MultiheadAttention
    return known and not changes(block) and not changes(block.attn)
