"""What the benchmarks train: deep prompts of ten tokens and a head, for images of 224 pixels."""

import timm
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import fedprompt as fp

CLASSES = 10


def vit(name: str = "vit_tiny", **options: object) -> nn.Module:
    """Make a ViT of timm with random weights, without a classifier by default."""
    given = {"num_classes": 0, **options}
    return timm.create_model(f"{name}_patch16_224", pretrained=False, **given).eval()


def draw_images(batch: int, size: int = 224) -> Tensor:
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(1))


def labels_of(outputs: Tensor) -> Tensor:
    return torch.arange(len(outputs)) % CLASSES


class Client(nn.Module):
    """Prompts and a head over a frozen ViT."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.trunk = fp.vit_trunk(model)
        self.prompts = fp.DeepPrompts(10, self.trunk, generator=draw)
        self.head = nn.Linear(self.trunk.num_features, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (batch, classes)."""
        return self.head(fp.encode_prompted(self.trunk, images, self.prompts()).pooled)


def step(model: nn.Module, images: Tensor) -> None:
    """Run a forward and a backward pass."""
    logits = model(images)
    F.cross_entropy(logits, labels_of(logits)).backward()
    model.zero_grad()
