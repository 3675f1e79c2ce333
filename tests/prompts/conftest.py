"""A tiny vision transformer, its trunk, and three images for it."""

import pytest

from fedprompt import vit_trunk
from models import draw_images, tiny_vit


@pytest.fixture
def model():
    return tiny_vit()


@pytest.fixture
def trunk(model):
    return vit_trunk(model)


@pytest.fixture
def images(model):
    return draw_images(model, 3)
