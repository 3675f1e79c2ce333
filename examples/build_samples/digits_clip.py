"""A small CLIP of printed digits and letters, for the tasks whose records were made with it.

Its file is kept as it is. The program that trained it is in the history of the repository only
(`examples/build_samples/build_clip.py`).
"""

import json
import re
from functools import cache
from pathlib import Path

import torch
import torch.nn as nn
from jaxtyping import Int
from torch import Tensor

from fedprompt._trees import texts_of
from fedprompt.samples.networks import _read

_CLIP = Path(__file__).with_name("digits_clip.safetensors")
CLASS_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
"""Names of the digits, in words of :func:`tokenize`."""


def clip() -> nn.Module:
    """Load a CLIP of open_clip that was trained on captions of printed digits and letters.

    Its parameters are float32. Its images are those of `fedprompt.samples.preprocess`, and its
    tokenizer is :func:`tokenize`.

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
    """
    words = _words()
    rows = torch.zeros(len(texts), context_length, dtype=torch.long)
    for row, text in zip(rows, texts, strict=True):
        written = ["<start>", *re.findall(r"\w+|\.", text)[: context_length - 2], "<eot>"]
        row[: len(written)] = torch.tensor([words.index(word) for word in written])
    return rows


@cache
def _words() -> list[str]:
    """Read the words of the CLIP: padding, start, words in order, end."""
    words: list[str] = json.loads(texts_of(_CLIP.read_bytes())["words"])
    return words
