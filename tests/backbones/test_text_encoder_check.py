"""The check of text encoders: right ones pass, and each wrong one fails on its line."""

from dataclasses import dataclass

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
        expected=model.encode_text(TOKENIZER([f"a photo of a {name}." for name in NAMES])),
    )
    assert report.passed, str(report)
    assert len(report.lines) == 12


@dataclass
class Wrapped:
    """A tower with one mistake."""

    tower: TextTower
    dim: int = 16

    def __post_init__(self):
        self.model = self.tower.model

    def __deepcopy__(self, memo):
        return self

    def __call__(self, text):
        return self.tower(text)


class OtherWidth(Wrapped):
    dim = property(lambda self: 12, lambda self, value: None)


class Squeezed(Wrapped):
    def __call__(self, text):
        return self.tower(text).squeeze(0)


class Random(Wrapped):
    def __call__(self, text):
        return nn.functional.dropout(self.tower(text), 0.5)


class SortedClasses(Wrapped):
    """Classes come back in the order of their lengths."""

    def __call__(self, text):
        order = sorted(range(len(text.end)), key=text.end.__getitem__)
        return self.tower(text)[..., order, :]


class Centered(Wrapped):
    def __call__(self, text):
        features = self.tower(text)
        return features - features.mean(-2, keepdim=True)


class MixedContexts(Wrapped):
    def __call__(self, text):
        features = self.tower(text)
        return features + 0.1 * features.mean(-3, keepdim=True)


class ReadsPadding(Wrapped):
    def __call__(self, text):
        length = text.prefix.shape[-2] + text.suffix.shape[-2]
        return self.tower(text._replace(end=(length - 1,) * len(text.end)))


class IgnoresSuffixContext(Wrapped):
    """Tokens before the last few of the suffix are dropped."""

    def __call__(self, text):
        if text.context is None:
            cut = text.suffix[..., 3:, :]
            text = PromptedText(text.prefix, cut, tuple(end - 3 for end in text.end))
        return self.tower(text)


class OneSample(Wrapped):
    def __call__(self, text):
        if text.prefix.ndim == 4:
            prefix, suffix = (part[0] for part in text[:2])
            return self.tower(text._replace(prefix=prefix, suffix=suffix))[None]
        return self.tower(text)


class Detached(Wrapped):
    def __call__(self, text):
        return self.tower(text._replace(prefix=text.prefix.detach())) + 0 * text.prefix.sum()


class Trains(Wrapped):
    def __post_init__(self):
        self.model = nn.Linear(2, 2)


class Counts(Wrapped):
    """A weight changes in every call."""

    def __call__(self, text):
        self.model.logit_scale.data += 1
        return self.tower(text)


class Copied(Wrapped):
    def __deepcopy__(self, memo):
        return type(self)(self.tower)


class Scaled(Wrapped):
    def __call__(self, text):
        return 1.01 * self.tower(text)


WRONG = {
    OtherWidth: "shape", Squeezed: "shape", Random: "repeatable", SortedClasses: "classes",
    Centered: "classes", MixedContexts: "contexts", ReadsPadding: "end of text",
    IgnoresSuffixContext: "class-specific", OneSample: "samples", Detached: "gradients",
    Trains: "frozen", Counts: "unchanged", Copied: "shared", Scaled: "same as the model",
}  # fmt: skip


@pytest.mark.unhooked  # the wrong shapes would be refused by the hook
@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_wrong_encoders_fail_on_their_line(wrong):
    model = make_clip()
    tower = TextTower(model, TOKENIZER)
    names = NAMES[:5]
    report = check_text_encoder(
        wrong(tower),
        tower.class_names(names),
        words=tower.words("a photo of a"),
        expected=model.encode_text(TOKENIZER([f"a photo of a {name}." for name in names])),
    )
    assert WRONG[wrong] in report.failed, str(report)
    (line,) = (line for line in report.lines if line.name == WRONG[wrong])
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
