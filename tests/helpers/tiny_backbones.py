"""Tiny random backbones of the classes that the papers' settings name."""

import copy

import open_clip
import torch
import torch.nn as nn
from timm.models.resnet import BasicBlock, ResNet
from timm.models.vision_transformer import VisionTransformer

from clips import TEXT, TOKENIZER, copy_of
from studies.backbones import Backbone

HALF = (0.5, 0.5, 0.5)
SIZE = 16
"""Side of the images in pixels."""


def vit(name: str, image_size: int) -> Backbone:
    """A vision transformer of twelve blocks, or a convolutional network."""
    torch.manual_seed(0)
    if not name.startswith("vit"):
        return Backbone(resnet(), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), "bilinear")
    width = {"small": 20, "base": 24, "large": 28}[name.split("_")[1]]
    sizes = {"img_size": image_size, "patch_size": 8 if image_size <= 64 else 32}
    model = VisionTransformer(**sizes, embed_dim=width, depth=12, num_heads=2, num_classes=0)
    return Backbone(model, HALF, HALF, "bicubic")


def network(name: str, image_size: int) -> Backbone:
    """A network that is trained from scratch; each name has its own width."""
    if name.startswith("vit"):
        return vit("vit_base", image_size)._replace(interpolation="bilinear")
    width = 4 + len(name)
    layers = [nn.Conv2d(3, width, 4, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model = nn.Sequential(*layers) if name == "cnn" else resnet()
    return Backbone(model, HALF, HALF, "bilinear")


def resnet() -> ResNet:
    """A residual network with one block at each resolution."""
    return ResNet(BasicBlock, (1, 1, 1, 1), num_classes=0, stem_width=4, channels=(4, 4, 8, 8))


def clip(name: str, image_size: int) -> Backbone:
    """A CLIP with a ViT or a ResNet."""
    vision = {"layers": 1, "width": 16, "head_width": 8, "patch_size": 8, "image_size": image_size}
    if name.startswith("RN"):
        vision |= {"layers": (1, 1, 1, 1), "width": 8, "patch_size": None}
        vision |= {"image_size": max(32, image_size)}
    sizes = 8, vision, {**TEXT, "context_length": 40}

    def draw() -> nn.Module:
        torch.manual_seed(0)
        return open_clip.model.CLIP(*sizes, quick_gelu=name.endswith(":openai")).eval()

    model = copy_of(f"tiny {name} {image_size}", draw)
    tokenizer = copy.copy(TOKENIZER)  # to read the vocabulary again takes a tenth of a second
    tokenizer.context_length = 40
    mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    return Backbone(model, mean, std, "bicubic", tokenizer)


def tiny(name: str, image_size: int) -> Backbone:
    """The tiny backbone of a name."""
    if not {".", ":"} & {*name}:
        return network(name, image_size)
    return (clip if name.endswith(":openai") else vit)(name, image_size)
