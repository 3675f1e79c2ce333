"""Costs of prompts, in time and memory.

With ``--check``, sizes are those below and ratios are asserted. Otherwise, batches are small.

The model is ViT-Ti at 224 pixels, with batches of 8 and deep prompts of ten tokens. The published
figures behind the goals have the same sizes. ``--check`` adds ViT-S.
"""

import itertools
from functools import partial

import pytest
import timm
import torch
import torch.nn as nn
import torch.nn.functional as F

import fedprompt as fp

pytestmark = pytest.mark.benchmark
CLASSES = 10


class Client(nn.Module):
    def __init__(self, trunk):
        super().__init__()
        self.trunk = trunk
        self.prompts = fp.DeepPrompts(
            10, trunk.dim, trunk.depth, generator=torch.Generator().manual_seed(0)
        )
        self.head = nn.Linear(trunk.dim, CLASSES)

    def forward(self, images):
        return self.head(fp.encode_prompted(self.trunk, images, self.prompts()).pooled)


def draw_images(batch):
    return torch.randn(batch, 3, 224, 224, generator=torch.Generator().manual_seed(1))


def step(model, images):
    """Run a forward and a backward pass."""
    F.cross_entropy(model(images), torch.arange(len(images)) % CLASSES).backward()
    model.zero_grad()


def make(name, **arguments):
    return timm.create_model(f"{name}_patch16_224", pretrained=False, **arguments)


def test_prompted_forward(meter):
    images = draw_images(meter.size(8))
    for name in meter.models:
        model = make(name, num_classes=0)
        client = Client(fp.vit_trunk(model))
        with torch.no_grad():
            seconds = meter.seconds(plain=partial(model, images), prompted=partial(client, images))
        meter.report(
            f"{name}: forward with deep prompts / plain",
            seconds["prompted"] / seconds["plain"],
            at_most=1.15,
        )


def test_training_step(meter):
    images = draw_images(meter.size(8))
    for name in meter.models:
        full = make(name, num_classes=CLASSES).eval()
        frugal = make(name, num_classes=0)
        frugal.set_grad_checkpointing()
        models = {
            "full": full,
            "prompts": Client(fp.vit_trunk(make(name, num_classes=0))),
            "checkpointed": Client(fp.vit_trunk(frugal)),
        }
        calls = {kind: partial(step, model, images) for kind, model in models.items()}
        seconds, peak = meter.seconds(**calls), meter.peak_bytes(**calls)
        meter.report(
            f"{name}: step of prompts / full fine-tuning, time",
            seconds["prompts"] / seconds["full"],
            at_most=0.85,
        )
        meter.report(
            f"{name}: step of prompts / full fine-tuning, memory", peak["prompts"] / peak["full"]
        )
        meter.report(
            f"{name}: step, stored / recomputed activations, memory",
            peak["prompts"] / peak["checkpointed"],
            at_least=4.0,
        )
        meter.report(
            f"{name}: step, recomputed / stored activations, time",
            seconds["checkpointed"] / seconds["prompts"],
            at_most=1.4,
        )
        megabytes = {kind: round(size / 2**20) for kind, size in peak.items()}
        meter.report(
            f"{name}: MiB {megabytes}, checkpointed / full", peak["checkpointed"] / peak["full"]
        )


def test_heterogeneous_means(meter):
    generator = torch.Generator().manual_seed(0)
    stock = [
        fp.Weighted(
            torch.randn(100, 100, generator=generator), torch.rand(100, generator=generator)
        )
        for _ in range(32)
    ]
    dims = (384, 512, 768, 1024, 2048)

    def means(num_clients):
        return fp.heterogeneous_means(
            itertools.islice(itertools.cycle(stock), num_clients),
            itertools.islice(itertools.cycle(dims), num_clients),
        )

    seconds = meter.seconds(few=lambda: means(1_000), many=lambda: means(10_000))
    meter.report("seconds for 10,000 clients of 100 classes", seconds["many"], at_most=3.0)
    meter.report(
        "10,000 clients / 1000 clients, time", seconds["many"] / seconds["few"], at_most=13.0
    )
    peak = meter.peak_bytes(few=lambda: means(50), many=lambda: means(500))
    meter.report("500 clients / 50 clients, memory", peak["many"] / peak["few"], at_most=1.1)
