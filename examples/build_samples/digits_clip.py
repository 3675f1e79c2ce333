"""A small CLIP of printed digits and letters, for the tasks whose records were made with it.

`build_clip.py` trained it.
"""

import json
import re
from functools import cache
from pathlib import Path

import torch
import torch.nn as nn
from jaxtyping import Float, Int
from torch import Tensor

import fedprompt._refusals as check
from fedprompt._trees import texts_of
from fedprompt.samples.networks import _read

_CLIP = Path(__file__).with_name("digits_clip.safetensors")
CLASS_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
"""Names of the digits, in words of :func:`tokenize`."""

_OPENINGS = {"": "a", "plain": "a plain", "inverted": "an inverted", "noisy": "a noisy"}
_FORMS = ("{} photo of a {{}}.", "{} picture of the {{}}.", "{} drawing of a {{}}.")
TEMPLATES = {
    style: tuple(form.format(opening) for form in _FORMS) for style, opening in _OPENINGS.items()
}
"""Captions that the CLIP was trained with, by the domain that they name. ``""`` names none."""


def clip() -> nn.Module:
    """Load a CLIP of open_clip that was trained on captions of printed digits and letters.

    Its parameters are float32. Its images are those of :func:`preprocess`, and its tokenizer is
    :func:`tokenize`.

    Returns:
        A new model in eval mode, for images of 3 x 32 x 32 pixels in 64 patches.

    """
    from open_clip.model import CLIP

    return _read(_CLIP, CLIP).eval()


def tokenize(texts: list[str], context_length: int = 24) -> Int[Tensor, "texts length"]:
    """Tokenize texts for :func:`clip`, in the layout of open_clip's tokenizers.

    A row contains the start, one id for each word or full stop, the end and padding.

    Args:
        texts: Texts in the 48 words of the CLIP, such as "a noisy photo of a three." Texts that
            are too long are cut.
        context_length: Length of a row.

    Returns:
        Token ids.

    Raises:
        ValueError: If a word is unknown. The message has all known words.
    """
    words = _words()
    rows = torch.zeros(len(texts), context_length, dtype=torch.long)
    for row, text in zip(rows, texts, strict=True):
        pieces = re.findall(r"\w+|\.", text)
        if unknown := sorted(set(pieces) - set(words[2:-1])):
            rule = f"consist of the {len(words) - 3} words {' '.join(words[2:-1])}"
            raise check.wrong("texts", rule, ", ".join(map(repr, unknown)))
        written = ["<start>", *pieces[: context_length - 2], "<eot>"]
        row[: len(written)] = torch.tensor([words.index(word) for word in written])
    return rows


def preprocess(
    canvases: Float[Tensor, "batch 1 height width"],
) -> Float[Tensor, "batch 3 height width"]:
    """Prepare gray images for :func:`clip`: center their values and repeat them in three channels.

    Args:
        canvases: Images of 32 x 32 pixels in [0, 1], such as those of :func:`on_canvases`.

    Returns:
        A view of new images.
    """
    return (canvases - 0.5).expand(-1, 3, -1, -1)


@cache
def _words() -> list[str]:
    """Read the words of the CLIP: padding, start, words in order, end."""
    words: list[str] = json.loads(texts_of(_CLIP.read_bytes())["words"])
    return words
