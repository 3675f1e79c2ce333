"""Costs of late prompts, whose training steps begin at cached tokens.

With ``--check``, sizes are those below and ratios are asserted. Otherwise, batches are small.

Prompts of ten tokens enter the last four of twelve blocks. Images have 224 pixels, and batches have
8 images. SGPT's Block II has the paper's layers for 20 groups: frozen shared prompts before the
first four blocks, group prompts before the next three, one token each.
"""

from functools import partial

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import fedprompt as fp
from timed import CLASSES, draw_images, labels_of, vit

pytestmark = pytest.mark.benchmark
GROUPS, START = 20, 8


def step(encode, prompts, head, inputs):
    """Run a forward and a backward pass."""
    pooled = encode(inputs, prompts()).pooled
    F.cross_entropy(head(pooled), labels_of(pooled)).backward()
    prompts.zero_grad()
    head.zero_grad()


def test_late_prompts(meter):
    images = draw_images(meter.size(8))
    for name in meter.models:
        trunk = fp.vit_trunk(vit(name))
        head = nn.Linear(trunk.num_features, CLASSES)
        late = fp.LayeredPrompts(10, trunk, layers=range(START, 12), replace=True)
        with torch.no_grad():
            tokens = fp.encode_front(trunk, images, start=START)
        resumed = partial(fp.encode_from, trunk, start=START)
        whole = partial(fp.encode_prompted, trunk)
        # In a smaller model, the attention of the last blocks is a larger part of the step.
        goals = (" <= 0.56", " <= 0.40") if name == "vit_small" else ("", "")
        ratios = f"""
            cached / images, time{goals[0]}
            half / images, time{goals[0]}
            cached / deep, time{goals[1]}
            cached / images, memory
        """
        meter.compare(
            f"{name}: step of prompts in the last 4 blocks, {tokens[0].nbytes:,} bytes an image",
            ratios,
            cached=partial(step, resumed, late, head, tokens),
            half=partial(step, resumed, late, head, tokens.bfloat16()),
            images=partial(step, whole, late, head, images),
            deep=partial(step, whole, fp.DeepPrompts(10, trunk), head, images),
        )


def test_block_two_of_sgpt(meter):
    images = draw_images(meter.size(8))
    for name in meter.models:
        trunk, draw = fp.vit_trunk(vit(name)), torch.Generator().manual_seed(0)
        shared = fp.LayeredPrompts(1, trunk, layers=range(4), generator=draw).requires_grad_(False)
        groups = fp.GroupPrompts(GROUPS, 1, trunk, layers=(4, 5, 6), generator=draw)
        head = nn.Linear(trunk.num_features, CLASSES)
        indices = torch.randint(GROUPS, (len(images),), generator=draw)
        tokens = fp.encode_front(trunk, images, shared(), start=4)

        def run(encode, inputs, shared=shared, groups=groups, head=head, indices=indices):
            encoded = encode(inputs, shared(), groups(indices))
            readout = torch.cat([encoded.pooled[:, None], encoded.streams[1]], 1).mean(1)
            F.cross_entropy(head(readout), labels_of(readout)).backward()
            groups.zero_grad()
            head.zero_grad()

        # 16 of 20 passes through a block remain, and the embedding is omitted.
        goal = " <= 0.84" if name == "vit_small" else ""
        meter.compare(
            f"{name}: Block II from tokens behind the shared prompts",
            f"cached / images, time{goal}",
            cached=partial(run, partial(fp.encode_from, trunk, start=4), tokens),
            images=partial(run, partial(fp.encode_prompted, trunk), images),
        )
