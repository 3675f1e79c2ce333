"""Cost of preparing images next to that of a training step with deep prompts."""

from functools import partial

import pytest
import torch

from fedprompt.compare.pipeline import Preparation, flipped
from timed import Client, step, vit

pytestmark = pytest.mark.benchmark
BATCH, SIZE = 8, 224


@pytest.mark.parametrize("stored", [32, 256])
def test_preparation_next_to_a_step(stored, meter):
    generator = torch.Generator().manual_seed(0)
    shape = (BATCH, 3, stored, stored)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    for name in meter.models:
        client, preparation = Client(vit(name)), Preparation(SIZE)

        def prepare(preparation=preparation):
            return preparation(flipped(images, generator))

        ready = prepare()
        title = f"{name}: flips, resizing and normalization from {stored} pixels"
        run = partial(step, client, ready)
        meter.compare(title, "prepare / step, time <= 0.1", prepare=prepare, step=run)
