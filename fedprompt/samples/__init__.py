"""Handwritten digits, emoji and small frozen networks, so that you need no download to begin.

Import it by name: ``from fedprompt import samples``. ``python -m fedprompt.samples`` runs the
README's quickstart. ``README.md`` in this folder has the sources and the licenses of the files.
"""

from fedprompt.samples.emoji import CLASS_NAMES, STYLES, TEMPLATES, Emoji, emoji
from fedprompt.samples.handwritten import (
    Digits,
    augment,
    digits,
    inverted,
    inverted_rotated,
    noisy,
    raw,
    rotated,
)
from fedprompt.samples.networks import clip, preprocess, tokenize, vit

__all__ = [
    "CLASS_NAMES",
    "STYLES",
    "TEMPLATES",
    "Digits",
    "Emoji",
    "augment",
    "clip",
    "digits",
    "emoji",
    "inverted",
    "inverted_rotated",
    "noisy",
    "preprocess",
    "raw",
    "rotated",
    "tokenize",
    "vit",
]
