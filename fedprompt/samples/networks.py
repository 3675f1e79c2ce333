"""Small frozen networks: two ViTs and a CLIP, trained on printed characters.

``examples/build_samples`` in the repository trained them.
"""

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Literal

import torch
import torch.nn as nn
from jaxtyping import Float, Int
from safetensors.torch import load
from torch import Tensor

import fedprompt._refusals as check
from fedprompt._trees import texts_of

_SIZES = ("S", "B")
_FOLDER = Path(__file__).parent
_CLIP = _FOLDER / "clip.safetensors"
CLASS_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
"""Names of the digits, in words of :func:`tokenize`."""

_OPENINGS = {"": "a", "plain": "a plain", "inverted": "an inverted", "noisy": "a noisy"}
_FORMS = ("{} photo of a {{}}.", "{} picture of the {{}}.", "{} drawing of a {{}}.")
TEMPLATES = {
    style: tuple(form.format(opening) for form in _FORMS) for style, opening in _OPENINGS.items()
}
"""Captions that the CLIP was trained with, by the domain that they name. ``""`` names none."""


def vit(size: Literal["S", "B"], *, with_head: bool = False) -> nn.Module:
    """Load a vision transformer of timm that was trained on printed digits and letters.

    It has a class token and 16 patches of 4 x 4 pixels. Its parameters are float32.

    Args:
        size: "S" (48 wide, 3 blocks, 3 heads) or "B" (64 wide, 4 blocks, 4 heads).
        with_head: If true, keep the classifier of 47 printed characters, of which the digits are
            the first ten. Otherwise the model returns features, like a timm model with
            ``num_classes=0``.

    Returns:
        A new model in eval mode, for images of 1 x 16 x 16 pixels.

    Raises:
        ValueError: If `size` is unknown.

    Example:
        >>> samples.vit("B")(samples.digits().test_images[:2]).shape
        torch.Size([2, 64])
    """
    if size not in _SIZES:
        raise check.wrong("size", f"be one of {', '.join(map(repr, _SIZES))}", repr(size))
    return _read_vit(_FOLDER / f"vit_{size.lower()}.safetensors", with_head=with_head)


def _read_vit(path: Path, *, with_head: bool = False) -> nn.Module:
    """Load a vision transformer from a file of ``examples/build_samples``, as :func:`vit` does."""
    from timm.models.vision_transformer import VisionTransformer

    model = _read(path, VisionTransformer)
    if not with_head:
        model.reset_classifier(0)  # type: ignore[operator]
    return model.eval()


def clip() -> nn.Module:
    """Load a CLIP of open_clip that was trained on captions of printed digits and letters.

    Its parameters are float32. Its images are those of :func:`preprocess`, and its tokenizer is
    :func:`tokenize`.

    Returns:
        A new model in eval mode, for images of 3 x 32 x 32 pixels in 64 patches.

    Example:
        >>> tower = TextTower(samples.clip(), samples.tokenize)
        >>> tower.dim, len(tower.class_names(samples.CLASS_NAMES).names)
        (64, 10)
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

    Example:
        >>> samples.tokenize(["a photo of a three."], 9).tolist()
        [[1, 29, 40, 38, 29, 47, 2, 50, 0]]
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

    Example:
        >>> samples.clip().encode_image(samples.preprocess(torch.rand(2, 1, 32, 32))).shape
        torch.Size([2, 64])
    """
    return (canvases - 0.5).expand(-1, 3, -1, -1)


def _read(path: Path, make: Callable[..., nn.Module]) -> nn.Module:
    """Make a network by the architecture in a file, and load its weights."""
    blob = path.read_bytes()
    with torch.random.fork_rng(devices=[]):  # the initial values are overwritten
        model = make(**json.loads(texts_of(blob)["architecture"]))
    model.load_state_dict(load(blob))
    return model


@cache
def _words() -> list[str]:
    """Read the words of the CLIP: padding, start, words in order, end."""
    words: list[str] = json.loads(texts_of(_CLIP.read_bytes())["words"])
    return words
