"""Costs of SGPT's two training blocks.

With ``--check``, sizes are those below and ratios are asserted. Otherwise, batches are small.

The layers are those of the paper for 20 groups: shared prompts before the first four blocks, group
prompts before the next three, one token each. Images have 224 pixels, and batches have 8 images.
"""

from functools import partial

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import fedprompt as fp
from timed import CLASSES, draw_images, labels_of, vit

pytestmark = pytest.mark.benchmark
GROUPS = 20


class Setting:
    """A client, its batch, and the steps to compare, each a forward and a backward pass."""

    def __init__(self, name, batch):
        draw = {"generator": torch.Generator().manual_seed(0)}
        self.trunk = fp.vit_trunk(vit(name))
        dim = self.trunk.dim
        parts = {
            "shared": fp.LayeredPrompts(1, dim, layers=range(4), **draw),
            "groups": fp.GroupPrompts(GROUPS, 1, dim, layers=(4, 5, 6), **draw),
            "selector": fp.selection.SelectionKeys(GROUPS, dim, **draw),
            "head": nn.Linear(dim, CLASSES),
        }
        self.model = nn.ModuleDict(parts)
        self.same_for_all = fp.LayeredPrompts(1, dim, layers=(4, 5, 6), **draw)
        self.images = draw_images(batch)
        self.kept = self.query()

    @torch.no_grad()
    def query(self):
        return fp.encode_prompted(self.trunk, self.images).pooled

    def loss(self, *streams):
        streams = self.model["shared"](), *streams
        pooled, (_, *outputs), _ = fp.encode_prompted(self.trunk, self.images, *streams)
        logits = self.model["head"](torch.cat([pooled[:, None], *outputs], 1).mean(1))
        return F.cross_entropy(logits, labels_of(logits))

    def first(self):
        with fp.training_only(self.model, self.model["shared"], self.model["head"]):
            self.loss().backward()
        self.model.zero_grad()

    def second(self, query):
        selector = self.model["selector"]
        with fp.training_only(self.model, self.model["groups"], selector, self.model["head"]):
            own = query()
            indices = selector(own).indices
            loss = self.loss(self.model["groups"](indices))
            (loss + fp.selection.key_loss(own, selector.keys, indices)).backward()
        self.model.zero_grad()

    def without_groups(self):
        """Run Block II with the same prompts for every sample, without a selection."""
        with fp.training_only(self.model, self.model["head"]):
            self.loss(self.same_for_all()).backward()
        self.same_for_all.zero_grad()
        self.model.zero_grad()


RATIOS = """
    second / queried, time <= 0.72
    second / same, time <= 1.05
    second / first, time <= 1.0
    second / first, memory <= 1.0
"""


def test_blocks(meter):
    """Block II has cached queries, or computes them ("queried")."""
    for name in meter.models:
        setting = Setting(name, meter.size(8))
        meter.compare(
            f"{name}: blocks",
            RATIOS,
            first=setting.first,
            second=partial(setting.second, lambda setting=setting: setting.kept),
            queried=partial(setting.second, setting.query),
            same=setting.without_groups,
        )
