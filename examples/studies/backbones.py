"""Backbones of the papers' settings, by name, with the normalization of their images."""

from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch.nn as nn
from safetensors.torch import save_file

import photographs
import zoo
from fedprompt.backbones._weights import tensors_in
from fedprompt.backbones.pretrained import network
from studies.core import content

Numbers = tuple[float, ...]
RECIPES = content("recipes")
"""Networks whose weights are in a file alone, by their name."""
NO_FILES: Mapping[str, Path] = {}


class Backbone(NamedTuple):
    """Network with the mean and deviation of its input pixels, and the tokenizer of a CLIP."""

    model: nn.Module
    mean: Numbers
    std: Numbers
    interpolation: str
    tokenizer: Callable[..., object] | None = None


Make = Callable[[str, int], Backbone]
"""Function from the name of a backbone and the side of its images."""


def pretrained(name: str) -> bool:
    """Return whether a backbone has weights, which a file can have."""
    return bool({".", ":"} & {*name})


def backbone(
    name: str, image_size: int, *, weights: Mapping[str, Path] = NO_FILES, random: bool = False
) -> Backbone:
    """Make a backbone without its head.

    Args:
        name: Of open_clip, as "ViT-B-16:openai"; of timm, with the tag of its weights; in
            ``settings/recipes.toml``; or in ``zoo.py``, for pixels from -1 to 1, with random
            weights.
        image_size: Side of the images in pixels.
        weights: Files of weights, by name. The others are in the hubs of timm and open_clip, or
            cached.
        random: Whether weights are random, and nothing is read.

    Raises:
        ValueError: If there are no weights, or a file has those of another network.
    """
    if not pretrained(name):
        return Backbone(zoo.network(name, image_size), (0.5,) * 3, (0.5,) * 3, "bilinear")
    if random:
        return (_random_clip if ":" in name else _random)(name, image_size)
    file = weights.get(name)
    try:
        if name in RECIPES:
            return _by_recipe(name, image_size, file)
        if ":" in name:
            from open_clip import get_tokenizer

            made = network(name, "clip", size=image_size, weights=file, argument="--weights")
            tokenizer = get_tokenizer(name.partition(":")[0])
            return Backbone(made.model, *_look(made.preparation), tokenizer)
        if _is_transformer(name):
            made = network(name, size=image_size, weights=file, argument="--weights")
            return Backbone(made.model, *_look(made.preparation))
        model = photographs.load_network(name, file)
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(str(error)) from error
    return _configured(model)


def _by_recipe(name: str, image_size: int, file: Path | None) -> Backbone:
    """Make a network of timm with the weights of another project, of which one network is taken."""
    recipe = RECIPES[name]
    if file is None:
        raise ValueError(f"`--weights {name}=FILE` is missing: {recipe['source']}.")
    found, before = tensors_in(file), recipe["prefix"]
    own = {key.removeprefix(before): part for key, part in found.items() if key.startswith(before)}
    with TemporaryDirectory() as folder:
        path = Path(folder) / "weights.safetensors"
        save_file({key: part.contiguous() for key, part in (own or found).items()}, path)
        options = {"size": image_size, "weights": path, "arguments": recipe["arguments"]}
        made = network(recipe["network"], argument=f"--weights {name}", **options)
    return Backbone(made.model, recipe["mean"], recipe["std"], recipe["interpolation"])


def looks(name: str) -> tuple[int, Numbers, Numbers, str]:
    """Return the side, mean, deviation and interpolation that the weights of a name need."""
    from timm.models import get_pretrained_cfg

    if ":" in name:
        import open_clip

        look = open_clip.get_pretrained_cfg(*name.split(":"))
        size = open_clip.get_model_config(name.partition(":")[0])["vision_cfg"]["image_size"]
        return size, look["mean"], look["std"], look["interpolation"]
    recipe = RECIPES.get(name, {"network": name})
    config = get_pretrained_cfg(recipe["network"])
    own = (recipe.get(key, getattr(config, key)) for key in ("mean", "std", "interpolation"))
    return config.input_size[-1], *own


def _look(preparation: Any) -> tuple[Numbers, Numbers, str]:
    return preparation.mean, preparation.std, preparation.interpolation


def _is_transformer(name: str) -> bool:
    import timm

    known: bool = timm.models.is_model_in_modules(name.split(".")[0], {"vision_transformer"})
    return known


def _configured(model: Any) -> Backbone:
    config = model.pretrained_cfg
    return Backbone(model, config["mean"], config["std"], config["interpolation"])


def _random(name: str, image_size: int) -> Backbone:
    import timm

    recipe = RECIPES.get(name, {"network": name, "arguments": {}})
    name, options = recipe["network"], dict(recipe["arguments"])
    if _is_transformer(name):
        options["img_size"] = image_size
    return _configured(timm.create_model(name, num_classes=0, **options))


def _random_clip(name: str, image_size: int) -> Backbone:
    import open_clip

    architecture = name.partition(":")[0]
    model = open_clip.create_model(architecture, force_image_size=image_size)
    return Backbone(model, model.visual.image_mean, model.visual.image_std, "bicubic")
