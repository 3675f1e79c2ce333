"""DP-SGD: exact per-sample gradients, the sensitivity of a step, and Gaussian noise."""

import copy
import math
import re
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom, chi2, kstest
from timm.layers import EvoNorm2dB0
from torch.func import functional_call, grad, vmap

import fedprompt
from fedprompt import (
    ContextPrompts,
    DeepPrompts,
    GroupPrompts,
    LayeredPrompts,
    PadPrompts,
    ShallowPrompts,
    encode_prompted,
    freeze,
    vit_trunk,
)
from fedprompt.privacy import clipped_sum, noisy_mean, per_sample, poisson_batch
from models import Client, draw_images, tiny_vit
from references.dpsgd import clipped_and_added, epsilon_at, gaussian_delta, looped, sampled_delta
from same import assert_identical
from tolerance import assert_near

BATCH, CLASSES, GROUPS = 6, 4, 3


# Per-sample gradients.


class Prompted(nn.Module):
    """Any prompts over a shared trunk. Group prompts receive the group indices."""

    def __init__(self, trunk, prompts, head=None):
        super().__init__()
        self.trunk = trunk
        self.prompts = nn.ModuleList(prompts)
        self.grouped = [isinstance(each, GroupPrompts) for each in prompts]
        self.head = head or nn.Linear(trunk.dim, CLASSES)
        self.double()

    def forward(self, images, indices):
        streams = [
            each(indices) if grouped else each()
            for each, grouped in zip(self.prompts, self.grouped, strict=True)
        ]
        pooled, outputs = encode_prompted(self.trunk, images, *streams, dtype=images.dtype)
        return self.head(torch.cat([pooled[:, None], *outputs], 1).mean(1))


class Bordered(nn.Module):
    """A border of pixels in front of a frozen CNN with batch normalization."""

    def __init__(self, generator):
        super().__init__()
        self.border = PadPrompts(16, padding=2, generator=generator)
        cnn = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        for parameter in cnn.parameters():
            nn.init.normal_(parameter, std=0.3, generator=generator)
        self.cnn, self.head = freeze(cnn), nn.Linear(8, CLASSES)
        self.double()

    def forward(self, images, indices):
        return self.head(self.cnn(self.border(images)))


class Tied(nn.Module):
    """Model with one parameter under two names. Its gradient is the sum over both uses."""

    def __init__(self, trunk, generator):
        super().__init__()
        self.trunk = trunk
        self.prompts = DeepPrompts(1, trunk.dim, trunk.depth, generator=generator)
        self.up, self.down = nn.Linear(trunk.dim, trunk.dim), nn.Linear(trunk.dim, trunk.dim)
        self.down.weight = self.up.weight
        self.double()

    def forward(self, images, indices):
        pooled = encode_prompted(self.trunk, images, self.prompts(), dtype=images.dtype).pooled
        return self.down(self.up(pooled).tanh())[:, :CLASSES]


def build(name, generator):
    trunk = vit_trunk(tiny_vit())
    dim, depth = trunk.dim, trunk.depth
    groups = partial(GroupPrompts, GROUPS, 2, dim, generator=generator)
    shared = partial(LayeredPrompts, 2, dim, generator=generator)
    norm = nn.LayerNorm(dim)
    streams = {
        "deep": [DeepPrompts(2, dim, depth, generator=generator)],
        "shallow": [ShallowPrompts(3, dim, generator=generator)],
        "carried on, two of three layers": [shared(layers=(2, 0))],
        "groups": [groups(layers=(1, 2))],
        "groups, replaced": [groups(layers=(0, 1, 2), replace=True)],
        "shared and groups (SGPT)": [shared(layers=(0, 1)), groups(layers=(1, 2))],
        "a head of several layers": [shared(layers=(0,))],
        "no prompts": [LayeredPrompts(0, dim, layers=(0,))],
    }
    heads = {
        "a head of several layers": nn.Sequential(
            norm, nn.Linear(dim, 5), nn.GELU(), nn.Linear(5, CLASSES)
        )
    }
    special = {
        "border of pixels": partial(Bordered, generator),
        "tied": partial(Tied, trunk, generator),
    }
    return special[name]() if name in special else Prompted(trunk, streams[name], heads.get(name))


MODELS = [
    "deep",
    "shallow",
    "carried on, two of three layers",
    "groups",
    "groups, replaced",
    "shared and groups (SGPT)",
    "a head of several layers",
    "no prompts",
    "border of pixels",
    "tied",
]


def batch_of(size, dtype=torch.float64):
    """Return images, groups and labels. Some groups have several samples, and one may have none."""
    images = draw_images(tiny_vit(), BATCH)[:size].to(dtype)
    return images, torch.tensor([2, 0, 2, 2, 0, 2])[:size], torch.tensor([0, 1, 2, 3, 1, 1])[:size]


def total_loss(model, images, indices, labels):
    return F.cross_entropy(model(images, indices), labels, reduction="sum")


def gradients_of(model, *batch):
    """Compute per-sample gradients by one forward and one backward pass."""
    copies = per_sample(model, len(batch[0]))
    total_loss(copies, *batch).backward()
    return {
        name: parameter.grad
        for name, parameter in copies.named_parameters()
        if parameter.requires_grad
    }


