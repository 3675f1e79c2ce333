"""Small frozen networks: two ViTs of printed characters, and a CLIP of emoji.

``examples/build_samples`` in the repository trained them.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn as nn
from jaxtyping import Float, Int
from safetensors.torch import load
from torch import Tensor

import fedprompt._refusals as check
from fedprompt._trees import texts_of
from fedprompt.backbones.preparation import Preparation
from fedprompt.backbones.pretrained import SAMPLES
from fedprompt.samples._words import WordPieces

_SIZES = ("S", "B")
_FOLDER = Path(__file__).parent
_CLIP = _FOLDER / "clip.safetensors"


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
    """Load a small CLIP of open_clip that was trained on emoji and their names.

    Its parameters are float32. Its images are those of :func:`emoji`, prepared by
    :func:`preprocess`, and its tokenizer is :func:`tokenize`. It has not seen the concepts of
    :func:`emoji`, and no caption of its training was made from ``CLASS_NAMES``.

    Returns:
        A new model in eval mode, for images of 3 x 32 x 32 pixels in 64 patches.

    Example:
        >>> tower = TextTower(samples.clip(), samples.tokenize)
        >>> tower.dim, len(tower.class_names(samples.CLASS_NAMES).names)
        (96, 24)
    """
    from open_clip.model import CLIP

    model = _read(_CLIP, CLIP).eval()
    visual: Any = model.visual
    visual.preprocess_cfg = {"size": 32, "mean": (0.5,) * 3, "std": (1.0,) * 3}
    return model


def tokenize(texts: str | list[str], context_length: int = 24) -> Int[Tensor, "texts length"]:
    """Tokenize texts for :func:`clip`, in the layout of open_clip's tokenizers.

    A row contains the start, the ids of word pieces (byte pair encoding), the end and padding.
    Upper case, accents and signs are ignored.

    Args:
        texts: English texts, such as "an emoji of a penguin.", or one text. Texts that are too
            long are cut.
        context_length: Length of a row.

    Returns:
        Token ids.

    Example:
        >>> rows = samples.tokenize(["a penguin.", "A penguin."], 9)
        >>> rows.shape, bool((rows[0] == rows[1]).all())
        (torch.Size([2, 9]), True)
    """
    texts = [texts] if isinstance(texts, str) else texts
    return _pieces()(texts, context_length)


def preprocess(
    images: Float[Tensor, "batch channels height width"],
) -> Float[Tensor, "batch 3 height width"]:
    """Prepare images for :func:`clip`: center their values, and make gray images colored.

    Args:
        images: Images of 32 x 32 pixels in [0, 1], with one or three channels.

    Returns:
        New images, or a view of new images.

    Example:
        >>> samples.clip().encode_image(samples.preprocess(torch.rand(2, 1, 32, 32))).shape
        torch.Size([2, 96])
    """
    return (images - 0.5).expand(-1, 3, -1, -1)


def _read(path: Path, make: Callable[..., nn.Module]) -> nn.Module:
    """Make a network by the architecture in a file, and load its weights."""
    blob = path.read_bytes()
    with torch.random.fork_rng(devices=[]):  # the initial values are overwritten
        model = make(**json.loads(texts_of(blob)["architecture"]))
    model.load_state_dict(load(blob))
    return model


@cache
def _pieces() -> WordPieces:
    """Read the tokenizer of the CLIP."""
    return WordPieces(tuple(json.loads(texts_of(_CLIP.read_bytes())["merges"])))


SAMPLES["emoji"] = lambda: (clip(), tokenize, Preparation((32, 32), (0.5,) * 3, (1.0,) * 3))
SAMPLES["digits-S"] = lambda: (vit("S"), None, Preparation((16, 16), (0.0,), (1.0,)))
SAMPLES["digits-B"] = lambda: (vit("B"), None, Preparation((16, 16), (0.0,), (1.0,)))
