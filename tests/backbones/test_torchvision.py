"""Trunks of torchvision's vision transformers."""

import pytest
import torch
from torchvision.models import VisionTransformer

from fedprompt import DeepPrompts, check, encode_prompted, vit_trunk

IMAGES = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return VisionTransformer(32, 8, num_layers=3, num_heads=2, hidden_dim=16, mlp_dim=32)


def test_a_trunk_has_the_features_of_the_model(model):
    trunk = vit_trunk(model)
    assert torch.equal(model.heads(encode_prompted(trunk, IMAGES).pooled), model(IMAGES))
    assert check.trunk(trunk, IMAGES).passed
    prompted = encode_prompted(trunk, IMAGES, DeepPrompts(2, trunk)())
    assert prompted.streams[0].shape == (3, 2, 16)


def test_a_mask_and_another_size_are_refused(model):
    with pytest.raises(ValueError, match="`attention_mask` must be None, because blocks of torch"):
        vit_trunk(model, attention_mask=torch.zeros(17, 17))
    with pytest.raises(ValueError, match=r"`images` must have the model's size \(32, 32\)"):
        encode_prompted(vit_trunk(model), IMAGES[..., :16])
