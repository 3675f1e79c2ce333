"""Backbones of the papers' settings, by name, with the normalization of their images."""

from collections.abc import Callable
from typing import NamedTuple

import torch.nn as nn

import zoo

Numbers = tuple[float, ...]


class Backbone(NamedTuple):
    """Network with the mean and deviation of its input pixels, and the tokenizer of a CLIP."""

    model: nn.Module
    mean: Numbers
    std: Numbers
    interpolation: str
    tokenizer: Callable[..., object] | None = None


Make = Callable[[str, int], Backbone]
"""Function from the name of a backbone and the side of its images."""


def backbone(name: str, image_size: int, *, pretrained: bool = True) -> Backbone:
    """Make a backbone without its head; weights are in the hubs of timm and open_clip, or cached.

    Args:
        name: Of open_clip, as "ViT-B-16.openai"; of timm, with the tag of its weights; or in
            ``zoo.py``, for pixels from -1 to 1, with random weights.
        image_size: Side of the images in pixels.
        pretrained: Whether to load weights.
    """
    if "." not in name:
        return Backbone(zoo.network(name, image_size), (0.5,) * 3, (0.5,) * 3, "bilinear")
    return (_open_clip if name.endswith(".openai") else _timm)(name, image_size, pretrained)


def _timm(name: str, image_size: int, pretrained: bool) -> Backbone:
    import timm

    transformer = timm.models.is_model_in_modules(name.split(".")[0], {"vision_transformer"})
    size = {"img_size": image_size} if transformer else {}
    model = timm.create_model(name, pretrained=pretrained, num_classes=0, **size)
    config = model.pretrained_cfg
    return Backbone(model, config["mean"], config["std"], config["interpolation"])


def _open_clip(name: str, image_size: int, pretrained: bool) -> Backbone:
    import open_clip

    architecture, weights = name.split(".")
    config = open_clip.get_pretrained_cfg(architecture, weights)
    model = open_clip.create_model(
        architecture,
        weights if pretrained else None,
        force_image_size=image_size,
        # The weights were trained with this activation.
        force_quick_gelu=bool(config.get("quick_gelu", False)),
    )
    tokenizer = open_clip.get_tokenizer(architecture)
    return Backbone(model, model.visual.image_mean, model.visual.image_std, "bicubic", tokenizer)
