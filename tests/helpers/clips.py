"""Small CLIP models with random weights in float64, and tokenizers with other special tokens."""

import copy
import re
from collections.abc import Callable, Sequence

import open_clip
import torch
import torch.nn as nn
from torch import Tensor

CONTEXT_LENGTH = 24
EMBED_DIM = 12
TEXT = {"context_length": CONTEXT_LENGTH, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 2}
VISION = {"layers": 2, "width": 16, "head_width": 8, "patch_size": 8, "image_size": 16}
TOKENIZER = open_clip.tokenizer.SimpleTokenizer(context_length=CONTEXT_LENGTH)

# Names of 1, 2, 3 and more tokens. The tower needs several rows for them, the last one not full.
NAMES = (
    "cat", "golden retriever", "Boeing 737-800", "sulphur-crested cockatoo", "yurt", "dog",
    "polar bear", "oak", "elm", "ash", "fig",
)  # fmt: skip

CUSTOM_BLOCK = {
    "qk_norm": True, "scale_heads": True, "scale_attn_inner": True, "scale_attn": True,
    "scale_fc": True, "ls_init_value": 0.5,
}  # fmt: skip
BOTH_WAYS = {"custom": True, "no_causal_mask": True}
BY_ID = {"pool_type": "eos", "eos_id": 49407, "vocab_size": 49410}  # not the last id
TOWERS = {
    "CLIP": {},
    "CLIP, QuickGELU": {"quick_gelu": True},
    "custom text": {"custom": True},
    "custom text, projection with bias": {"custom": True, "proj_bias": True},
    "custom text, no projection": {"custom": True, "proj_type": "none"},
    "custom text, end of text by id": {"custom": True, **BY_ID},
    "custom text, custom blocks": {"custom": True, **CUSTOM_BLOCK},
    "both ways, end of text": BOTH_WAYS,
    "both ways, last": {**BOTH_WAYS, "pool_type": "last"},
    "both ways, first": {**BOTH_WAYS, "pool_type": "first"},
    "causal, last": {"custom": True, "pool_type": "last"},
}


DRAWN: dict[str, nn.Module] = {}


def copy_of(key: str, make: Callable[[], nn.Module]) -> nn.Module:
    """Copy a model, which is made once: its vocabulary takes ten times longer to draw."""
    if key not in DRAWN:
        DRAWN[key] = make()
    return copy.deepcopy(DRAWN[key])


def make_clip(
    *, custom: bool = False, vision: dict | None = None, quick_gelu: bool = False, **text: object
) -> nn.Module:
    """Make a new model in eval mode; equal arguments give equal weights."""
    kind = open_clip.model.CustomTextCLIP if custom else open_clip.model.CLIP
    sizes = (EMBED_DIM, VISION | (vision or {}), TEXT | text)
    return copy_of(
        f"{kind.__name__} {sizes} {quick_gelu}",
        lambda: spread(kind(*sizes, quick_gelu=quick_gelu)).eval(),
    )


def spread(model: nn.Module) -> nn.Module:
    """Draw all parameters, so that neither zeros nor equal channels hide a mistake.

    Weights of norms are drawn around 1.
    """
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
    """Tokenizer with one id for each word, in the order of appearance.

    If `opening`, the first word of a text has another id than elsewhere.
    """

    def __init__(
        self,
        *,
        start: Sequence[int] = (),
        end: Sequence[int] = (1,),
        pad: int = 0,
        stops: bool = True,
        opening: bool = False,
    ) -> None:
        self.start, self.end = list(start), list(end)
        self.pad = pad
        self.stops = stops
        self.opening = opening
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
