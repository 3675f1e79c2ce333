"""Modules of visual prompts: streams, initial values and parameter counts."""

from functools import partial

import numpy as np
import pytest
import timm
import torch
import torch.nn as nn

import fedprompt as fp
from models import num_trainable, tiny_vit

DIM, DEPTH = 12, 3


def test_each_layer_gets_its_row_of_the_parameter():
    layered = fp.LayeredPrompts(2, DIM, layers=(2, 0))
    shallow = fp.ShallowPrompts(2, DIM)
    deep = fp.DeepPrompts(2, DIM, DEPTH)
    for prompts, layers, replace in (
        (layered, (2, 0), False),
        (shallow, (0,), False),
        (deep, (0, 1, 2), True),
    ):
        stream = prompts()
        assert tuple(stream.layers) == prompts.layers == layers
        assert stream.replace == prompts.replace == replace
        assert all(
            torch.equal(tokens, row)
            for tokens, row in zip(stream.layers.values(), prompts.tokens, strict=True)
        )
    assert fp.LayeredPrompts(2, DIM, layers=(1,), replace=True)().replace


def test_each_sample_gets_the_tokens_of_its_group_at_each_layer(generator):
    groups = fp.GroupPrompts(4, 2, DIM, layers=(2, 0), generator=generator)
    indices = torch.tensor([3, 0, 3, 1])
    for replace in (False, True):
        groups.replace = replace
        stream = groups(indices)
        assert tuple(stream.layers) == groups.layers == (2, 0)
        assert stream.replace == replace
        for row, tokens in enumerate(stream.layers.values()):
            assert torch.equal(
                tokens, torch.stack([groups.tokens[group, row] for group in (3, 0, 3, 1)])
            )
    assert fp.GroupPrompts(4, 2, DIM, layers=(1,), replace=True).replace
    assert groups(indices[:0]).layers[0].shape == (0, 2, DIM)


def test_a_groups_gradient_is_the_sum_over_its_samples_and_others_have_none(generator):
    groups = fp.GroupPrompts(4, 1, 2, layers=(0, 1), generator=generator)
    indices = torch.tensor([3, 0, 3])
    weights = torch.tensor([[1.0, 2.0], [10.0, 20.0], [100.0, 200.0]])
    stream = groups(indices)
    (stream.layers[0][:, 0] * weights - 3 * stream.layers[1][:, 0] * weights).sum().backward()
    assert groups.tokens.grad[:, 0, 0].tolist() == [[10, 20], [0, 0], [0, 0], [101, 202]]
    assert torch.equal(groups.tokens.grad[:, 1], -3 * groups.tokens.grad[:, 0])


@pytest.mark.bad_input  # the hook refuses unsigned integers
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_groups_of_every_integer_dtype_are_indices(dtype, generator):
    groups = fp.GroupPrompts(2, 1, DIM, layers=(0,), generator=generator)
    assert torch.equal(
        groups(torch.tensor([1, 0], dtype=dtype)).layers[0], groups.tokens[[1, 0], 0]
    )


