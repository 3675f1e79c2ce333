"""Handwritten digits and small frozen networks, so that your first federation needs no download.

Import it by name: ``from fedprompt import samples``. ``python -m fedprompt.samples`` runs the
README's quickstart. ``README.md`` in this folder has the sources and the licenses of the files.
"""

from fedprompt.samples.canvas import DOMAINS, on_canvases
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
from fedprompt.samples.networks import CLASS_NAMES, TEMPLATES, clip, preprocess, tokenize, vit

__all__ = [
    "CLASS_NAMES",
    "DOMAINS",
    "TEMPLATES",
    "Digits",
    "augment",
    "clip",
    "digits",
    "inverted",
    "inverted_rotated",
    "noisy",
    "on_canvases",
    "preprocess",
    "raw",
    "rotated",
    "tokenize",
    "vit",
]
