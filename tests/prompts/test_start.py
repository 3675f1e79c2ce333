"""Prompts that start at the mean patch token of their layers."""

from functools import partial

import pytest
import torch
import torch.nn as nn

import fedprompt as fp
from errors import raises
from models import draw_images
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


MOST = 0.2
"""Largest relative move of the pooled feature by one prompt next to 16 patches."""


# --- Errors


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"prompts": nn.Linear(2, 2)}, TypeError, "`prompts` must be LayeredPrompts or Group"),
        ({"noise": -0.1}, ValueError, "`noise` must be at least 0; got -0.1."),
        ({"noise": 1e308}, ValueError, "`noise` must keep tokens finite in torch.float32; got"),
        ({"noise": "0.1"}, TypeError, "`noise` must be a number; got '0.1' (str)."),
        ({"generator": 3}, TypeError, "`generator` must be a torch.Generator; got 3 (int)."),
        ({"means": torch.zeros(3, 12)}, TypeError, "`means` must be a Weighted(value, weight);"),
        ({"means": fp.Weighted(torch.zeros(2, 12), torch.tensor(1.0))}, ValueError, "`means` must"),
        ({"means": fp.Weighted(torch.zeros(3, 8), torch.tensor(1.0))}, ValueError, "`means` must"),
        ({"means": fp.Weighted(torch.zeros(3, 12), torch.tensor(0.0))}, ValueError, "`means.weig"),
        (
            {"means": fp.Weighted(torch.full((3, 12), torch.nan), torch.tensor(1.0))},
            ValueError,
            "`means.value` must be finite wherever its weight is positive",
        ),
    ],
)
def test_a_bad_start_is_refused_and_changes_nothing(changes, error, message):
    prompts = fp.DeepPrompts(2, DIM, DEPTH)
    before = prompts.tokens.detach().clone()
    good = {"prompts": prompts, "means": fp.Weighted(torch.zeros(3, 12), torch.tensor(1.0))}
    arguments = good | changes
    with raises(error, message):
        fp.initialize_at(arguments.pop("prompts"), arguments.pop("means"), **arguments)
    assert torch.equal(prompts.tokens, before)


@pytest.mark.bad_input
def test_mean_tokens_refuses_bad_images(trunk, images):
    with raises(TypeError, "`trunk` must be a Trunk, such as vit_trunk(model); got str."):
        fp.mean_patch_tokens("vit", images)
    with raises(TypeError, "`images` must be floating-point of shape"):
        fp.mean_patch_tokens(trunk, images.byte())
    with raises(ValueError, "`images` must contain at least one image; got none."):
        fp.mean_patch_tokens(trunk, images[:0])
