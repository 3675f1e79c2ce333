"""Cost of the probe, when a trunk or a text tower is made, in forward passes of one input."""

import open_clip
import pytest
import timm
import torch

import fedprompt as fp

pytestmark = pytest.mark.benchmark


@torch.no_grad()
def forward(model, *inputs):
    return model(*inputs)


def test_probe_of_a_trunk(meter):
    image = torch.rand(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    for name in meter.models:
        model = timm.create_model(f"{name}_patch16_224", pretrained=False, num_classes=0).eval()
        fp.vit_trunk(model)
        seconds = meter.seconds(
            made=lambda model=model: fp.vit_trunk(model),
            forward=lambda model=model: forward(model, image),
        )
        title = f"{name}: trunk with its probe / forward pass of one image, time"
        meter.report(title, seconds["made"] / seconds["forward"], at_most=3.0)


def test_probe_of_a_text_tower(meter):
    layers = meter.size(12)
    vision = {"layers": 1, "width": 64, "head_width": 64, "patch_size": 16, "image_size": 32}
    text = {"context_length": 77, "vocab_size": 49408, "width": 512, "heads": 8, "layers": layers}
    model = open_clip.model.CLIP(512, vision, text).eval()
    tokenizer = open_clip.tokenizer.SimpleTokenizer()
    ids = tokenizer(["a photo of a cat."])
    fp.TextTower(model, tokenizer)
    seconds = meter.seconds(
        made=lambda: fp.TextTower(model, tokenizer), forward=lambda: forward(model.encode_text, ids)
    )
    title = f"{layers} layers: text tower with its probe / forward pass of one sentence, time"
    meter.report(title, seconds["made"] / seconds["forward"], at_most=3.0)
