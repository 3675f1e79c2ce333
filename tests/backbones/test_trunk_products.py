"""Projections of frozen trunks are single products, not one small product for each image."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from fedprompt import DeepPrompts, encode_prompted, vit_trunk
from models import build, draw_images, row_named


@pytest.mark.parametrize(
    "name",
    [
        "vit_tiny_patch16_224",
        "vit_small_patch14_reg4_dinov2",
        "vit_base_patch16_clip_224",
        "vit_small_patch16_dinov3",
        "eva02_tiny_patch14_224",
        "vit_base_patch16_rpn_224",
    ],
)
def test_projections_are_single_products(name):
    """Fused attention is one operator, so no product of batches is left."""
    model = build(row_named(name)).float()
    trunk, images = vit_trunk(model), draw_images(model)
    prompts = DeepPrompts(2, trunk.dim, trunk.depth)
    with profile(activities=[ProfilerActivity.CPU]) as record:
        encode_prompted(trunk, images, prompts()).pooled.square().sum().backward()
    names = [event.name for event in record.events()]
    assert "aten::bmm" not in names
    assert any("scaled_dot_product" in name for name in names)
    assert torch.isfinite(prompts.tokens.grad).all()