@pytest.mark.parametrize(
    ("dim", "patch_size", "bound"),
    [
        (768, 16, 0.0625),  # ViT-B/16: sqrt(6 / (3 * 256 + 768)) = sqrt(1 / 256)
        (768, 32, 0.0395284707521047),  # ViT-B/32: sqrt(6 / (3 * 1024 + 768)) = 1 / sqrt(640)
        (24, (8, 4), 0.2236067977499790),  # sqrt(6 / (3 * 32 + 24)) = sqrt(1 / 20)
    ],
)
@pytest.mark.parametrize(
    "kind", [fp.ShallowPrompts, fp.DeepPrompts, fp.LayeredPrompts, partial(fp.GroupPrompts, 2)]
)
def test_initial_values_are_uniform_within_the_bound_of_vpt(
    kind, dim, patch_size, bound, generator
):
    more = {
        fp.ShallowPrompts: {},
        fp.DeepPrompts: {"depth": 2},
        fp.LayeredPrompts: {"layers": (0, 5)},
    }.get(kind, {"layers": (1, 2)})
    tokens = (
        kind(40_000 // dim, dim, patch_size=patch_size, generator=generator, **more)
        .tokens.detach()
        .double()
    )
    assert (
        0.999 * bound < tokens.abs().max() <= bound * (1 + 1e-6)
    )  # fails with probability e^-40 for 40,000 draws
    assert tokens.mean().abs() < 5 * bound / np.sqrt(3 * tokens.numel())  # five standard errors
    assert abs(tokens.square().mean() / (bound**2 / 3) - 1) < 5 * np.sqrt(
        0.8 / tokens.numel()
    )  # five standard errors; var x^2 = 4/45


@pytest.mark.bad_input  # the hook refuses NumPy integers
def test_sizes_may_be_numpy_integers():
    assert fp.PadPrompts(np.int64(8), padding=np.int32(1)).rows.shape == (3, 2, 10)
    sizes = {"layers": np.arange(2), "patch_size": np.int64(4)}
    prompts = fp.LayeredPrompts(np.int64(2), np.int64(8), **sizes)
    assert prompts.tokens.shape == (2, 2, 8)
    assert "2, 8, layers=(0, 1)" in prompts.extra_repr()  # files of save_prompts record it


KINDS = pytest.mark.parametrize(
    "kind",
    [
        fp.ShallowPrompts,
        fp.DeepPrompts,
        partial(fp.LayeredPrompts, layers=(0, 2)),
        partial(fp.GroupPrompts, 2, layers=(0, 2)),
    ],
    ids=["shallow", "deep", "layered", "groups"],
)


@KINDS
def test_a_trunk_gives_width_depth_and_patch_size(kind):
    trunk = fp.vit_trunk(tiny_vit(img_size=28, patch_size=14))
    bound = (6 / (3 * 14 * 14 + DIM)) ** 0.5
    prompts = kind(500, trunk, generator=torch.Generator().manual_seed(0))
    assert prompts.patch_size == (14, 14)
    assert prompts.layers == {fp.ShallowPrompts: (0,), fp.DeepPrompts: (0, 1, 2)}.get(kind, (0, 2))
    # The same draw, with the numbers given by hand.
    more = {"depth": DEPTH} if kind is fp.DeepPrompts else {}
    again = torch.Generator().manual_seed(0)
    same = kind(500, DIM, patch_size=14, generator=again, **more)
    assert torch.equal(prompts.tokens, same.tokens)
    assert 0.99 * bound < prompts.tokens.abs().max() <= bound * (1 + 1e-6)
    assert kind(2, DIM, **more).patch_size == (16, 16)
    assert kind(2, trunk, patch_size=(4, 8)).patch_size == (4, 8)


# FedHPL, Table 6: trainable parameters of a client / 1024, for 3 prompts. A head of C classes has
# C * (d + 1) parameters.
# The table contains the numbers of CIFAR-10 and the heads of both data sets. Sums for CIFAR-100:
# 38,500 + 1152 or 13,824; 76,900 + 2304 or 27,648; 102,500 + 3072 or 73,728.
TABLE_6 = {
    "vit_small_patch16_224": {10: ("3.76", "4.88", "17.26"), 100: ("37.60", "38.72", "51.10")},
    "vit_base_patch16_224": {10: ("7.51", "9.76", "34.51"), 100: ("75.10", "77.35", "102.10")},
    "vit_large_patch16_224": {10: ("10.01", "13.01", "82.01"), 100: ("100.10", "103.10", "172.10")},
}


@pytest.mark.parametrize("name", TABLE_6)
def test_parameter_counts_equal_table_6_of_fedhpl(name):
    with torch.device("meta"):  # sizes without memory
        trunk = fp.vit_trunk(timm.create_model(name, pretrained=False))
        heads = {num_classes: nn.Linear(trunk.dim, num_classes) for num_classes in TABLE_6[name]}
        shallow, deep = fp.ShallowPrompts(3, trunk.dim), fp.DeepPrompts(3, trunk.dim, trunk.depth)
    for num_classes, head in heads.items():
        parts = (head,), (head, shallow), (head, deep)
        printed = tuple(f"{num_trainable(*modules) / 1024:.2f}" for modules in parts)
        assert printed == TABLE_6[name][num_classes]


MAKERS = {
    "LayeredPrompts": lambda **more: fp.LayeredPrompts(2, DIM, layers=(0, 2), **more),
    "ShallowPrompts": lambda **more: fp.ShallowPrompts(2, DIM, **more),
    "DeepPrompts": lambda **more: fp.DeepPrompts(2, DIM, DEPTH, **more),
    "GroupPrompts": lambda **more: fp.GroupPrompts(4, 2, DIM, layers=(0, 2), **more),
    "PadPrompts": lambda **more: fp.PadPrompts(8, **more),
    "ContextPrompts": lambda **more: fp.ContextPrompts(8, **more),
    "LowRankContext": lambda **more: fp.LowRankContext(8, length=4, rank=2, **more),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_initial_values_follow_the_generator_and_leave_the_global_one_alone(make):
    state = torch.get_rng_state()
    first, same, other = (
        make(generator=torch.Generator().manual_seed(seed)).state_dict() for seed in (3, 3, 4)
    )
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in first.items():
        assert torch.equal(value, same[name])
        assert (value != other[name]).any() or name == "right"  # which is 0 at the start
