"""Arguments of prompts and prompted passes are refused by name, and their edges are taken."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nan, zeros

from fedprompt import (
    ContextPrompts,
    DeepPrompts,
    GroupPrompts,
    LayeredPrompts,
    LowRankContext,
    PadPrompts,
    PromptStream,
    ShallowPrompts,
    Weighted,
    encode_from,
    encode_front,
    encode_prompted,
    initialize_at,
    mean_patch_tokens,
    prompted_text,
    vit_trunk,
)
from fedprompt.interfaces import ClassNames
from models import draw_images, tiny_vit
from refusals import number, refused_and_taken

MODEL, NUMPY = tiny_vit(), np.random.default_rng(0)
TRUNK, IMAGES = vit_trunk(MODEL), draw_images(MODEL, 3)
TOKENS, LATE = (encode_front(TRUNK, IMAGES, start=start) for start in (1, 2))
NAMES = ClassNames(
    zeros(1, 1), zeros(3, 5, 1), (3, 5, 4), zeros(1), 16, True, ("a", "b", "c"), (2, 2, 2)
)
GROUPS, MEANS = GroupPrompts(4, 2, 12, layers=(1,)).double(), zeros(3, 12)
STREAM = PromptStream({0: zeros(1, 12)})


def floats(*shapes):
    """Wrong tensors in place of a good one, and tensors of wrong shapes."""
    return lambda good: [None, [[0.0]], good.int(), good / 0, good.to("meta"), *map(zeros, shapes)]


FLAG, DRAW = (["x", 1, None], [True, False]), ([NUMPY, 0], [None])
LAYERS = [3, (), (1, 1), (0, -1), (0, 1.0)], [(0,), (2, 0)]
SIDES = [0, 4.0, (4,), (3, 8, 8), (8, 8.0)], [1, (1, 2)]


def streams(*more):
    wrong = [zeros(2, 11), zeros(2, 12, device="meta"), zeros(2, 2, 12)]
    refused = [PromptStream({0: zeros(2, 12), 1: each}) for each in wrong]
    return [ShallowPrompts(1, 12), *refused, *more], [STREAM, PromptStream({1: zeros(3, 1, 12)})]


def mean(value=MEANS, weight=1.0):
    return Weighted(value, torch.tensor(weight))


def started(prompts=None, means=None, **options):
    prompts = DeepPrompts(2, 12, 3) if prompts is None else prompts
    return initialize_at(prompts, mean() if means is None else means, **options)


text = partial(prompted_text, names=NAMES)
MODULES = [
    (LayeredPrompts, {"num_prompts": 2, "dim": 8, "layers": (0,)}, {
        "num_prompts": number(0), "dim": ([*number(1)[0], MODEL], [1]), "layers": LAYERS,
        "replace": FLAG, "generator": DRAW, "patch_size": SIDES}),
    (GroupPrompts, {"num_groups": 2, "num_prompts": 2, "dim": 8, "layers": (0,)}, {
        "num_groups": number(1)}),
    (DeepPrompts, {"num_prompts": 2, "dim": 8, "depth": 3}, {
        "depth": ([*number(1)[0], None], [1]), "num_prompts": ([TRUNK], [0])}),
    (DeepPrompts, {"num_prompts": 2, "dim": TRUNK}, {"depth": ([0, 1.5], [1, 3, None])}),
    (LayeredPrompts, {"num_prompts": 2, "dim": TRUNK}, {"layers": ([(3,)], [(2,)])}),
    (PadPrompts, {"image_size": 8}, {
        "image_size": SIDES, "padding": ([0, 1.5, "1"], [1]),
        "mean": ([None, (nan,) * 3, ("a",) * 3], [(0.0,) * 3]),
        "std": ([None, (0.5,), (0.0,) * 3, (1e-40,) * 3, (nan,) * 3], [(1.2e-38,) * 3])}),
    (lambda images: PadPrompts((8, 10))(images), {"images": zeros(2, 3, 8, 10)}, {
        "images": (floats((2, 3, 8, 9)), [zeros(1, 3, 8, 10)])}),
    (LowRankContext, {"dim": 8, "length": 4, "rank": 2}, {
        "dim": number(1), "length": number(0), "rank": number(1), "num_contexts": number(1)}),
    (ContextPrompts, {"dim": 4}, {
        "dim": number(1), "length": number(0), "num_contexts": number(1),
        "num_classes": number(1), "generator": DRAW,
        "init": (["a photo", zeros(3, 5), zeros(4), zeros(2, 4) / 0], [None, zeros(2, 4)])}),
    (lambda indices: GROUPS(indices), {"indices": torch.tensor([0, 3])}, {
        "indices": (lambda good: [good + 1, good - 1, good * 1.0, good.to("meta")], [])}),
]  # fmt: skip
TEXTS = [
    (text, {"context": zeros(1, 5, 1)}, {
        "context": (floats((1, 5, 2), (1, 40, 1), (1, 13, 1), (1, 2, 5, 1)), [
            zeros(1, 0, 1), zeros(1, 10, 1)]),
        "name_position": number(0, 5), "per_sample": ([7], [False])}),
    (prompted_text, {"context": zeros(1, 11, 1)}, {"names": ([["cat"], NAMES], [])}),
    (text, {"context": zeros(1, 3, 5, 1), "class_specific": True}, {
        "context": (floats((1, 5, 1), (1, 2, 5, 1)), [zeros(2, 3, 5, 1)])}),
    (text, {"context": zeros(2, 1, 5, 1), "per_sample": True}, {
        "context": (floats((1, 5, 1), (3, 1, 2, 5, 1)), [zeros(1, 2, 5, 1)])}),
]  # fmt: skip
PASSES = [
    (encode_prompted, {"trunk": TRUNK, "images": IMAGES, "depth": None, "dtype": None}, {
        "trunk": (["vit"], []), "depth": number(1, 3),
        "images": (lambda good: [good[0], good.byte(), None], [IMAGES[:1]]),
        "dtype": ([torch.int64, "float32"], [torch.float64])}),
    (lambda streams: encode_prompted(TRUNK, IMAGES, streams), {}, {
        "streams": streams(PromptStream({3: MEANS}), GROUPS(torch.tensor([0, 1])))}),
    (lambda streams: encode_prompted(TRUNK, IMAGES, streams, depth=2), {}, {
        "streams": ([PromptStream({2: MEANS})], [PromptStream({1: MEANS})])}),
    (encode_front, {"trunk": TRUNK, "images": IMAGES, "start": 1}, {"start": number(1, 3)}),
    (encode_from, {"trunk": TRUNK, "tokens": TOKENS, "start": 1}, {
        "start": ([0, 3, 1.0], [1, 2]), "image_size": ([0], [None]),
        "dtype": (["float32"], [torch.float64]), "tokens": (lambda good: [IMAGES, good[:, :, :8],
        good.int(), good.to("meta"), good / 0, good[:, :2]], [LATE])}),
    (lambda tokens: encode_from(TRUNK, TOKENS, tokens, start=1), {}, {"tokens": (
        [PromptStream({0: zeros(n, 12)}) for n in (4, 9)], [PromptStream({1: MEANS})])}),
    (mean_patch_tokens, {"trunk": TRUNK, "images": IMAGES}, {
        "trunk": (["vit"], []), "images": (lambda good: [good.byte(), good[:0]], [IMAGES[:1]])}),
    (started, {}, {
        "noise": ([-0.1, 1e308, "0.1"], [0, 0.0]), "prompts": ([torch.nn.Linear(2, 2)], [
            GroupPrompts(2, 2, 12, layers=(0, 1, 2))]),
        "means": ([MEANS, *map(mean, [zeros(2, 12), zeros(3, 11), zeros(1, 3, 12), MEANS / 0]),
        mean(weight=0.0)], [mean(weight=1e-30)])}),
]  # fmt: skip

test_arguments_are_refused_by_name_and_edges_are_taken = refused_and_taken(MODULES + TEXTS + PASSES)


@pytest.mark.bad_input
def test_prompts_are_unchanged_by_a_refused_start():
    prompts = DeepPrompts(2, 12, 3)
    before = prompts.tokens.detach().clone()
    for means, noise in ((mean(MEANS / 0), 0.1), (mean(), 1e308)):
        with pytest.raises(ValueError, match="must"):
            initialize_at(prompts, means, noise=noise)
        assert torch.equal(prompts.tokens, before)
