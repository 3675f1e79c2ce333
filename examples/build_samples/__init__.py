"""Training of the networks of `fedprompt.samples`, and a larger network of the same kind."""

from pathlib import Path

import torch.nn as nn

from fedprompt import samples
from fedprompt.samples.networks import _read_vit

LARGE = Path(__file__).parent / "vit_l.safetensors"


def vit(size: str) -> nn.Module:
    """Load a sample ViT: "S", "B" or "L" (96 wide, 4 blocks, 6 heads)."""
    return _read_vit(LARGE) if size == "L" else samples.vit(size)
