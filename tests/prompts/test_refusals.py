"""Wrong calls of prompt modules, of streams, and of passes with prompts."""

import numpy as np
import torch
from torch import tensor, zeros

from fedprompt import (
    DeepPrompts,
    GroupPrompts,
    PromptStream,
    Weighted,
    encode_front,
    encode_prompted,
    initialize_at,
    prompted_text,
    vit_trunk,
)
from fedprompt.interfaces import ClassNames
from models import draw_images, tiny_vit
from own_trunks import PlainTrunk
from refusals import refused

MODEL, OWN = tiny_vit(), PlainTrunk()
TRUNK, IMAGES = vit_trunk(MODEL), draw_images(MODEL, 3)
EARLY, TOKENS = (encode_front(TRUNK, IMAGES, start=start) for start in (1, 2))
GROUPS = GroupPrompts(4, 2, 12, layers=(1,)).double()
NAMES = ClassNames(
    zeros(1, 1), zeros(3, 5, 1), (3, 5, 4), zeros(1), 16, True, ("a", "b", "c"), (2, 2, 2)
)
NUMPY = np.random.default_rng(0)


def encoded(*streams, **options):
    return encode_prompted(TRUNK, IMAGES, *streams, **options)


def second(layer, tokens):
    """Encode with a good stream and a wrong one."""
    return encoded(PromptStream({0: zeros(1, 12)}), PromptStream({layer: tokens}))


def written(*shape, **claims):
    return prompted_text(zeros(shape), NAMES, **claims)


def started(prompts=None, means=None, **options):
    """Start prompts at a mean, and require that an error leaves them unchanged."""
    own = DeepPrompts(2, 12, 3)
    before = own.tokens.detach().clone()
    try:
        means = Weighted(zeros(3, 12), tensor(1.0)) if means is None else means
        initialize_at(prompts or own, means, **options)
    finally:
        assert torch.equal(own.tokens, before)


