"""Backbones of the papers' settings, by name, with the normalization of their images."""

from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Backbones:
    """Makers of backbones by their name and the side of the images.

    Attributes:
        vit: Maker of pretrained vision transformers, and of convolutional networks that have
            prompts of pixels.
        network: Maker of networks that are trained from scratch, without their heads.
        clip: Maker of models of open_clip, by architecture and weights, as "ViT-B-16.openai".
    """

    vit: Callable[[str, int], Backbone]
    network: Callable[[str, int], Backbone]
    clip: Callable[[str, int], Backbone]


def timm_vit(name: str, image_size: int, *, pretrained: bool = True) -> Backbone:
    """Load a pretrained network of timm without its head, from its hub or its cache."""
    import timm

    transformer = timm.models.is_model_in_modules(name.split(".")[0], {"vision_transformer"})
    size = {"img_size": image_size} if transformer else {}
    model = timm.create_model(name, pretrained=pretrained, num_classes=0, **size)
    config = model.pretrained_cfg
    return Backbone(model, config["mean"], config["std"], config["interpolation"])


def new_network(name: str, image_size: int) -> Backbone:
    """Build a network with random weights for pixels from -1 to 1."""
    return Backbone(zoo.network(name, image_size), (0.5,) * 3, (0.5,) * 3, "bilinear")


def open_clip_model(name: str, image_size: int, *, pretrained: bool = True) -> Backbone:
    """Load a pretrained model of open_clip, from its hub or its cache."""
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


PRETRAINED = Backbones(timm_vit, new_network, open_clip_model)
