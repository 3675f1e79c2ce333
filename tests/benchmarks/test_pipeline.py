"""Cost of preparing images next to that of a training step with deep prompts."""

from functools import partial

import pytest
import timm
import torch
import torch.nn as nn
import torch.nn.functional as F

import fedprompt as fp
from fedprompt.compare.pipeline import Preparation, flipped

pytestmark = pytest.mark.benchmark
BATCH, SIZE = 8, 224


def step(trunk, prompts, head, images):
    logits = head(fp.encode_prompted(trunk, images, prompts()).pooled)
    F.cross_entropy(logits, torch.arange(BATCH) % 10).backward()


@pytest.mark.parametrize("stored", [32, 256])
def test_preparation_next_to_a_step(stored, meter):
    generator = torch.Generator().manual_seed(0)
    shape = (BATCH, 3, stored, stored)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    for name in meter.models:
        model = timm.create_model(f"{name}_patch16_224", pretrained=False, num_classes=0)
        trunk, preparation = fp.vit_trunk(model), Preparation(SIZE)
        prompts, head = fp.DeepPrompts(10, trunk), nn.Linear(trunk.num_features, 10)

        def prepare(preparation=preparation):
            return preparation(flipped(images, generator))

        ready = prepare()
        seconds = meter.seconds(prepare=prepare, step=partial(step, trunk, prompts, head, ready))
        meter.report(
            f"{name}: flips, resizing and normalization from {stored} pixels / step, time",
            seconds["prepare"] / seconds["step"],
            at_most=0.1,
        )