test_wrong_calls_are_refused_by_name = refused(globals())("""
LayeredPrompts(-1, 8, layers=(0,)) -> ValueError: `num_prompts` must be at least
ShallowPrompts(2.0, 8) -> TypeError: `num_prompts` must be an integer; got 2.0
ShallowPrompts(2, 0) -> ValueError: `dim` must be at least 1; got 0.
DeepPrompts(2, 8, 0) -> ValueError: `depth` must be at least 1; got 0.
DeepPrompts(2, 8, 1.5) -> TypeError: `depth` must be an integer; got 1.5
LayeredPrompts(2, 8, layers=3) -> TypeError: `layers` must be an iterable of layer indices, such as
LayeredPrompts(2, 8, layers=()) -> ValueError: `layers` must contain at least
LayeredPrompts(2, 8, layers=(1, 1)) -> ValueError: `layers` must contain at
LayeredPrompts(2, 8, layers=(0, -1)) -> ValueError: `layers` must be at least
LayeredPrompts(2, 8, layers=(0, 1.0)) -> TypeError: `layers` must be an
LayeredPrompts(2, 8, layers=(0,), replace='x') -> TypeError: `replace` must be
LayeredPrompts(2, 8, layers=(0,), generator=NUMPY) -> TypeError: `generator` must be a torch.Gen
ShallowPrompts(2, 8, patch_size=0) -> ValueError: `patch_size` must be at
ShallowPrompts(2, 8, patch_size=4.0) -> TypeError: `patch_size` must be an
ShallowPrompts(2, 8, patch_size=(4,)) -> ValueError: `patch_size` must be one
GroupPrompts(0, 1, 8, layers=(0,)) -> ValueError: `num_groups` must be at
GroupPrompts(2.0, 1, 8, layers=(0,)) -> TypeError: `num_groups` must be an
DeepPrompts(2, TRUNK, 4) -> ValueError: `layers` must be at most 2, the trunk's last block; got 3.
DeepPrompts(2, TRUNK.dim) -> TypeError: `depth` must be an integer,
DeepPrompts(TRUNK, 4) -> TypeError: `num_prompts` must be an integer; the trunk comes after it; got
ShallowPrompts(2, MODEL) -> TypeError: `dim` must be an integer or
GROUPS(tensor([0, 4])) -> ValueError: `indices` must lie in [0, 4); got values from 0 to 4.
GROUPS(tensor([-1])) -> ValueError: `indices` must lie in [0, 4); got values from -1 to -1.
GROUPS(tensor([0.0])) -> TypeError: `indices` must be integers of shape (batch,); got a
GROUPS(tensor([1], device='meta')) -> ValueError: `indices` must be on the device cpu;
PadPrompts(0) -> ValueError: `image_size` must be at least 1; got 0.
PadPrompts((8, 8.0)) -> TypeError: `image_size` must be an integer; got 8.0
PadPrompts((3, 8, 8)) -> ValueError: `image_size` must be one number or
PadPrompts(8, padding=0) -> ValueError: `padding` must be at least 1; got 0.
PadPrompts(8, padding=1.5) -> TypeError: `padding` must be an integer; got 1.5
PadPrompts(8, mean=None) -> TypeError: `mean` must be a sequence of numbers;
PadPrompts(8, mean=(0.5,)) -> ValueError: `std` must have one entry for each
PadPrompts(8, mean=(0.5,), std=(0.0,)) -> ValueError: `std` must be above 0;
PadPrompts(8, mean=(0.5,), std=(1e-40,)) -> ValueError: `std` must be at least 1.17549e-38;
PadPrompts(8, mean=(float('nan'),), std=(1.0,)) -> ValueError: `mean` must be
PadPrompts(8, mean=('a',), std=(1.0,)) -> TypeError: `mean` must be a number;
PadPrompts(8)(zeros(1, 3, 8, 8, device='meta')) -> ValueError: `images` must be on the prompts' d
PadPrompts((8, 10))(zeros(2, 3, 8, 9)) -> ValueError: `images` must have shape (2, 3, 8, 10);
PadPrompts(8)(zeros(1, 3, 8, 8) / 0) -> ValueError: `images` must be finite
PadPrompts((8, 10))(zeros(2, 3, 8, 10).byte()) -> TypeError: `images` must be
LowRankContext(0, length=4, rank=2) -> ValueError: `dim` must be at least 1;
LowRankContext(8, length=-1, rank=2) -> ValueError: `length` must be at least
LowRankContext(8, length=4, rank=0) -> ValueError: `rank` must be at least 1;
LowRankContext(8, length=4, rank=1.5) -> TypeError: `rank` must be an integer;
LowRankContext(8, length=4, rank=2, num_contexts=0) -> ValueError: `num_contexts
ContextPrompts(0) -> ValueError: `dim` must be at least 1
ContextPrompts(4, length=-1) -> ValueError: `length` must be at least 0
ContextPrompts(4, num_contexts=0) -> ValueError: `num_contexts` must be at least 1
ContextPrompts(4, num_classes=2.0) -> TypeError: `num_classes` must be an integer
ContextPrompts(4, init='a photo of a') -> TypeError: of shape (length, dim), such as tower
ContextPrompts(4, init=zeros(3, 5)) -> ValueError: `init` must have shape (length,
ContextPrompts(4, init=zeros(4)) -> ValueError: `init` must have shape (length,
ContextPrompts(4, init=zeros(2, 4) / 0) -> ValueError: `init` must be finite; got 8
ContextPrompts(4, init=zeros(2, 4), generator=NUMPY) -> TypeError: `generator` must be a torch.Gen
prompted_text(zeros(1, 5, 1) / 0, NAMES) -> ValueError: `context` must be finite; got 5
prompted_text([[[0.0]]], NAMES) -> TypeError: `context` must be a floating-point tensor
prompted_text(zeros(1, 5, 1), ['cat']) -> TypeError: `names` must be ClassNames, from tower.class_n
prompted_text(zeros(1, 2, 1, device='meta'), NAMES) -> ValueError: `context` must be on the device
written(1, 5, 2) -> ValueError: `context` must have shape (contexts, length, 1); `per_sample=True`
written(1, 2, 5, 1, class_specific=True) -> ValueError: (contexts, 3,
written(1, 5, 1, class_specific=True) -> ValueError: (contexts, 3, length,
written(1, 5, 1, per_sample=True) -> ValueError: (batch, contexts, length,
written(3, 1, 2, 5, 1, per_sample=True, class_specific=True) -> ValueError: (batch, contexts, 3, le
written(1, 5, 1, per_sample=7) -> TypeError: `per_sample` must be True or
written(1, 40, 1) -> ValueError: `context` must be shorter, because no name
written(1, 13, 1) -> ValueError: `context` must be shorter, because no name fits into 16 positions
written(1, 11, 1) -> ValueError: `names` must have at most 4 tokens
written(1, 5, 1, name_position=6) -> ValueError: `name_position` must be at most 5, the
written(1, 5, 1, name_position=-1) -> ValueError: `name_position` must be at least 0; got -1
written(1, 5, 1, name_position=2.5) -> TypeError: `name_position` must be an integer; got 2.5
encode_prompted(OWN, zeros(3, 16, 16)) -> TypeError: `images` must be floating-point of shape
encode_prompted(TRUNK, IMAGES[0]) -> TypeError: got a float64 tensor of shape (3, 16, 16).
encoded(depth=0) -> ValueError: `depth` must be at least 1; got 0.
encoded(depth=4) -> ValueError: `depth` must be at most 3, the number of the trunk's
encoded(depth=2.0) -> TypeError: `depth` must be an integer; got 2.0 (float).
encoded(dtype=torch.int64) -> TypeError: `dtype` must be a floating-point torch.dtype or None; got
encoded(ShallowPrompts(1, 12)) -> TypeError: `streams[0]` must be a PromptStream; call the prompt m
encoded(DeepPrompts(1, 12, 3)(), depth=2) -> ValueError: at most 1, the last of 2 blocks; got 2.
encoded(GROUPS(tensor([0, 1]))) -> ValueError: must have the batch of 3 images; got (2, 2, 12).
second(1, zeros(2, 11)) -> ValueError: (prompts, 12) or (batch, prompts, 12); got (2, 11).
second(0, zeros(2, 12, device='meta')) -> ValueError: `streams[1].layers[0]` must be
second(0, None) -> TypeError: `streams[1].layers[0]` must be a floating-point tensor; got
encode_front(TRUNK, IMAGES, start=0) -> ValueError: `start` must be at least 1; got 0.
encode_front(TRUNK, IMAGES, start=4) -> ValueError: `start` must be at most 3, the number
encode_front(TRUNK, IMAGES, PromptStream({3: zeros(1, 12)}), start=1) \
-> ValueError: `streams[0].layers` must be at most 2, the last of 3 blocks; got 3.
encode_from(TRUNK, EARLY, start=0) -> ValueError: `start` must be at least 1; got 0.
encode_from(TRUNK, EARLY, start=3) -> ValueError: `start` must be at most 2, the last block
encode_from(TRUNK, EARLY, start=1, dtype='float32') -> TypeError: `dtype` must be a floating-point
encode_from(TRUNK, EARLY, start=1.0) -> TypeError: `start` must be an integer; got 1.0 (float)
encode_from(TRUNK, EARLY, start=1, image_size=0) -> ValueError: `image_size` must be at least
encode_from(TRUNK, IMAGES, start=2) -> TypeError: got a float64 tensor of shape (3, 3, 16, 16)
encode_from(TRUNK, TOKENS[:, :, :8], start=2) -> ValueError: shape (3, 6, 12); got (3, 6, 8)
encode_from(TRUNK, TOKENS.int(), start=2) -> TypeError: (batch, seq, 12); got a int32 tensor of sha
encode_from(TRUNK, EARLY.to('meta'), start=1) -> ValueError: `tokens` must be on
encode_from(TRUNK, EARLY, PromptStream({0: zeros(2, 12)}), start=1) -> ValueError: `tokens` must ha
encode_from(TRUNK, EARLY, PromptStream({0: zeros(9, 12)}), start=1) \
-> ValueError: have a patch besides the 2 of the prefix and 9 prompts before block 1; got 6 tokens.
encode_from(TRUNK, EARLY, PromptStream({0: zeros(4, 12)}), start=1) -> ValueError: have a patch bes
encode_from(TRUNK, EARLY / 0, start=1) -> ValueError: `tokens` must be finite
encode_from(TRUNK, EARLY, PromptStream({2: zeros(2, 1, 12)}), start=1) -> ValueError: batch of 3 im
mean_patch_tokens('vit', IMAGES) -> TypeError: `trunk` must be a Trunk, such as vit_trunk(model); g
mean_patch_tokens(TRUNK, IMAGES.byte()) -> TypeError: `images` must be floating-point of shape
mean_patch_tokens(TRUNK, IMAGES[:0]) -> ValueError: `images` must contain at least one image; got
started(torch.nn.Linear(2, 2)) -> TypeError: `prompts` must be LayeredPrompts or Group
started(noise=-0.1) -> ValueError: `noise` must be at least 0; got -0.1.
started(noise=1e308) -> ValueError: `noise` must keep tokens finite in torch.float32; got
started(means=Weighted(full((3, 12), 3.4e38), tensor(1.0)), noise=3e38) -> ValueError: keep tokens
started(noise='0.1') -> TypeError: `noise` must be a number; got '0.1' (str).
started(means=zeros(3, 12)) -> TypeError: `means` must be a Weighted(value, weight);
started(means=Weighted(zeros(2, 12), tensor(1.0))) -> ValueError: `means` must
started(means=Weighted(zeros(3, 12), tensor(0.0))) -> ValueError: `means.weight
started(means=Weighted(zeros(3, 12) / 0, tensor(1.0))) -> ValueError: `means.value` must be finite
""")
