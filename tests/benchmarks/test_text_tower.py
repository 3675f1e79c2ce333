"""Costs of a text tower with two contexts of 16 tokens for 100 classes.

Sentences of 77 tokens are compared with the shorter sentences of the library, for a forward and a
backward pass. The tower has CLIP's architecture with random weights, width 256 and two layers.
"""

from functools import partial
from itertools import product

import open_clip
import pytest
import torch

from fedprompt import ContextPrompts, TextTower, prompted_text
from references.published_step import whole_sentences
from tolerance import assert_near

pytestmark = pytest.mark.benchmark
COLORS = ("red", "blue", "green", "black", "white", "grey", "brown", "yellow", "pink", "golden")
THINGS = ("cat", "dog", "horse", "bird", "car", "boat", "tree", "fence", "road", "lamp")
NAMES = [
    f"{color} {thing}" for color, thing in product(COLORS, THINGS)
]  # four tokens each, with the full stop and the end of text


@pytest.fixture(scope="module")
def clip_model():
    vision = {"layers": 1, "width": 8, "head_width": 8, "patch_size": 8, "image_size": 8}
    text = {"context_length": 77, "vocab_size": 49408, "width": 256, "heads": 4, "layers": 2}
    return open_clip.model.CLIP(256, vision, text)


def truncated(tower, names, context):
    """Encode sentences that end at the end of text.

    The context is expanded to a class-specific one, so that no prefix is shared.
    """
    own = context[:, None].expand(-1, len(NAMES), -1, -1)
    return tower(prompted_text(own, names, class_specific=True))


def shared(tower, names, context):
    return tower(prompted_text(context, names, class_specific=context.ndim == 4))


def step(encode, tower, names, context):
    (gradient,) = torch.autograd.grad(encode(tower, names, context).square().sum(), context)
    return gradient


def test_text_tower(meter, clip_model):
    tower = TextTower(clip_model, open_clip.tokenizer.SimpleTokenizer())
    prompts = ContextPrompts(tower.dim, num_contexts=2, generator=torch.Generator().manual_seed(0))
    setting = (tower, tower.class_names(NAMES), prompts())
    calls = {
        encode.__name__: partial(step, encode, *setting)
        for encode in (whole_sentences, truncated, shared)
    }
    expected = calls["whole_sentences"]()
    for call in calls.values():
        assert_near(call(), expected)
    seconds, peak = meter.seconds(**calls), meter.peak_bytes(**calls)
    for way, time, memory in (("truncated", 3.3, None), ("shared", 12.0, 9.0)):
        meter.report(
            f"text tower, forward and backward: whole / {way}, time",
            seconds["whole_sentences"] / seconds[way],
            at_least=time,
        )
        meter.report(
            f"text tower, forward and backward: whole / {way}, memory",
            peak["whole_sentences"] / peak[way],
            at_least=memory,
        )


def test_class_chunks(meter, clip_model):
    """Chunks of classes need less memory, and a second forward pass."""
    chunks = {"all": None, "chunks": 20}
    towers = {
        name: TextTower(clip_model, open_clip.tokenizer.SimpleTokenizer(), class_chunk=chunk)
        for name, chunk in chunks.items()
    }
    names = towers["all"].class_names(NAMES)
    context = ContextPrompts(
        towers["all"].dim,
        num_contexts=2,
        num_classes=len(NAMES),
        generator=torch.Generator().manual_seed(0),
    )()
    calls = {name: partial(step, shared, tower, names, context) for name, tower in towers.items()}
    seconds, peak = meter.seconds(**calls), meter.peak_bytes(**calls)
    meter.report(
        "class-specific contexts: all classes / chunks of a fifth, memory",
        peak["all"] / peak["chunks"],
        at_least=2.0,
    )
    meter.report(
        "class-specific contexts: chunks of a fifth / all classes, time",
        seconds["chunks"] / seconds["all"],
        at_most=1.8,
    )
