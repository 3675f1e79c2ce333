"""Trunks of open_clip and transformers equal the models, with prompts and without."""

import pytest
import torch

from fedprompt import PromptStream, check_trunk, encode_prompted, fingerprint, vit_trunk
from references.hooks import hooked_blocks
from tolerance import assert_near
from towers import HEADLESS, TOWERS, build_tower, tower_images, tower_named


def draw(*shape, seed=2):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture(scope="module", params=(*TOWERS, HEADLESS), ids=lambda row: row.name)
def tower(request):
    model = build_tower(request.param)
    return request.param, model, vit_trunk(model), tower_images()


def test_without_prompts_a_tower_is_bitwise_identical_to_its_model(tower):
    row, model, trunk, images = tower
    expected = row.forward(model, images)
    assert expected.ndim == 2
    assert torch.equal(encode_prompted(trunk, images).pooled, expected)


def test_a_tower_states_its_sizes(tower):
    row, model, trunk, images = tower
    tokens, _ = trunk.embed(images)
    grid = images.shape[2] // trunk.patch_size
    assert tokens.shape[1] - trunk.prefix == grid**2
    assert tokens.shape[2] == trunk.dim
    assert trunk.depth == len(row.blocks(model))
    assert trunk.num_features == row.forward(model, images).shape[1]


@pytest.mark.parametrize("replace", [True, False])
def test_prompts_change_the_output_as_in_the_towers_own_forward_pass(replace, tower):
    row, model, trunk, images = tower
    layers = dict(enumerate(draw(trunk.depth, 2, trunk.dim)))
    encoded = encode_prompted(trunk, images, PromptStream(layers, replace))
    pooled, prompts = hooked_blocks(
        lambda: row.forward(model, images),
        row.blocks(model),
        layers,
        prefix=trunk.prefix,
        replace=replace,
    )
    assert_near(encoded.pooled, pooled)
    assert_near(encoded.streams[0], row.norm(model)(prompts))
    plain = row.forward(model, images)
    assert (pooled - plain).abs().max() > 1e-3
    assert torch.equal(encode_prompted(trunk, images).pooled, plain)  # the model is unchanged


def test_a_tower_passes_every_line_of_the_check(tower):
    row, model, trunk, images = tower
    report = check_trunk(trunk, images, lambda images: row.forward(model, images))
    assert all(line.passed for line in report.lines), report


@pytest.mark.parametrize(
    "name", ["ViT-B-16", "PE-Core-B-16", "ViTModel", "Dinov2Model", "SiglipVisionModel"]
)
def test_a_tower_has_a_fingerprint_of_its_weights(name):
    trunk = vit_trunk(build_tower(tower_named(name)))
    before = fingerprint(trunk)
    assert before == fingerprint(trunk)
    assert before["activation"]
    weight = next(iter(trunk.model.parameters()))
    with torch.no_grad():
        weight += 1
        after = fingerprint(trunk)
        weight -= 1
    assert {part for part in before if after[part] != before[part]} == {"weights"}
