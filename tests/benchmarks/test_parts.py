"""Memory of a client that encodes all its images, which are read when they are needed.

With ``--check``, a client has 200 or 2,000 images of 224 pixels. Otherwise, there are a few.
"""

from functools import partial

import pytest
import timm
import torch

import fedprompt as fp
from fedprompt import methods
from fedprompt.methods import METHODS, ClientData

pytestmark = pytest.mark.benchmark
NAMES = ("fedhpl", "fedproto", "fedgh", "fedtgp", "fedem", "perfedavg_first_order")


class Drawn:
    """Images that are drawn when they are read."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, positions):
        return torch.randn(len(positions), 3, 224, 224)


@pytest.mark.parametrize("name", NAMES)
def test_memory_does_not_grow_with_the_images_of_a_client(meter, name, monkeypatch):
    monkeypatch.setattr(ClientData.parts, "__defaults__", (meter.size(128),))
    model = timm.create_model("vit_tiny_patch16_224", pretrained=False, num_classes=0)

    def turn(count):
        setting = methods.VitSetting(
            trunk=fp.vit_trunk(model), num_prompts=3, clients=[0], num_classes=10, rounds=1,
            steps=1, batch_size=2,
        )  # fmt: skip
        data = methods.Federation(Drawn(count), torch.arange(count) % 10, {0: range(count)})
        method = METHODS[name].make(setting)
        *_, now = fp.run_rounds(method, data)
        now.model(method, data, 0)

    few, many = meter.size(200, brief=4), meter.size(2000, brief=8)
    peak = meter.peak_bytes(few=partial(turn, few), many=partial(turn, many))
    ratio = peak["many"] / peak["few"]
    meter.report(f"{name}: {many} images / {few} images, memory", ratio, at_most=1.1)
