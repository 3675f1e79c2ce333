"""The frozen tiny CLIP: its words, its captions and its weights file."""

import json
import re
from pathlib import Path
from typing import Any

import open_clip
import torch
from jaxtyping import Float, Int
from torch import Tensor

from embedded.canvas import Canvases
from embedded.glyphs import CLASSES
from embedded.vit import FOLDER, load_metadata, load_weights, save_weights

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
NAMES = (*DIGITS, *(name if name.isupper() else f"small {name.upper()}" for name in CLASSES[10:]))
STYLES = ("plain", "inverted", "noisy")  # a caption names one of them or none
_OPENINGS = {"": "a", "plain": "a plain", "inverted": "an inverted", "noisy": "a noisy"}
_FORMS = ("{} photo of a {{}}.", "{} picture of the {{}}.", "{} drawing of a {{}}.")
TEMPLATES = {
    style: tuple(form.format(opening) for form in _FORMS) for style, opening in _OPENINGS.items()
}
_SPOKEN = " ".join([*NAMES, *(form.format("") for forms in TEMPLATES.values() for form in forms)])
# The end token has the highest id, at which a CLIP pools.
WORDS = (
    "<pad>",
    "<start>",
    *sorted(set(re.findall(r"\w+|\.", _SPOKEN))),
    "<eot>",
)
ARCHITECTURE: dict[str, Any] = {
    "embed_dim": 64,
    "vision_cfg": {"layers": 3, "width": 64, "head_width": 16, "patch_size": 4, "image_size": 32},
    "text_cfg": {
        "context_length": 24,
        "vocab_size": len(WORDS),
        "width": 64,
        "heads": 4,
        "layers": 2,
    },
}


def tokenize(
    texts: list[str], context_length: int = ARCHITECTURE["text_cfg"]["context_length"]
) -> Int[Tensor, "texts length"]:
    """Return one id for each word or full stop, in the layout of open_clip's tokenizers.

    A row contains start, words, end and padding. Texts that are too long are cut.

    Raises:
        ValueError: If a word is not among `WORDS`.

    Example:
        >>> [WORDS[index] for index in tokenize(["a photo of a three."], 9)[0]]
        ['<start>', 'a', 'photo', 'of', 'a', 'three', '.', '<eot>', '<pad>']
    """
    rows = torch.zeros(len(texts), context_length, dtype=torch.long)
    for row, text in zip(rows, texts, strict=True):
        words = re.findall(r"\w+|\.", text)
        if unknown := set(words) - set(WORDS[2:-1]):
            raise ValueError(
                f"`texts` must be written in the {len(WORDS) - 3} words of the embedded CLIP; "
                f"got {sorted(unknown)}."
            )
        written = ["<start>", *words[: context_length - 2], "<eot>"]
        row[: len(written)] = torch.tensor([WORDS.index(word) for word in written])
    return rows


def preprocess(canvases: Canvases) -> Float[Tensor, "batch 3 side side"]:
    """Center the values of gray images at 0 and repeat them in three channels."""
    return (canvases - 0.5).expand(-1, 3, -1, -1)


def weights_path(folder: Path = FOLDER) -> Path:
    """Return the path of the weights, by default of the committed ones."""
    return folder / "clip.safetensors"


def new_clip(*, seed: int) -> open_clip.model.CLIP:
    """Build an untrained CLIP in eval mode, without changing the global random state."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return open_clip.model.CLIP(**ARCHITECTURE).eval()


def save_clip(model: open_clip.model.CLIP, path: Path, **measured: str) -> None:
    """Write the weights in half precision, with the architecture, the words and measured values."""
    save_weights(
        model,
        path,
        measured
        | {"architecture": json.dumps(ARCHITECTURE, sort_keys=True), "words": json.dumps(WORDS)},
    )


def load_clip(folder: Path = FOLDER) -> open_clip.model.CLIP:
    """Load the pretrained CLIP in float32 and eval mode.

    Images have 3 x 32 x 32 pixels and 64 patches.

    Raises:
        ValueError: If the file belongs to another architecture or vocabulary, or is corrupted.

    Example:
        >>> load_clip().encode_text(tokenize(["a photo of a three."])).shape
        torch.Size([1, 64])
    """
    model, path = new_clip(seed=0), weights_path(folder)
    metadata = load_metadata(path)
    written = json.loads(metadata["architecture"]) | {"words": json.loads(metadata["words"])}
    load_weights(model, path, written, expected=ARCHITECTURE | {"words": list(WORDS)})
    return model
