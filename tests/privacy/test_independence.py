"""The check of independence finds modules that mix samples, and only these."""

import copy
from functools import partial

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from fedprompt import DeepPrompts, GroupPrompts, encode_prompted, vit_trunk
from fedprompt.privacy import check_independence, per_sample
from models import draw_images, tiny_vit
from refusals import refused
from same import assert_identical

VALUES = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(0))
ATTENTION = partial(nn.TransformerEncoderLayer, 4, 2, 8)


class Apply(nn.Module):
    """Module that applies a function. With a parameter, `per_sample` runs it sample by sample."""

    def __init__(self, function, *, owns=False):
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.tensor(2.0)) if owns else 2.0

    def forward(self, values):
        return self.function(values) * self.scale


def normalized(values):
    return F.batch_norm(values, None, None, training=True)


MIXING = {
    "mean": lambda x: x - x.mean(0),
    "mean without a gradient": lambda x: x - x.mean(0).detach(),
    "functional batch normalization": normalized,
    "maximum": lambda x: x - x.amax(0),
    "median": lambda x: x - x.median(0).values,
    "softmax over samples": lambda x: x.softmax(0),
    "next sample": lambda x: x + 1e-4 * x.roll(1, 0),
    "comparison": lambda x: (x[:, None] > x[None]).sum(1),
    "longest sample": lambda x: x[..., : 1 + int(x[:, 0, 0].argmax())],
}


@pytest.mark.parametrize("owns", [False, True])
@pytest.mark.parametrize("name", MIXING)
def test_functions_that_mix_samples_are_found_with_their_module(name, owns):
    model = nn.Sequential(nn.LayerNorm(4), Apply(MIXING[name], owns=owns))
    if name not in ("comparison", "longest sample"):
        per_sample(model, 5)(VALUES)  # runs without an error
    with pytest.raises(
        ValueError,
        match=r"`model` must compute the outputs of each sample from that sample alone; got "
        r"outputs of samples \[.*\] that change with sample \d, first in module '1' \(Apply\)\.",
    ):
        check_independence(model, VALUES)


def test_the_error_names_the_samples():
    """By hand, only sample 3 depends on another one, which is sample 2."""

    model = lambda values: values.index_add(0, torch.tensor([3]), values[2:3])  # noqa: E731
    with pytest.raises(ValueError, match=r"of samples \[3\] that change with sample 2\."):
        check_independence(model, VALUES)


@pytest.mark.parametrize(
    "layer",
    [
        nn.LayerNorm(4),
        nn.BatchNorm1d(3).eval(),
        nn.Sequential(ATTENTION(batch_first=True), nn.Dropout(0.5)),
        ATTENTION(batch_first=True).eval(),
        nn.Conv1d(3, 2, 2),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_layers_that_keep_samples_apart_pass(layer, dtype):
    check_independence(layer.to(dtype), VALUES.to(dtype))


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_kernels_that_round_differently_for_smaller_batches_pass(scale):
    check_independence(lambda values: scale * values * (1 + 1e-6 * len(values)), VALUES)


def test_a_function_of_images_and_groups_with_a_frozen_trunk_passes(generator):
    trunk = vit_trunk(tiny_vit())
    deep = DeepPrompts(2, trunk, generator=generator).double()
    groups = GroupPrompts(3, 2, trunk.dim, layers=(1,), generator=generator).double()
    images, indices = draw_images(tiny_vit(), 4).double(), torch.tensor([0, 2, 1, 1])

    def model(images, indices):
        return encode_prompted(trunk, images, deep(), groups(indices))

    check_independence(model, [images, indices])
    check_independence(groups, indices)


class Counting(nn.Module):
    """Module that writes and replaces buffers, and whose outputs depend on them."""

    def __init__(self):
        super().__init__()
        self.register_buffer("runs", torch.zeros(()))
        self.register_buffer("sum", torch.zeros(()))

    def forward(self, values):
        self.runs += 1
        self.sum = self.sum + values.sum()
        return F.dropout(values) * self.runs


def test_buffers_streams_modes_gradients_and_inputs_are_unchanged():
    model = nn.Sequential(nn.Linear(4, 4), Counting(), Apply(MIXING["mean"]).eval())
    before, values = copy.deepcopy(model.state_dict()), VALUES.clone().requires_grad_()
    buffers, state = dict(model.named_buffers()), torch.get_rng_state()
    check_independence(model[:2], values)
    with pytest.raises(ValueError, match="change with sample 0"):
        check_independence(model, values)
    assert_identical(model.state_dict(), before)
    assert_identical(torch.get_rng_state(), state)
    assert_identical(values.detach(), VALUES)
    assert all(own is buffers[name] for name, own in model.named_buffers())
    assert [part.training for part in model] == [True, True, False]
    assert model[0].weight.grad is None
    assert values.grad is None
    assert not any(part._forward_hooks for part in model.modules())


def private_noise():
    generator = torch.Generator().manual_seed(0)
    return lambda x: x + torch.rand(x.shape, generator=generator)


test_wrong_calls_are_refused_by_name = refused(globals())("""
check_independence(lambda x: x / len(x), VALUES) -> ValueError: that change when sample 0 is left
check_independence(lambda x: x[:, 0, 0].argsort(), VALUES) -> ValueError: that change with sample 0
check_independence(nn.Sequential(nn.Identity(), nn.BatchNorm1d(3)), VALUES) \
-> ValueError: first in module '1
check_independence(3, VALUES) -> TypeError: `model` must be a module or a function; got 3
check_independence(abs, 3) -> TypeError: `batch` must be a tensor or a sequence of tensors; got 3
check_independence(abs, VALUES[:1]) -> ValueError: at least 2 samples; got [(1, 3, 4)]
check_independence(abs, [VALUES, VALUES[:2]]) -> ValueError: `batch` must have tensors
check_independence(abs, torch.ones(3, 2)) -> ValueError: `batch` must have samples that differ; got
check_independence(torch.sum, VALUES) -> ValueError: `model` must return tensors (batch=5, ...)
check_independence(str, VALUES) -> TypeError: `model` must return tensors (batch, ...); got none
check_independence(torch.log, VALUES) -> ValueError: `model(batch)` must be finite
check_independence(private_noise(), VALUES) -> ValueError: `model` must repeat its outputs from the
""")
