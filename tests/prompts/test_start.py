"""Prompts that start at the mean patch token of their layers."""

from functools import partial

import pytest
import torch

import fedprompt as fp
from models import build, draw_images, row_named
from tolerance import assert_near

DIM, DEPTH, BATCH = 12, 3, 3
KINDS = {
    "shallow": fp.ShallowPrompts,
    "deep": fp.DeepPrompts,
    "layered, kept": partial(fp.LayeredPrompts, layers=(2, 0)),
    "layered, replaced": partial(fp.LayeredPrompts, layers=(0, 1, 2), replace=True),
    "groups": partial(fp.GroupPrompts, 4, layers=(1, 2)),
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def reference_means(model, images):
    """Collect the input of every block by hooks, in the model's own forward pass."""
    inputs = []
    hooks = [
        block.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
        for block in model.blocks
    ]
    model.forward_features(images)
    for hook in hooks:
        hook.remove()
    prefix = model.num_prefix_tokens
    return torch.stack([tokens[:, prefix:].flatten(0, 1).mean(0) for tokens in inputs])


def test_means_are_those_of_the_inputs_of_the_models_own_blocks(model, trunk, images):
    value, weight = fp.mean_patch_tokens(trunk, images)
    assert_near(value, reference_means(model, images).float())
    assert (value.dtype, weight.item()) == (torch.float32, BATCH)
    assert not value.requires_grad


def test_the_last_block_is_not_computed(trunk, images, monkeypatch):
    fp.mean_patch_tokens(trunk, images)  # the first images are compared with the model's features
    ran, block = [], trunk.block
    monkeypatch.setattr(trunk, "block", lambda layer, *_: ran.append(layer) or block(layer, *_))
    fp.mean_patch_tokens(trunk, images)
    assert ran == [0, 1]


def test_patches_of_a_trunk_with_rotary_positions_keep_their_places():
    model = build(row_named("vit_small_patch16_rope_224"))
    images = draw_images(model)
    value, _ = fp.mean_patch_tokens(fp.vit_trunk(model), images)
    assert_near(value, reference_means(model, images).float())


def test_clients_with_unequal_numbers_of_images_share_one_mean(trunk, model):
    images = draw_images(model, 7)
    mean = fp.weighted_mean(fp.mean_patch_tokens(trunk, own) for own in images.split([1, 4, 2]))
    expected = fp.mean_patch_tokens(trunk, images)
    assert_near(mean.value, expected.value)
    assert mean.weight == expected.weight == 7
    unweighted = sum(fp.mean_patch_tokens(trunk, own).value for own in images.split([1, 4, 2])) / 3
    assert (unweighted - expected.value).abs().max() > 1e-3


@every_kind
def test_tokens_are_the_mean_of_their_layer_plus_a_part_of_vpts_noise(kind, trunk, images):
    means = fp.mean_patch_tokens(trunk, images)
    prompts = kind(50, trunk)
    parameter = prompts.tokens
    fp.initialize_at(prompts, means, noise=0.0)
    for row, layer in enumerate(prompts.layers):
        rows = prompts.tokens.select(-3, row).reshape(-1, DIM)
        assert torch.equal(rows, means.value[layer].expand_as(rows))
    exact = prompts.tokens.detach().clone()
    for noise in (0.1, 1.0):
        fp.initialize_at(prompts, means, noise=noise, generator=torch.Generator().manual_seed(3))
        drawn = kind(50, trunk, generator=torch.Generator().manual_seed(3)).tokens
        assert_near(prompts.tokens, exact + noise * drawn)  # a second call starts anew
    assert prompts.tokens is parameter
    assert parameter.requires_grad
