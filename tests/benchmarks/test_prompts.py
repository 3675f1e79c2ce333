"""Costs of prompts, in time and memory.

With ``--check``, sizes are those below and ratios are asserted. Otherwise, batches are small.

The model is ViT-Ti at 224 pixels, with batches of 8 and deep prompts of ten tokens. The published
figures behind the goals have the same sizes. ``--check`` adds ViT-S.
"""

import itertools
from functools import partial

import pytest
import torch

import fedprompt as fp
from timed import CLASSES, Client, draw_images, step, vit

pytestmark = pytest.mark.benchmark


def test_prompted_forward(meter):
    images = draw_images(meter.size(8))
    for name in meter.models:
        client = Client(vit(name))
        calls = {"plain": client.trunk.model, "prompted": client}
        with torch.no_grad():
            meter.compare(
                f"{name}: forward pass",
                "prompted / plain, time <= 1.15",
                **{kind: partial(model, images) for kind, model in calls.items()},
            )


def test_training_step(meter):
    images = draw_images(meter.size(8))
    for name in meter.models:
        frugal = vit(name)
        frugal.set_grad_checkpointing()
        models = {"full": vit(name, num_classes=CLASSES)}
        models |= {"prompts": Client(vit(name)), "recomputed": Client(frugal)}
        ratios = """
            prompts / full, time <= 0.85
            prompts / full, memory
            prompts / recomputed, memory >= 4.0
            recomputed / prompts, time <= 1.4
            recomputed / full, memory
        """
        calls = {kind: partial(step, model, images) for kind, model in models.items()}
        meter.compare(f"{name}: step", ratios, **calls)


def test_heterogeneous_means(meter):
    draw = {"generator": torch.Generator().manual_seed(0)}
    stock = [fp.Weighted(torch.randn(100, 100, **draw), torch.rand(100, **draw)) for _ in range(32)]

    def means(count):
        parts = stock, (384, 512, 768, 1024, 2048)
        return fp.heterogeneous_means(
            *(itertools.islice(itertools.cycle(part), count) for part in parts)
        )

    def calls(few):
        return {"few": partial(means, few), "many": partial(means, 10 * few)}

    title = "ten times as many clients of 100 classes"
    found = meter.compare(title, "many / few, time <= 13.0", **calls(1_000))
    meter.report("seconds for 10,000 clients", found["time"]["many"], at_most=3.0)
    meter.compare(title, "many / few, memory <= 1.1", **calls(50))
