"""Costs of SGPT's two training blocks.

With ``--check``, sizes are those below and ratios are asserted. Otherwise, batches are small.

The layers are those of the paper for 20 groups: shared prompts before the first four blocks, group
prompts before the next three, one token each. Images have 224 pixels, and batches have 8 images.
"""

from functools import partial

import pytest
import timm
import torch
import torch.nn as nn
import torch.nn.functional as F

import fedprompt as fp

pytestmark = pytest.mark.benchmark
CLASSES, GROUPS = 10, 20


class Setting:
    """A client, its batch, and the steps to compare, each a forward and a backward pass."""

    def __init__(self, name, batch):
        generator = torch.Generator().manual_seed(0)
        self.trunk = fp.vit_trunk(
            timm.create_model(f"{name}_patch16_224", pretrained=False, num_classes=0)
        )
        dim = self.trunk.dim
        self.model = nn.ModuleDict(
            {
                "shared": fp.LayeredPrompts(1, dim, layers=range(4), generator=generator),
                "groups": fp.GroupPrompts(GROUPS, 1, dim, layers=(4, 5, 6), generator=generator),
                "selector": fp.selection.SelectionKeys(GROUPS, dim, generator=generator),
                "head": nn.Linear(dim, CLASSES),
            }
        )
        self.same_for_all = fp.LayeredPrompts(1, dim, layers=(4, 5, 6), generator=generator)
        self.images = torch.randn(batch, 3, 224, 224, generator=generator)
        self.labels = torch.arange(batch) % CLASSES
        self.cached = self.query()

    @torch.no_grad()
    def query(self):
        return fp.encode_prompted(self.trunk, self.images).pooled

    def loss(self, *streams):
        pooled, (_, *outputs), _ = fp.encode_prompted(
            self.trunk, self.images, self.model["shared"](), *streams
        )
        return F.cross_entropy(
            self.model["head"](torch.cat([pooled[:, None], *outputs], 1).mean(1)), self.labels
        )

    def first(self):
        with fp.training_only(self.model, self.model["shared"], self.model["head"]):
            self.loss().backward()
        self.model.zero_grad()

    def second(self, query):
        selector = self.model["selector"]
        with fp.training_only(self.model, self.model["groups"], selector, self.model["head"]):
            own = query()
            indices = selector(own).indices
            (
                self.loss(self.model["groups"](indices))
                + fp.selection.key_loss(own, selector.keys, indices)
            ).backward()
        self.model.zero_grad()

    def without_groups(self):
        """Run Block II with the same prompts for every sample, without a selection."""
        with fp.training_only(self.model, self.model["head"]):
            self.loss(self.same_for_all()).backward()
        self.same_for_all.zero_grad()
        self.model.zero_grad()


def test_blocks(meter):
    for name in meter.models:
        setting = Setting(name, meter.size(8))
        seconds = meter.seconds(
            first=setting.first,
            fresh=partial(setting.second, setting.query),
            cached=partial(setting.second, lambda setting=setting: setting.cached),
            same=setting.without_groups,
        )
        cached = seconds["cached"]
        meter.report(
            f"{name}: Block II, queries cached / computed, time",
            cached / seconds["fresh"],
            at_most=0.72,
        )
        meter.report(
            f"{name}: Block II, prompts by group / the same for all, time",
            cached / seconds["same"],
            at_most=1.05,
        )
        meter.report(f"{name}: Block II / Block I, time", cached / seconds["first"], at_most=1.0)
        peak = meter.peak_bytes(
            first=setting.first,
            second=partial(setting.second, lambda setting=setting: setting.cached),
        )
        meter.report(
            f"{name}: Block II / Block I, memory", peak["second"] / peak["first"], at_most=1.0
        )
