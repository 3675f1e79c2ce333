"""Deep text prompts, against hooks that overwrite positions in open_clip's own tower."""

from contextlib import contextmanager
from functools import partial

import pytest
import torch

from clips import TOKENIZER, TOWERS, draw, make_clip
from fedprompt import LayeredPrompts, TextTower, prompted_text
from fedprompt.interfaces import PromptStream
from references import coop
from tolerance import assert_near

LENGTH = 5
NAMES = ("cat", "golden retriever", "Boeing 737-800", "dog")
KINDS = ["CLIP", "custom text, custom blocks", "both ways, end of text"]


def make_tower(kind="CLIP", **options):
    return TextTower(make_clip(**TOWERS[kind], layers=3), TOKENIZER, **options)


@contextmanager
def overwritten(model, layers, start=1):
    """Overwrite positions of every sentence before some blocks, the start token excluded."""
    text = getattr(model, "text", model)

    def overwrite(_, inputs, *, tokens):
        hidden = inputs[0].clone()
        hidden[:, start : start + len(tokens)] = tokens
        return (hidden, *inputs[1:])

    hooks = [
        text.transformer.resblocks[layer].register_forward_pre_hook(
            partial(overwrite, tokens=tokens)
        )
        for layer, tokens in layers.items()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def expected(tower, context, layers, start=1):
    with overwritten(tower.model, layers, start):
        return coop.text_features(tower.model, TOKENIZER, context, NAMES, LENGTH)


def gradients(features, *inputs):
    return torch.autograd.grad(
        (features * draw(*features.shape, seed=5)).sum(), inputs, retain_graph=True
    )


@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_deep_prompts_overwrite_the_context_before_later_blocks(kind, chunk):
    tower = make_tower(kind, class_chunk=chunk)
    inputs = [
        draw(2, LENGTH, 16, seed=seed)[:rows].requires_grad_() for seed, rows in ((1, 2), (3, 1))
    ]
    context, deep = inputs
    stream = PromptStream({1: deep[0], 2: -2 * deep[0]}, replace=True)
    features = tower(prompted_text(context, tower.class_names(NAMES)), stream)
    wanted = expected(tower, context, stream.layers)
    assert_near(features, wanted)
    for actual, reference in zip(
        gradients(features, *inputs), gradients(wanted, *inputs), strict=True
    ):
        assert_near(actual, reference)


def test_streams_replace_the_context_in_their_order():
    """A shared and a private stream, and only one of them enters before block 2."""
    tower = make_tower()
    context = draw(2, LENGTH, 16)
    first, second = draw(2, 16, seed=6), draw(3, 16, seed=7)
    features = tower(
        prompted_text(context, tower.class_names(NAMES)),
        PromptStream({1: first}, replace=True),
        PromptStream({1: second, 2: 2 * second}, replace=True),
    )
    with overwritten(tower.model, {2: 2 * second}, start=3):
        assert_near(features, expected(tower, context, {1: torch.cat([first, second])}))


def test_each_context_may_have_deep_prompts():
    tower = make_tower()
    context, deep = draw(2, LENGTH, 16), draw(2, LENGTH, 16, seed=8)
    names = tower.class_names(NAMES)
    features = tower(prompted_text(context, names), PromptStream({2: deep}, replace=True))
    for number in range(2):
        assert_near(
            features[number : number + 1], expected(tower, context[[number]], {2: deep[number]})
        )


def test_each_sample_may_have_deep_prompts():
    tower = make_tower()
    contexts, deep = draw(3, 2, LENGTH, 16), draw(3, 2, LENGTH, 16, seed=8)
    names = tower.class_names(NAMES)
    features = tower(
        prompted_text(contexts, names, per_sample=True), PromptStream({2: deep}, replace=True)
    )
    for context, own, result in zip(contexts, deep, features, strict=True):
        alone = tower(prompted_text(context, names), PromptStream({2: own}, replace=True))
        assert_near(result, alone)


def test_layered_prompts_are_the_deep_prompts_of_a_tower():
    tower = make_tower()
    prompts = LayeredPrompts(LENGTH, tower.dim, layers=range(1, tower.depth), replace=True)
    features = tower(prompted_text(draw(1, LENGTH, 16), tower.class_names(NAMES)), prompts())
    features.sum().backward()
    assert (prompts.tokens.grad.abs().sum((1, 2)) > 0).all()
