"""Small CLIP models with random weights, in float64, and tokenizers that write around a text what open_clip's do."""

import re
from collections.abc import Sequence

import open_clip
import torch
import torch.nn as nn
from torch import Tensor

CONTEXT_LENGTH = 24
EMBED_DIM = 12
TEXT = {"context_length": CONTEXT_LENGTH, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 2}
VISION = {"layers": 2, "width": 16, "head_width": 8, "patch_size": 8, "image_size": 16}
TOKENIZER = open_clip.tokenizer.SimpleTokenizer(context_length=CONTEXT_LENGTH)

# Of 1, 2, 3 and more tokens, and more than share one row of the tower, to an uneven number.
NAMES = (
    "cat",
    "golden retriever",
    "Boeing 737-800",
    "sulphur-crested cockatoo",
    "yurt",
    "dog",
    "polar bear",
    "oak",
    "elm",
    "ash",
    "fig",
)


def make_clip(
    *, custom: bool = False, vision: dict | None = None, quick_gelu: bool = False, **text: object
) -> nn.Module:
    kind = open_clip.model.CustomTextCLIP if custom else open_clip.model.CLIP
    return spread(
        kind(EMBED_DIM, VISION | (vision or {}), TEXT | text, quick_gelu=quick_gelu)
    ).eval()


def spread(model: nn.Module) -> nn.Module:
    """Draw all parameters anew, so that neither zeros nor equal channels hide a mistake; weights of norms lie around 1."""
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.double().named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        if parameter.ndim < 2:
            parameter.data = 0.3 * noise + float(name.endswith("weight"))
        else:
            parameter.data = noise * parameter[0].numel() ** -0.5
    return model


def draw(*shape: int, seed: int = 2) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class WordTokenizer:
    """One id for each word, by its order of appearance; a word that opens a text has another id where `opening` says so."""

    def __init__(
        self,
        *,
        start: Sequence[int] = (),
        end: Sequence[int] = (1,),
        pad: int = 0,
        stops: bool = True,
        opening: bool = False,
    ) -> None:
        self.start, self.end, self.pad, self.stops, self.opening = (
            list(start),
            list(end),
            pad,
            stops,
            opening,
        )
        self.ids: dict[str, int] = {}

    def __call__(self, texts: list[str], context_length: int = CONTEXT_LENGTH) -> Tensor:
        return torch.tensor([self.row(text, context_length) for text in texts])

    def row(self, text: str, length: int) -> list[int]:
        words = re.findall(r" ?\w+|\." if self.stops else r" ?\w+", text)
        if not self.opening:
            words = [word.strip() for word in words]
        ids = [self.ids.setdefault(word, 10 + len(self.ids)) for word in words]
        row = [*self.start, *ids][: length - len(self.end)] + self.end
        return row + [self.pad] * (length - len(row))
