"""Projections of frozen trunks are single products, not one small product for each image."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fedprompt import DeepPrompts, encode_front, vit_trunk
from models import build, draw_images, row_named
from towers import build_tower, tower_images, tower_named


class Operators(TorchDispatchMode):
    """Names of the operators that run, without the cost of a profile."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.names.add(operator.name().split(".")[0])
        return operator(*args, **(kwargs or {}))


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
def test_projections_of_timms_models_are_single_products(name):
    model = build(row_named(name)).float()
    assert_single_products(vit_trunk(model), draw_images(model))


# One tower of each class of trunks, because towers of one class share the code of their blocks.
NAMES = ("ViT-B-16", "coca_ViT-B-32", "ViT-B-16-SigLIP", "PE-Core-B-16", "ViTModel", "DeiTModel")
NAMES += ("Dinov2Model", "DINOv3ViTModel", "CLIPVisionModel", "SiglipVisionModel")


@pytest.mark.parametrize("name", NAMES)
def test_projections_of_towers_are_single_products(name):
    tower = build_tower(tower_named(name)).float()
    assert_single_products(vit_trunk(tower), tower_images().float())


def assert_single_products(trunk, images):
    """Fused attention is one operator, so the blocks have no product of batches."""
    prompts = DeepPrompts(2, trunk.dim, trunk.depth)
    with Operators() as record:
        encode_front(trunk, images, prompts(), start=trunk.depth).square().sum().backward()
    assert "aten::bmm" not in record.names
    assert {"aten::addmm", "aten::mm"} <= record.names  # forward and backward are recorded
    assert any("scaled_dot_product" in name for name in record.names)
    assert torch.isfinite(prompts.tokens.grad).all()