@pytest.mark.parametrize("size", [BATCH, 1])
@pytest.mark.parametrize("name", MODELS)
def test_one_pass_gives_the_gradients_of_single_passes(name, size, generator):
    model, batch = build(name, generator), batch_of(size)
    actual, expected = gradients_of(model, *batch), looped(model, total_loss, *batch)
    assert list(actual) == list(expected)
    for key in expected:
        assert_near(actual[key], expected[key])
    if size > 1 and name != "no prompts":
        assert all(
            not torch.allclose(gradient[0], gradient[1])
            for gradient in expected.values()
            if gradient.numel()
        )


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("name", MODELS)
def test_one_pass_gives_the_gradients_of_vmap(name, generator):
    """The reference runs the whole model under vmap, with the frozen backbone."""
    model, batch = build(name, generator), batch_of(BATCH)
    parameters = {
        key: parameter.detach()
        for key, parameter in model.named_parameters()
        if parameter.requires_grad
    }

    def own_loss(parameters, *sample):
        images, indices, labels = (each[None] for each in sample)
        return F.cross_entropy(functional_call(model, parameters, (images, indices)), labels)

    expected = vmap(grad(own_loss), in_dims=(None, 0, 0, 0))(parameters, *batch)
    for key, gradient in gradients_of(model, *batch).items():
        assert_near(gradient, expected[key])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["deep", "shared and groups (SGPT)"])
def test_lower_precisions(name, dtype, generator):
    model, batch = build(name, generator), batch_of(BATCH)
    expected = looped(model, total_loss, *batch)
    vit = tiny_vit().to(dtype)
    model.trunk = vit_trunk(vit)
    for key, gradient in gradients_of(model.to(dtype), *batch_of(BATCH, dtype)).items():
        assert gradient.dtype == dtype
        scale = float(expected[key].abs().max())
        assert_near(
            gradient / scale,
            expected[key] / scale,
            dtype=torch.float32 if dtype == torch.float32 else None,
        )


def test_the_sum_over_samples_is_the_gradient_of_the_batch(generator):
    model, batch = build("shared and groups (SGPT)", generator), batch_of(BATCH)
    total_loss(model, *batch).backward()
    for name, gradient in gradients_of(model, *batch).items():
        assert_near(gradient.sum(0), model.get_parameter(name).grad)


def test_an_empty_batch_has_empty_gradients_and_its_step_is_noise(generator):
    model, batch = build("shared and groups (SGPT)", generator), batch_of(0)
    gradients = gradients_of(model, *batch)
    for name, parameter in model.named_parameters():
        assert gradients[name].shape == (0, *parameter.shape)
    total = clipped_sum(gradients, max_norm=1.0)
    assert all(not tensor.any() for tensor in total.values())
    step = noisy_mean(
        total, multiplier=1.0, max_norm=1.0, expected_batch_size=3, generator=generator
    )
    assert all(tensor.all() for tensor in step.values())


def test_a_sample_has_a_gradient_only_for_its_own_group(generator):
    model, (images, indices, labels) = build("groups", generator), batch_of(BATCH)
    gradient = gradients_of(model, images, indices, labels)["prompts.0.tokens"]
    for sample, group in enumerate(indices.tolist()):
        used = gradient[sample].flatten(1).any(1)
        assert used.nonzero().flatten().tolist() == [group]


def test_copies_take_no_memory_and_the_model_is_unchanged(generator):
    model = build("shared and groups (SGPT)", generator)
    before, batch = copy.deepcopy(model.state_dict()), batch_of(BATCH)
    copies = per_sample(model, 1000)
    for name, parameter in copies.named_parameters():
        own = model.get_parameter(name)
        assert parameter.shape == (1000, *own.shape)
        assert parameter.data_ptr() == own.data_ptr()
        assert parameter.untyped_storage().nbytes() == own.untyped_storage().nbytes()
    gradients_of(model, *batch)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert_identical(model.state_dict(), before)
    assert copies.trunk is model.trunk
    assert type(copies) is type(model)


def test_frozen_parameters_are_shared(generator):
    model, batch = build("shared and groups (SGPT)", generator), batch_of(BATCH)
    model.head.bias.requires_grad_(False)
    model.prompts[0].requires_grad_(False)
    expected = looped(model, total_loss, *batch)
    actual = gradients_of(model, *batch)
    assert list(actual) == list(expected) == ["prompts.1.tokens", "head.weight"]
    for name in expected:
        assert_near(actual[name], expected[name])
    assert per_sample(model, 2).prompts[0].tokens is model.prompts[0].tokens


def test_every_sample_has_a_separate_dropout_mask(generator):
    model = nn.Sequential(nn.Linear(1, 400), nn.Dropout(0.5))
    outputs = per_sample(nn.Sequential(Wrapped(model)), 8)(torch.ones(8, 1))
    dropped = outputs == 0
    assert 0.4 < dropped.double().mean() < 0.6
    assert len({tuple(row.tolist()) for row in dropped}) == 8


class Wrapped(nn.Module):
    """Module with a parameter and a child with parameters. Both run under vmap."""

    def __init__(self, child):
        super().__init__()
        self.child, self.scale = child, nn.Parameter(torch.tensor(2.0))

    def forward(self, values):
        return self.scale * self.child(values)


def test_a_module_with_parameters_may_have_children_with_parameters(generator):
    model = Wrapped(nn.Linear(3, 2).double())
    values = torch.randn(BATCH, 3, generator=generator, dtype=torch.float64)
    loss = lambda model, values: model(values).square().sum()  # noqa: E731
    copies = per_sample(model, BATCH)
    loss(copies, values).backward()
    expected = looped(model, loss, values)
    assert [name for name, _ in copies.named_parameters()] == list(expected)
    for name, parameter in copies.named_parameters():
        assert_near(parameter.grad, expected[name], dtype=torch.float32)


