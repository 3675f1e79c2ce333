"""Emoji in five styles, with the names of their concepts."""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

STYLES = ("noto", "noto-v1", "twemoji", "fluent-emoji", "fluent-emoji-high-contrast")
"""Styles of :func:`emoji`: sets by Google (two), Twitter and Microsoft (two)."""

CLASS_NAMES = (
    "mammal",
    "bird",
    "sea animal",
    "plant",
    "fruit or vegetable",
    "food",
    "drink",
    "clothing",
    "tool",
    "musical instrument",
    "building",
    "vehicle",
    "boat or plane",
    "sport",
    "weather",
    "smiling face",
    "sad face",
    "worker",
    "fantasy creature",
    "hand",
    "computer or phone",
    "paper",
    "household item",
    "landscape",
)
"""Names of the classes of :func:`emoji`."""

_OPENINGS = {
    "": ("an", "a", "a"),
    "noto": ("a shaded",) * 3,
    "noto-v1": ("an old",) * 3,
    "twemoji": ("a flat",) * 3,
    "fluent-emoji": ("a glossy",) * 3,
    "fluent-emoji-high-contrast": ("a black and white",) * 3,
}
_KINDS = ("emoji", "picture", "drawing")
TEMPLATES = {
    style: tuple(
        f"{opening} {kind} of a {{}}." for opening, kind in zip(openings, _KINDS, strict=True)
    )
    for style, openings in _OPENINGS.items()
}
"""Sentences for class names, by the style that they describe. ``""`` describes none."""


class Emoji(NamedTuple):
    """Emoji of several concepts in several styles."""

    images: Float[Tensor, "emoji 3 32 32"]
    """In [0, 1], on white."""
    labels: Int[Tensor, " emoji"]
    """Positions in ``CLASS_NAMES``."""
    styles: Int[Tensor, " emoji"]
    """Positions in ``STYLES``. A style is a visual domain."""
    names: tuple[str, ...]
    """Name of each emoji in Unicode, for example "polar bear"."""


def emoji() -> "tuple[Emoji, Emoji]":
    """Load emoji of 24 classes in five styles, for training and for tests.

    No concept is in both parts. Variants of a concept, such as "dog" and "dog face", are in the
    same part, except for faces and for names of different groups, such as "mushroom" and "brown
    mushroom". :func:`clip` was trained on these styles, but on other concepts.

    Returns:
        Training and test emoji, at least ten concepts of each class for tests. Both are in an
        order that does not depend on class or style.

    Example:
        >>> train, test = samples.emoji()
        >>> train.images.shape[1:], samples.CLASS_NAMES[train.labels[0]], train.names[0]
        (torch.Size([3, 32, 32]), 'worker', 'artist')
    """
    with np.load(Path(__file__).with_name("emoji.npz")) as file:
        values = {name: file[name] for name in file.files}
    colors = np.take_along_axis(values["palettes"], values["pixels"].reshape(-1, 1024, 1), 1)
    images = torch.from_numpy(colors).float().div(255).mT.reshape(-1, 3, 32, 32).contiguous()
    labels, styles = (torch.from_numpy(values[name]).long() for name in ("labels", "styles"))
    names = json.loads(str(values["names"]))

    def part(positions: Int[Tensor, " emoji"]) -> Emoji:
        chosen = tuple(names[concept] for concept in values["concepts"][positions.numpy()])
        return Emoji(images[positions], labels[positions], styles[positions], chosen)

    test = torch.from_numpy(values["test"])
    return part(torch.nonzero(~test)[:, 0]), part(torch.nonzero(test)[:, 0])
