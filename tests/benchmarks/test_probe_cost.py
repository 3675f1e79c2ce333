"""Cost of the probe, when a trunk or a text tower is made, in forward passes of one input."""

from functools import partial

import open_clip
import pytest
import torch

import fedprompt as fp
from timed import vit

pytestmark = pytest.mark.benchmark


@torch.no_grad()
def forward(model, *inputs):
    return model(*inputs)


def test_probe_of_a_trunk(meter):
    image = torch.rand(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    for name in meter.models:
        model = vit(name)
        fp.vit_trunk(model)
        calls = {"made": partial(fp.vit_trunk, model), "one_image": partial(forward, model, image)}
        title = f"{name}: trunk with its probe"
        meter.compare(title, "made / one_image, time <= 3.0", **calls)


def test_probe_of_a_text_tower(meter):
    layers = meter.size(12)
    vision = {"layers": 1, "width": 64, "head_width": 64, "patch_size": 16, "image_size": 32}
    text = {"context_length": 77, "vocab_size": 49408, "width": 512, "heads": 8, "layers": layers}
    model = open_clip.model.CLIP(512, vision, text).eval()
    tokenizer = open_clip.tokenizer.SimpleTokenizer()
    ids = tokenizer(["a photo of a cat."])
    fp.TextTower(model, tokenizer)
    calls = {"one_sentence": partial(forward, model.encode_text, ids)}
    calls["made"] = partial(fp.TextTower, model, tokenizer)
    title = f"{layers} layers: text tower with its probe"
    meter.compare(title, "made / one_sentence, time <= 3.0", **calls)