class Shared(nn.Module):
    """Module with a parameter, and with one child under two names (`a` and `features`)."""

    def __init__(self):
        super().__init__()
        self.scale, self.a = nn.Parameter(torch.tensor(2.0)), nn.Linear(3, 3)
        self.features = self.a

    def forward(self, values):
        return self.scale * self.features(self.a(values).tanh())


class Repeated(nn.Module):
    """Model that uses one block three times. Each use adds to its gradient."""

    def __init__(self, owns):
        super().__init__()
        block = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        self.blocks = nn.ModuleList([block, block, nn.Linear(3, 3), block])
        self.bias = nn.Parameter(torch.ones(3)) if owns else 0.0

    def forward(self, values):
        for block in self.blocks:
            values = block(values)
        return values + self.bias


class TiedBelow(nn.Module):
    """Two modules that share a weight. Each of them is also a part of a third module."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(3, 3), nn.Linear(3, 3)
        self.down.weight = self.up.weight
        self.pair = nn.Sequential(self.up, nn.Tanh(), self.down)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, values):
        return self.scale * self.up(self.pair(values))


SHARED = {
    "two names": Shared,
    "one block three times": partial(Repeated, owns=False),
    "the same in an owner": partial(Repeated, owns=True),
    "two names in a larger model": lambda: nn.Sequential(shared := Shared(), nn.Tanh(), shared),
    "tied weights": TiedBelow,
}


def squared_error(model, values):
    return model(values).square().sum()


@pytest.mark.parametrize("name", SHARED)
def test_a_module_with_two_names_has_the_gradients_of_both_uses_and_is_unchanged(name, generator):
    model = SHARED[name]().double()
    values = torch.randn(BATCH, 3, generator=generator, dtype=torch.float64)
    before = copy.deepcopy(model.state_dict())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    expected = looped(model, squared_error, values)
    for _ in range(2):  # The second run shows that the first left the model unchanged.
        copies = per_sample(model, BATCH)
        assert_near(copies(values), model(values))
        squared_error(copies, values).backward()
        assert [key for key, _ in copies.named_parameters()] == list(expected)
        for key, parameter in copies.named_parameters():
            assert_near(parameter.grad, expected[key])
    assert_identical(model.state_dict(), before)
    again = dict(model.named_parameters(remove_duplicate=False))
    assert list(again) == list(parameters)
    assert all(
        again[key] is parameter and parameter.grad is None for key, parameter in parameters.items()
    )


def test_a_module_with_two_names_runs_once_for_each_use(generator):
    model, calls = Shared(), []
    model.a.register_forward_hook(lambda *_: calls.append(1))
    per_sample(model, BATCH)(torch.randn(BATCH, 3, generator=generator))
    assert len(calls) == 2


def test_a_model_is_unchanged_after_an_error():
    model = Shared()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="Expected size for first two dimensions"):
        per_sample(model, 2)(torch.ones(2, 7))
    assert all(isinstance(parameter, nn.Parameter) for parameter in model.a._parameters.values())
    assert_identical(model.state_dict(), before)


def test_a_container_with_two_names_can_be_indexed_under_both():
    """The blocks are a container inside a module that runs one sample at a time."""
    owner, outer = Repeated(owns=True), nn.Module()
    outer.owner, outer.blocks = owner, owner.blocks
    copies = per_sample(outer, 2)
    assert len(copies.blocks) == 4
    assert copies.blocks[0] is copies.blocks[1] is copies.blocks[3]
    assert copies.blocks[2](torch.ones(2, 3)).shape == (2, 3)


@pytest.mark.bad_input
def test_inference_mode_is_refused():
    message = r"per_sample computes gradients, which torch\.inference_mode does not record"
    copies = per_sample(nn.Linear(3, 2), 2)
    with torch.inference_mode():
        with pytest.raises(RuntimeError, match=message):
            per_sample(nn.Linear(3, 2), 2)
        with pytest.raises(RuntimeError, match=message):
            copies(torch.ones(2, 3))
        made_here = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=r"`model` must be made outside torch\.inference_mode"):
        per_sample(made_here, 2)


def test_context_prompts_are_repeated_for_each_sample(generator):
    context = ContextPrompts(8, num_contexts=2, length=4, generator=generator)
    assert_identical(
        per_sample(context, 3)(), context().detach().expand(3, 2, 4, 8), check_stride=False
    )


def test_batch_normalization_in_train_mode_is_refused(generator):
    """In train mode, the statistics of a batch mix its samples. In eval mode they do not."""
    model = Bordered(generator)
    model.cnn.train()
    with pytest.raises(ValueError, match=r"`model` must keep samples apart.*cnn\.1"):
        per_sample(model, 2)
    model.cnn.eval()
    per_sample(model, 2)


@pytest.mark.parametrize(
    ("mixing", "training"),
    [
        # Without running statistics, eval mode uses those of the batch too.
        (nn.BatchNorm1d(3, affine=False, track_running_stats=False), False),
        (nn.BatchNorm1d(3, track_running_stats=False), False),
        (nn.BatchNorm1d(3), True),
        # The statistics of all samples are written into the original.
        (nn.InstanceNorm1d(3, track_running_stats=True), True),
        # This layer of timm is not a subclass of PyTorch's batch normalization.
        (EvoNorm2dB0(3), True),
    ],
)
def test_only_statistics_over_samples_are_refused(mixing, training):
    model = nn.Sequential(nn.Linear(4, 3), mixing).train(training)
    with pytest.raises(ValueError, match=r"`model` must keep samples apart.*'1'"):
        per_sample(model, 2)
    for alone in (
        nn.InstanceNorm1d(3),
        nn.LayerNorm(3),
        nn.BatchNorm1d(3).eval(),
        nn.InstanceNorm1d(3, track_running_stats=True).eval(),
    ):
        per_sample(nn.Sequential(nn.Linear(4, 3), alone), 2)


class Returning(nn.Module):
    """Module with one parameter that returns the result of a given function."""

    def __init__(self, result):
        super().__init__()
        self.scale, self.result = nn.Parameter(torch.ones(4)), result

    def forward(self, *inputs):
        return self.result(self.scale, *inputs)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "result",
    [
        # Without the check, only the first of the two would be returned.
        lambda scale, values: (values * scale, values),
        lambda scale, values: {"logits": values * scale},
        lambda scale, values: None,
    ],
)
def test_results_that_are_neither_a_tensor_nor_a_stream_are_refused(result):
    with pytest.raises(
        TypeError,
        match="`model` must return a tensor or a PromptStream from every module that owns "
        "parameters; got",
    ):
        per_sample(Returning(result), 3)(torch.ones(3, 4))
    with pytest.raises(TypeError, match="`model` must return a tensor or a PromptStream"):
        per_sample(Returning(lambda scale: result(scale, torch.ones(1, 4))), 3)()


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "result",
    [lambda scale, values: (values * scale).sum(), lambda scale, values: values.sum() * scale],
)
def test_results_without_a_batch_are_refused(result):
    with pytest.raises(
        ValueError,
        match=r"`model` must return \(batch, ...\) from every module that is called with a "
        r"batch; got",
    ):
        per_sample(Returning(result), 3)(torch.ones(3, 4))


def test_copies_follow_the_values_and_the_modes_of_the_original():
    """The copies were made before the change. This is stated in the docstring of `per_sample`."""
    owner, other = Wrapped(nn.Dropout(0.5)), nn.Dropout(0.5)
    model = nn.Sequential(owner, other).eval()
    copies, ones = per_sample(model, 2), torch.ones(2, 400)
    with torch.no_grad():
        owner.scale.fill_(3.0)
    assert_identical(copies(ones).detach(), torch.full((2, 400), 3.0))
    copies.train()
    # `copies.train()` does not affect modules with parameters.
    assert bool((copies[0](ones) == 3).all())
    assert bool((copies[1](ones) == 0).any())
    copies.eval()
    model.train()
    assert bool((copies[0](ones) == 0).any())
    # Modules without parameters have a separate mode.
    assert bool((copies[1](ones) == 1).all())


# Sensitivity. Each law takes an implementation, so that it can be tested on wrong ones too.


def ours(gradients, *, max_norm, multiplier, expected_batch_size, generator):
    total = clipped_sum(gradients, max_norm=max_norm)
    return noisy_mean(
        total,
        multiplier=multiplier,
        max_norm=max_norm,
        expected_batch_size=expected_batch_size,
        generator=generator,
    )


def _noise(like, sigma, generator):
    return sigma * torch.randn(like.shape, generator=generator, dtype=torch.float64)


def clips_each_tensor(gradients, *, max_norm, **others):
    parts = [
        ours({name: gradient}, max_norm=max_norm, **others) for name, gradient in gradients.items()
    ]
    return {name: part[name] for name, part in zip(gradients, parts, strict=True)}


def clips_the_sum(gradients, **others):
    return ours(
        {name: gradient.sum(0, keepdim=True) for name, gradient in gradients.items()}, **others
    )


def clips_nothing(gradients, *, max_norm, multiplier, expected_batch_size, generator):
    total = {name: gradient.double().sum(0) for name, gradient in gradients.items()}
    return noisy_mean(
        total,
        multiplier=multiplier,
        max_norm=max_norm,
        expected_batch_size=expected_batch_size,
        generator=generator,
    )


def stretches_short_gradients(gradients, *, max_norm, **others):
    norm = (
        sum(
            gradient.double().reshape(len(gradient), gradient.shape[1:].numel()).square().sum(1)
            for gradient in gradients.values()
        )
        .sqrt()
        .clamp(min=1e-30)
    )
    longer = {
        name: 1e6 * gradient.double() / norm.reshape(-1, *[1] * (gradient.ndim - 1))
        for name, gradient in gradients.items()
    }
    return ours(longer, max_norm=max_norm, **others)


def divides_by_the_batch(gradients, *, expected_batch_size, **others):
    return ours(gradients, expected_batch_size=len(next(iter(gradients.values()))), **others)


def does_not_divide(gradients, *, expected_batch_size, **others):
    return ours(gradients, expected_batch_size=1, **others)


def noise_for_each_sample(gradients, *, max_norm, multiplier, expected_batch_size, generator):
    total = clipped_sum(gradients, max_norm=max_norm)
    batch = len(next(iter(gradients.values())))
    noisy = {
        name: sum((_noise(tensor, multiplier * max_norm, generator) for _ in range(batch)), tensor)
        for name, tensor in total.items()
    }
    return {name: tensor / expected_batch_size for name, tensor in noisy.items()}


def noise_without_the_norm(gradients, *, max_norm, multiplier, expected_batch_size, generator):
    total = clipped_sum(gradients, max_norm=max_norm)
    return {
        name: (tensor + _noise(tensor, multiplier, generator)) / expected_batch_size
        for name, tensor in total.items()
    }


def noise_on_the_mean(gradients, *, max_norm, multiplier, expected_batch_size, generator):
    total = clipped_sum(gradients, max_norm=max_norm)
    return {
        name: tensor / expected_batch_size + _noise(tensor, multiplier * max_norm, generator)
        for name, tensor in total.items()
    }


def noise_repeated(gradients, *, max_norm, **others):
    total, seed = clipped_sum(gradients, max_norm=max_norm), others.pop("generator").initial_seed()
    again = lambda: torch.Generator().manual_seed(seed)  # noqa: E731
    return {
        name: noisy_mean({name: tensor}, max_norm=max_norm, generator=again(), **others)[name]
        for name, tensor in total.items()
    }


def uniform_noise(gradients, *, max_norm, multiplier, expected_batch_size, generator):
    total, bound = clipped_sum(gradients, max_norm=max_norm), multiplier * max_norm * math.sqrt(3)
    return {
        name: (
            tensor
            + bound * (2 * torch.rand(tensor.shape, generator=generator, dtype=torch.float64) - 1)
        )
        / expected_batch_size
        for name, tensor in total.items()
    }


def drawn(seed, *, batch=5, scale=3.0, dtype=torch.float64):
    """Draw gradients of three names, with norms below and above 1. Two samples are opposed."""
    generator = torch.Generator().manual_seed(seed)
    sizes = scale * 10 ** (2 * torch.rand(batch, generator=generator, dtype=torch.float64) - 1.5)
    gradients = {}
    for name, shape in {"tokens": (2, 3), "weight": (4,), "scale": ()}.items():
        gradient = torch.randn(batch, *shape, generator=generator, dtype=torch.float64)
        gradient[1:2] = -gradient[:1]
        gradients[name] = (gradient * sizes.reshape(-1, *[1] * len(shape))).to(dtype)
    return gradients


def without(gradients, sample):
    return {
        name: torch.cat([gradient[:sample], gradient[sample + 1 :]])
        for name, gradient in gradients.items()
    }


def distance(first, second):
    return math.sqrt(
        math.fsum(
            number**2
            for name in first
            for number in (first[name] - second[name]).flatten().tolist()
        )
    )


def check_sensitivity(step, seed, max_norm):
    """Removing a sample changes B times the step by at most C, and replacing one by at most 2 C."""
    quiet = partial(
        step,
        max_norm=max_norm,
        multiplier=0.0,
        expected_batch_size=50,
        generator=torch.Generator().manual_seed(0),
    )
    gradients = drawn(seed)
    whole = quiet(gradients)
    for sample in range(5):
        assert 50 * distance(whole, quiet(without(gradients, sample))) <= max_norm * (1 + 1e-12)
        rest = without(gradients, sample)
        others = {
            name: torch.cat([rest[name], -9 * gradient[sample : sample + 1]])
            for name, gradient in gradients.items()
        }
        assert 50 * distance(whole, quiet(others)) <= 2 * max_norm * (1 + 1e-12)


def check_value(step, seed, max_norm):
    """The step is the sum of the reference divided by B. Short gradients keep their norm."""
    gradients = drawn(seed)
    mean = step(
        gradients,
        max_norm=max_norm,
        multiplier=0.0,
        expected_batch_size=50,
        generator=torch.Generator().manual_seed(0),
    )
    for name, tensor in clipped_and_added(gradients, max_norm).items():
        # The tolerance covers the margin for rounding, 2^-40 of each sample.
        torch.testing.assert_close(50 * mean[name], tensor, rtol=0, atol=1e-11 * max_norm)


def check_noise(step, seed, max_norm):
    """For a sum of 0, the step is independent normal noise of deviation z C / B."""
    multiplier, expected, count = 0.7, 20, 10_000
    low, high = chi2.ppf([1e-6, 1 - 1e-6], 2 * count)
    for batch in (4, 1, 0):
        quiet = {
            name: torch.zeros(batch, count, dtype=torch.float64) for name in ("tokens", "weight")
        }
        generator = torch.Generator().manual_seed(seed)
        mean = step(
            quiet,
            max_norm=max_norm,
            multiplier=multiplier,
            expected_batch_size=expected,
            generator=generator,
        )
        numbers = torch.cat([mean["tokens"], mean["weight"]]) * expected / (multiplier * max_norm)
        assert low < numbers.square().sum() < high
        assert kstest(numbers.numpy(), "norm").pvalue > 1e-6
        assert len(set(numbers.tolist())) == 2 * count


LAWS = {"sensitivity": check_sensitivity, "value": check_value, "noise": check_noise}
WRONG = {
    clips_each_tensor: {"sensitivity", "value"},
    clips_the_sum: {"sensitivity", "value"},
    clips_nothing: {"sensitivity", "value"},
    divides_by_the_batch: {"sensitivity", "value", "noise"},
    does_not_divide: {"sensitivity", "value", "noise"},
    stretches_short_gradients: {"value"},
    noise_for_each_sample: {"noise"},
    noise_without_the_norm: {"noise"},
    noise_on_the_mean: {"noise"},
    noise_repeated: {"noise"},
    uniform_noise: {"noise"},
}


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 2**32), max_norm=st.floats(1e-3, 30))
def test_one_sample_changes_a_step_by_at_most_the_sensitivity(seed, max_norm):
    check_sensitivity(ours, seed, max_norm)
    check_value(ours, seed, max_norm)


@pytest.mark.parametrize("max_norm", [0.05, 1.0, 2.5])
def test_noise_has_the_deviation_of_the_formula(max_norm):
    check_noise(ours, 0, max_norm)


@pytest.mark.parametrize("wrong", WRONG, ids=lambda step: step.__name__)
def test_known_wrong_steps_break_their_laws(wrong):
    for law, check in LAWS.items():
        broken = 0
        for seed in range(6):
            try:
                check(wrong, seed, 0.5)
            except (AssertionError, ValueError, ZeroDivisionError):
                broken += 1
        assert (broken > 0) == (law in WRONG[wrong]), law


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_bound_holds_for_gradients_of_every_precision(dtype):
    gradients = drawn(3, batch=1, scale=300.0, dtype=dtype)
    total = clipped_sum(gradients, max_norm=0.7)
    assert all(tensor.dtype == torch.float64 for tensor in total.values())
    length = distance(total, {name: torch.zeros_like(tensor) for name, tensor in total.items()})
    assert length <= 0.7
    assert length == pytest.approx(0.7, rel=1e-11)


def test_rounding_never_exceeds_the_bound():
    """Without a margin for rounding, about half of these would exceed the bound."""
    for seed in range(100):
        total = clipped_sum(drawn(seed, batch=1, scale=300.0), max_norm=0.7)
        assert (
            distance(total, {name: torch.zeros_like(tensor) for name, tensor in total.items()})
            <= 0.7
        )


@pytest.mark.parametrize("scale", [2.0**1000, 2.0**-700, 1.0])
def test_huge_and_tiny_gradients_are_clipped_by_their_norm(scale):
    """By hand, the samples have norms 5 and 1/2 over two names. Only the first is clipped."""
    gradients = {
        "a": torch.tensor([3.0, 0.3], dtype=torch.float64) * scale,
        "b": torch.tensor([[-4.0], [0.4]], dtype=torch.float64) * scale,
    }
    total = clipped_sum(gradients, max_norm=scale)
    torch.testing.assert_close(total["a"].item() / scale, 0.6 + 0.3, rtol=1e-11, atol=0)
    torch.testing.assert_close(total["b"].item() / scale, -0.8 + 0.4, rtol=1e-11, atol=0)


@pytest.mark.bad_input
def test_sums_and_means_too_large_for_float64_are_refused_by_name():
    largest = {"a": torch.tensor([1.7e308, 1.7e308], dtype=torch.float64)}
    with pytest.raises(
        ValueError, match=r"`gradients\['a'\] clipped and added` must be finite; got 1 entries of 1"
    ):
        clipped_sum(largest, max_norm=1.7e308)
    with pytest.raises(
        ValueError, match=r"`total\['a'\] with its noise` must be finite; got 2 entries of 2"
    ):
        step_of(total=largest, expected_batch_size=1e-9)


def test_the_sums_of_parts_of_a_batch_add_up(generator):
    gradients = drawn(1)
    parts = [
        {name: gradient[cut] for name, gradient in gradients.items()}
        for cut in (slice(2), slice(2, 5))
    ]
    first, second = (clipped_sum(part, max_norm=1.0) for part in parts)
    for name, tensor in clipped_sum(gradients, max_norm=1.0).items():
        assert_near(first[name] + second[name], tensor)


def test_gradients_of_zero_stay_zero():
    assert clipped_sum({"a": torch.zeros(3, 2)}, max_norm=1.0)["a"].tolist() == [0.0, 0.0]


def test_inputs_are_not_changed(generator):
    gradients = drawn(0)
    before = copy.deepcopy(gradients)
    total = clipped_sum(gradients, max_norm=1.0)
    kept = copy.deepcopy(total)
    noisy_mean(total, multiplier=1.0, max_norm=1.0, expected_batch_size=5, generator=generator)
    assert_identical(gradients, before)
    assert_identical(total, kept)


def test_one_image_changes_the_step_of_a_model_by_at_most_the_sensitivity(generator):
    """The step is computed from images. Its bound is C / B."""
    client = Client(vit_trunk(tiny_vit()), generator)
    images, _, labels = batch_of(BATCH)

    def step(chosen):
        copies = per_sample(client, len(chosen))
        F.cross_entropy(copies(images[chosen]), labels[chosen], reduction="sum").backward()
        gradients = {name: parameter.grad for name, parameter in copies.named_parameters()}
        total = clipped_sum(gradients, max_norm=0.1)
        return noisy_mean(
            total, multiplier=0.0, max_norm=0.1, expected_batch_size=4, generator=generator
        )

    whole = step(list(range(BATCH)))
    moved = [
        distance(whole, step([other for other in range(BATCH) if other != one]))
        for one in range(BATCH)
    ]
    assert max(moved) <= 0.1 / 4 * (1 + 1e-9)
    # All gradients are clipped here, so the bound is attained.
    assert max(moved) > 0.99 * 0.1 / 4


@pytest.mark.parametrize("weight", [0, 0.5, 1, 1000])
def test_one_client_changes_the_sum_of_the_page_by_at_most_the_bound(weight, monkeypatch):
    """The loop in docs/how-to/differential-privacy.md, for any weight that a client reports."""
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "differential-privacy.md").read_text()
    (block,) = (
        block
        for block in re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
        if "num_clients" in block
    )
    model, claims, totals, collect = nn.Linear(4, 3), [], [], fedprompt.collect
    nn.init.constant_(model.weight, 10.0)

    def trained(model, *, weight):
        nn.init.constant_(model.weight, 11.0)
        return collect(model, weight=claims[-1])

    def caught(total, **options):
        totals.append(total)
        return noisy_mean(total, **options)

    monkeypatch.setattr(fedprompt, "collect", trained)
    monkeypatch.setattr(fedprompt.privacy, "noisy_mean", caught)
    for claim, clients in ((weight, [0]), (1, [0, 1])):
        claims.append(claim)
        monkeypatch.setattr(
            fedprompt.privacy,
            "poisson_batch",
            lambda count, clients=clients, **options: torch.tensor(clients),
        )
        names = {
            "fp": fedprompt,
            "torch": torch,
            "model": model,
            "draw": torch.Generator().manual_seed(0),
        }
        nn.init.constant_(model.weight, 10.0)
        exec(compile(block, "docs/how-to/differential-privacy.md", "exec"), names)
    lengths = [
        distance(total, {name: torch.zeros_like(tensor) for name, tensor in total.items()})
        for total in totals
    ]
    assert lengths[0] == pytest.approx(0.5 * min(weight, 1), rel=1e-4)
    assert lengths[0] <= 0.5
    # Two equal changes add up.
    assert lengths[1] == pytest.approx(1.0, rel=1e-4)


# Poisson sampling.


def check_poisson(draw, seed):
    """Sizes are binomial, and examples are drawn uniformly and independently."""
    examples, rate, times = 40, 0.3, 3000
    generator = torch.Generator().manual_seed(seed)
    taken = torch.zeros(times, examples, dtype=torch.float64)
    for row in taken:
        indices = draw(examples, rate=rate, generator=generator)
        assert indices.tolist() == sorted(set(indices.tolist()))
        row[indices] = 1
    sizes = taken.sum(1)
    spread = (times - 1) * sizes.var().item() / (examples * rate * (1 - rate))
    low, high = chi2.ppf([1e-4, 1 - 1e-4], times - 1)
    assert low < spread < high, "the size of a batch"
    low, high = binom.ppf([1e-5, 1 - 1e-5], times, rate)
    assert bool(((low <= taken.sum(0)) & (taken.sum(0) <= high)).all()), "chance of each example"
    low, high = binom.ppf([1e-5, 1 - 1e-5], times, rate**2)
    together = (taken[:, 0::2] * taken[:, 1::2]).sum(0)
    assert bool(((low <= together) & (together <= high)).all()), "pairs"


def draws_a_fixed_number(num_examples, *, rate, generator):
    return (
        torch.randperm(num_examples, generator=generator)[: round(rate * num_examples)]
        .sort()
        .values
    )


def draws_pairs_together(num_examples, *, rate, generator):
    return (
        torch.rand(num_examples // 2, generator=generator)
        .repeat_interleave(2)
        .lt(rate)
        .nonzero()[:, 0]
    )


def draws_some_more_often(num_examples, *, rate, generator):
    return (
        torch.rand(num_examples, generator=generator)
        .lt(torch.linspace(0.8 * rate, 1.2 * rate, num_examples))
        .nonzero()[:, 0]
    )


def test_examples_are_drawn_independently():
    check_poisson(poisson_batch, 0)


@pytest.mark.parametrize(
    "wrong", [draws_a_fixed_number, draws_pairs_together, draws_some_more_often]
)
def test_known_wrong_samplers_are_rejected(wrong):
    with pytest.raises(AssertionError):
        check_poisson(wrong, 0)


def test_the_largest_and_a_tiny_rate(generator):
    assert poisson_batch(5, rate=1, generator=generator).tolist() == [0, 1, 2, 3, 4]
    assert poisson_batch(5, rate=1e-12, generator=generator).shape == (0,)
    assert poisson_batch(5, rate=0.5, generator=generator).dtype == torch.int64


# Bad input.

LINEAR = nn.Linear(2, 2)
BAD = [
    (lambda g: per_sample(LINEAR.state_dict(), 2), TypeError, "`model` must be an nn.Module"),
    (lambda g: per_sample(LINEAR, 2.0), TypeError, "`batch_size` must be an integer"),
    (lambda g: per_sample(LINEAR, -1), ValueError, "`batch_size` must be at least 0; got -1."),
    (
        lambda g: per_sample(freeze(nn.Linear(2, 2)), 2),
        ValueError,
        "`model` must have a parameter with requires_grad",
    ),
    (
        lambda g: per_sample(LINEAR, 2)(torch.zeros(3, 2)),
        ValueError,
        r"`inputs\[0\]` must have the batch of 2 samples.*\(3, 2\)",
    ),
    (
        lambda g: per_sample(LINEAR, 2)(3.0),
        ValueError,
        r"`inputs\[0\]` must have the batch of 2 samples; got 3.0",
    ),
    (
        lambda g: clipped_sum(torch.zeros(2), max_norm=1.0),
        TypeError,
        "`gradients` must map names to tensors",
    ),
    (
        lambda g: clipped_sum({}, max_norm=1.0),
        ValueError,
        "`gradients` must hold at least one name",
    ),
    (
        lambda g: clipped_sum({"a": None}, max_norm=1.0),
        TypeError,
        r"`gradients\['a'\]` must be a floating-point tensor; got None",
    ),
    (
        lambda g: clipped_sum({"a": torch.zeros(2, dtype=torch.int64)}, max_norm=1.0),
        TypeError,
        "floating-point",
    ),
    (
        lambda g: clipped_sum({"a": torch.zeros(())}, max_norm=1.0),
        ValueError,
        r"`gradients` must all have shape \(batch, ...\)",
    ),
    (
        lambda g: clipped_sum({"a": torch.zeros(2), "b": torch.zeros(3)}, max_norm=1.0),
        ValueError,
        "got batches {'a': 2, 'b': 3}",
    ),
    (
        lambda g: clipped_sum({"a": torch.tensor([1.0, math.nan])}, max_norm=1.0),
        ValueError,
        r"`gradients\['a'\]` must be finite",
    ),
    (
        lambda g: clipped_sum({"a": torch.zeros(2)}, max_norm=0),
        ValueError,
        "`max_norm` must be above 0",
    ),
    (lambda g: step_of(total=None), TypeError, "`total` must map names to tensors"),
    (
        lambda g: step_of(total={"a": torch.tensor([math.inf])}),
        ValueError,
        r"`total\['a'\]` must be finite",
    ),
    (lambda g: step_of(multiplier=-0.1), ValueError, "`multiplier` must be at least 0"),
    (lambda g: step_of(max_norm=0.0), ValueError, "`max_norm` must be above 0"),
    (lambda g: step_of(expected_batch_size=0), ValueError, "`expected_batch_size` must be above 0"),
    (lambda g: step_of(generator=0), TypeError, "`generator` must be a torch.Generator"),
    (
        lambda g: poisson_batch(0, rate=0.5, generator=g),
        ValueError,
        "`num_examples` must be at least 1",
    ),
    (lambda g: poisson_batch(5, rate=0, generator=g), ValueError, "`rate` must be above 0"),
    (lambda g: poisson_batch(5, rate=1.1, generator=g), ValueError, "`rate` must be at most 1"),
    (
        lambda g: poisson_batch(5, rate=0.5, generator=0),
        TypeError,
        "`generator` must be a torch.Generator or None; got 0",
    ),
]


def step_of(**changed):
    good = {
        "total": {"a": torch.zeros(2)},
        "multiplier": 1.0,
        "max_norm": 1.0,
        "expected_batch_size": 4,
        "generator": torch.Generator().manual_seed(0),
    }
    arguments = good | changed
    return noisy_mean(arguments.pop("total"), **arguments)


@pytest.mark.bad_input
@pytest.mark.parametrize(("call", "error", "message"), BAD)
def test_bad_input_is_refused_with_the_reason(call, error, message, generator):
    with pytest.raises(error, match=message):
        call(generator)


# Accounting with the library of the documentation, against closed forms and integrals. It is
# imported here, because its import takes a second in every process that collects this file.


@pytest.fixture(scope="module")
def private():
    from studies import private

    return private


def epsilon_of(event, delta):
    """Compute epsilon on a coarse grid, rounded up."""
    from dp_accounting.pld import PLDAccountant

    return PLDAccountant(value_discretization_interval=1e-3).compose(event).get_epsilon(delta)


@pytest.mark.parametrize(
    ("multiplier", "steps", "delta"),
    [(1.1, 1, 1e-3), (5.0, 20, 1e-4), (4.0, 1, 1e-5), (0.7, 2, 1e-2)],
)
def test_epsilon_of_whole_batches_is_that_of_the_analytic_gaussian_mechanism(
    multiplier, steps, delta, private
):
    """T steps of deviation z on whole batches are one step of deviation z / sqrt(T)."""
    expected = epsilon_at(delta, partial(gaussian_delta, sigma=multiplier / math.sqrt(steps)))
    actual = epsilon_of(private.training(multiplier, rate=1.0, steps=steps), delta)
    assert expected - 1e-6 <= actual <= expected * 1.005


@pytest.mark.parametrize(
    ("multiplier", "rate", "delta"), [(0.8, 0.2, 1e-3), (2.0, 0.5, 1e-4), (0.6, 0.05, 1e-4)]
)
def test_epsilon_of_a_sampled_step_is_that_of_the_integral(multiplier, rate, delta, private):
    expected = epsilon_at(delta, partial(sampled_delta, sigma=multiplier, rate=rate))
    actual = epsilon_of(private.training(multiplier, rate=rate, steps=1), delta)
    assert expected - 1e-4 <= actual <= expected * 1.005 + 1e-3
    # Sampling lowers epsilon.
    assert actual < 0.8 * epsilon_of(private.training(multiplier, rate=1.0, steps=1), delta)


def test_noise_for_an_epsilon_gives_that_epsilon(private):
    setting = {"rate": 0.2, "steps": 40}
    multiplier = private.multiplier_for(3.0, delta=1e-4, **setting)
    assert epsilon_of(private.training(multiplier, **setting), 1e-4) == pytest.approx(3.0, abs=1e-3)
    assert multiplier > private.multiplier_for(8.0, delta=1e-4, **setting)


@pytest.mark.slow
def test_the_example_reports_every_row(monkeypatch, capsys, tmp_path, private):
    arguments = ["--quick", "--out", str(tmp_path), "--clients", "2", "--backbones", "S"]
    monkeypatch.setattr("sys.argv", ["private.py", *arguments])
    private.main()
    rows = [
        line.split("|")[1].strip()
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("|")
    ]
    assert rows[2:] == ["no privacy", "clipping alone", "ε = 8", "ε = 3", "ε = 1"]
