"""Checks of own trunks and text encoders: the library's pass, and each mistake is named."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn as nn

from clips import NAMES, TOKENIZER, TOWERS, make_clip
from fedprompt import TextTower, check
from fedprompt.interfaces import PromptedText
from own_trunks import WRONG, AnotherModel, NormalizeIsTheIdentity, PaddedImages, PlainTrunk

IMAGES = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
OTHER = torch.randn(3, 3, 17, 19, generator=torch.Generator().manual_seed(0))
ERRORS = (TypeError, ValueError, RuntimeError)


@pytest.mark.bad_input
@pytest.mark.parametrize(("make", "message"), WRONG.values(), ids=WRONG)
def test_each_mistake_of_a_trunk_is_named(make, message):
    with pytest.raises(ERRORS, match=re.escape(message)):
        check.trunk(make(), IMAGES.clone())


def test_right_trunks_pass():
    trunk = PlainTrunk()
    check.trunk(trunk, IMAGES, trunk.forward)
    check.trunk(AnotherModel(), IMAGES)  # without the model's features
    for each in (PlainTrunk(), PaddedImages(patches=25)):  # the rest is left out, or padded
        check.trunk(each, OTHER)
    without_norm = NormalizeIsTheIdentity()
    without_norm.pool = lambda tokens: tokens[:, 0]
    check.trunk(without_norm, IMAGES)


@pytest.mark.parametrize(("dtype", "right", "wrong"), [
    (torch.float64, 1e-11, 1e-7), (torch.float32, 1e-5, 1e-3), (torch.bfloat16, 1e-2, 1e-1),
])  # fmt: skip
def test_features_may_differ_by_the_rounding_of_their_dtype(dtype, right, wrong):
    trunk = PlainTrunk()
    trunk.model.to(dtype)
    trunk.mask = trunk.mask.to(dtype)
    images = IMAGES.to(dtype)
    expected = trunk.forward(images).double()
    check.trunk(trunk, images, lambda images: (1 + right) * expected)
    with pytest.raises(ValueError, match="`trunk` must equal `forward`; compare embed"):
        check.trunk(trunk, images, lambda images: (1 + wrong) * expected)


@pytest.mark.bad_input
def test_the_modules_of_a_trunk_must_be_found():
    own = PlainTrunk()
    members = ("prefix", "dim", "depth", "num_features", "patch_size")
    members += ("embed", "block", "normalize", "pool")
    hidden = type("Hidden", (), {name: getattr(own, name) for name in members})()
    with pytest.raises(TypeError, match=r"`trunk` must .* keep its nn\.Module as `model`"):
        check.trunk(hidden, IMAGES)
    type(hidden).__deepcopy__ = lambda self, memo: self
    hidden.parts = [own.model]  # or as attributes, also in a list
    check.trunk(hidden, IMAGES)
    own.model.norm.requires_grad_(True)
    with pytest.raises(ValueError, match=r"`trunk` must be frozen.*: parts\.0\.norm\.weight"):
        check.trunk(hidden, IMAGES)


RIGHT = ["CLIP", "custom text, custom blocks", "both ways, end of text", "both ways, last"]


@dataclass
class Wrapped:
    """A tower whose calls a function changes."""

    tower: TextTower
    change: Callable = lambda tower, text: tower(text)
    dim: int = 16

    def __post_init__(self):
        self.model = self.tower.model

    def __deepcopy__(self, memo):
        return self

    def __call__(self, text):
        return self.change(self.tower, text)


def sorted_classes(tower, text):
    """Return the classes in the order of their lengths."""
    order = sorted(range(len(text.end)), key=text.end.__getitem__)
    return tower(text)[..., order, :]


def without_suffix_context(tower, text):
    """Drop the tokens before the last few of the suffix."""
    if text.context is None:
        cut = text.suffix[..., 3:, :]
        text = PromptedText(text.prefix, cut, tuple(end - 3 for end in text.end))
    return tower(text)


def first_sample(tower, text):
    if text.prefix.ndim == 4:
        prefix, suffix = (part[0] for part in text[:2])
        return tower(text._replace(prefix=prefix, suffix=suffix))[None]
    return tower(text)


def reading_padding(tower, text):
    length = text.prefix.shape[-2] + text.suffix.shape[-2]
    return tower(text._replace(end=(length - 1,) * len(text.end)))


def counting(tower, text):
    """Change a weight in every call."""
    tower.model.logit_scale.data += 1
    return tower(text)


def detached(tower, text):
    return tower(text._replace(prefix=text.prefix.detach())) + 0 * text.prefix.sum()


class OtherWidth(Wrapped):
    dim = property(lambda self: 12, lambda self, value: None)


class Trains(Wrapped):
    def __post_init__(self):
        self.model = nn.Linear(2, 2)


class Copied(Wrapped):
    def __deepcopy__(self, memo):
        return type(self)(self.tower)


def centered(tower, text, dim=-2, share=-1.0):
    features = tower(text)
    return features + share * features.mean(dim, keepdim=True)


# Encoders, and the rules that they break.
WRONG_ENCODERS = {
    "another width": (OtherWidth, "`encoder.dim` must be the width of tokens, 16; got 12"),
    "squeezed": (lambda tower, text: tower(text).squeeze(0), "return features of shape (1, 3)"),
    "classes first": (lambda tower, text: tower(text).movedim(-2, -3), "return features of shape"),
    "not finite": (lambda tower, text: tower(text).log(), "return finite features"),
    "random": (lambda tower, text: nn.functional.dropout(tower(text), 0.5), "the same features"),
    "sorted classes": (sorted_classes, "keep the order of classes"),
    "centered": (centered, "keep the order of classes"),
    "mixed contexts": (partial(centered, dim=-3, share=0.1), "that no other context reads"),
    "reads padding": (reading_padding, "read at `text.end` under a causal mask"),
    "no suffix context": (without_suffix_context, "read a class-specific context"),
    "one sample": (first_sample, "keep all axes in front of the contexts"),
    "another width without samples": (
        lambda tower, text: tower(text)[..., : 12 if len(text.prefix) else 11],
        "keep all axes in front of the contexts",
    ),
    "detached": (detached, "got no gradient of context 0"),
    "no finite gradient": (
        lambda tower, text: tower(text) + (0 * text.prefix).sum().sqrt(),
        "got a gradient of NaN for context 0",
    ),
    "trains": (Trains, "be frozen"),
    "counts": (counting, "got changes of logit_scale"),
    "copied": (Copied, "be shared by clients"),
    "scaled": (lambda tower, text: (1 + 1e-9) * tower(text), "`encoder` must equal `expected`"),
}


@pytest.mark.unhooked  # the wrong shapes would be refused by the hook
@pytest.mark.parametrize(("wrong", "message"), WRONG_ENCODERS.values(), ids=WRONG_ENCODERS)
def test_each_mistake_of_a_text_encoder_is_named(wrong, message):
    model = make_clip()
    tower = TextTower(model, TOKENIZER)
    names = NAMES[2:5]  # not in the order of their lengths
    with pytest.raises(ValueError, match=re.escape(message)):
        check.text_encoder(
            wrong(tower) if isinstance(wrong, type) else Wrapped(tower, wrong),
            tower.class_names(names),
            words=tower.words("a photo of a"),
            expected=model.encode_text(TOKENIZER([f"a photo of a {name}." for name in names])),
        )


@pytest.mark.parametrize(("kind", "chunk"), [("CLIP", None), *((kind, 4) for kind in RIGHT)])
def test_text_towers_pass(kind, chunk):
    model = make_clip(**TOWERS[kind])
    tower = TextTower(model, TOKENIZER, class_chunk=chunk)
    expected = model.encode_text(TOKENIZER([f"a photo of a {name}." for name in NAMES]))
    check.text_encoder(tower, tower.class_names(NAMES))
    check.text_encoder(
        tower,
        tower.class_names(NAMES),
        words=tower.words("a photo of a"),
        expected=(1 + 1e-11) * expected,
    )
