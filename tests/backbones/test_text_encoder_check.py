"""The check of text encoders: right ones pass, and each wrong one fails on its line."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch.nn as nn

from clips import NAMES, TOKENIZER, TOWERS, make_clip
from fedprompt import TextTower
from fedprompt.check import text_encoder as check_text_encoder
from fedprompt.interfaces import PromptedText

RIGHT = ["CLIP", "custom text, custom blocks", "both ways, end of text", "both ways, last"]


@pytest.mark.parametrize(("kind", "chunk"), [("CLIP", None), *((kind, 4) for kind in RIGHT)])
def test_the_library_passes(kind, chunk):
    model = make_clip(**TOWERS[kind])
    tower = TextTower(model, TOKENIZER, class_chunk=chunk)
    report = check_text_encoder(
        tower,
        tower.class_names(NAMES),
        words=tower.words("a photo of a"),
        expected=(1 + 1e-11)
        * model.encode_text(TOKENIZER([f"a photo of a {name}." for name in NAMES])),
    )
    assert report.passed, str(report)
    assert len(report.lines) == 12


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


# Encoders, and the line that fails.
WRONG = {
    "another width": (OtherWidth, "shape"),
    "squeezed": (lambda tower, text: tower(text).squeeze(0), "shape"),
    "classes first": (lambda tower, text: tower(text).movedim(-2, -3), "shape"),
    "not finite": (lambda tower, text: tower(text).log(), "shape"),
    "random": (lambda tower, text: nn.functional.dropout(1e-12 * tower(text), 0.5), "repeatable"),
    "sorted classes": (sorted_classes, "classes"),
    "centered": (centered, "classes"),
    "mixed contexts": (partial(centered, dim=-3, share=0.1), "contexts"),
    "reads padding": (reading_padding, "end of text"),
    "no suffix context": (without_suffix_context, "class-specific"),
    "one sample": (first_sample, "samples"),
    "another width without samples": (
        lambda tower, text: tower(text)[..., : 12 if len(text.prefix) else 11],
        "samples",
    ),
    "detached": (detached, "gradients"),
    "no finite gradient": (
        lambda tower, text: tower(text) + (0 * text.prefix).sum().sqrt(),
        "gradients",
    ),
    "trains": (Trains, "frozen"),
    "counts": (counting, "unchanged"),
    "copied": (Copied, "shared"),
    "scaled": (lambda tower, text: (1 + 1e-9) * tower(text), "same as the model"),
}


@pytest.mark.unhooked  # the wrong shapes would be refused by the hook
@pytest.mark.parametrize(("wrong", "expected"), WRONG.values(), ids=WRONG)
def test_wrong_encoders_fail_on_their_line(wrong, expected):
    model = make_clip()
    tower = TextTower(model, TOKENIZER)
    names = NAMES[2:5]  # not in the order of their lengths
    report = check_text_encoder(
        wrong(tower) if isinstance(wrong, type) else Wrapped(tower, wrong),
        tower.class_names(names),
        words=tower.words("a photo of a"),
        expected=model.encode_text(TOKENIZER([f"a photo of a {name}." for name in names])),
    )
    assert expected in report.failed, str(report)
    (line,) = (line for line in report.lines if line.name == expected)
    assert f"-> {line.remedy}" in str(report)


def test_without_the_models_features_they_are_not_judged():
    tower = TextTower(make_clip(**TOWERS["both ways, last"]), TOKENIZER)
    report = check_text_encoder(tower, tower.class_names(NAMES[:2]))
    open_lines = [line.name for line in report.lines if line.passed is None]
    assert open_lines == ["same as the model"]
    assert "-> give `words` and the model's features" in str(report)
    assert report.passed


def test_other_objects_have_one_line():
    names = TextTower(make_clip(), TOKENIZER).class_names(NAMES[:2])
    assert check_text_encoder(3, names).failed == ("members",)
