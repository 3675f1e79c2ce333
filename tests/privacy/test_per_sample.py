"""Per-sample gradients by one pass equal those of a loop."""

import copy
from functools import partial

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.layers import EvoNorm2dB0

import fedprompt as fp
from fedprompt.privacy import clipped_sum, noisy_mean, per_sample
from models import draw_images, tiny_vit
from references.dpsgd import looped
from same import assert_identical
from tolerance import assert_near

BATCH, CLASSES, GROUPS = 6, 4, 3


class Prompted(nn.Module):
    """Any prompts over a shared trunk. Group prompts receive the group indices."""

    def __init__(self, trunk, prompts, head=None):
        super().__init__()
        self.trunk = trunk
        self.prompts = nn.ModuleList(prompts)
        self.grouped = [isinstance(each, fp.GroupPrompts) for each in prompts]
        self.head = head or nn.Linear(trunk.dim, CLASSES)
        self.double()

    def forward(self, images, indices):
        streams = [
            each(indices) if grouped else each()
            for each, grouped in zip(self.prompts, self.grouped, strict=True)
        ]
        pooled, outputs, _ = fp.encode_prompted(self.trunk, images, *streams, dtype=images.dtype)
        return self.head(torch.cat([pooled[:, None], *outputs], 1).mean(1))


class Bordered(nn.Module):
    """A border of pixels in front of a frozen CNN with batch normalization."""

    def __init__(self, generator):
        super().__init__()
        self.border = fp.PadPrompts(16, padding=2, generator=generator)
        layers = nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
        cnn = nn.Sequential(*layers, nn.Flatten())
        for parameter in cnn.parameters():
            nn.init.normal_(parameter, std=0.3, generator=generator)
        self.cnn, self.head = fp.freeze(cnn), nn.Linear(8, CLASSES)
        self.double()

    def forward(self, images, indices):
        return self.head(self.cnn(self.border(images)))


def streams_of(dim, depth, generator):
    groups = partial(fp.GroupPrompts, GROUPS, 2, dim, generator=generator)
    shared = partial(fp.LayeredPrompts, 2, dim, generator=generator)
    return {
        "deep": [fp.DeepPrompts(2, dim, depth, generator=generator)],
        "carried on, two of three layers": [shared(layers=(2, 0))],
        "groups, replaced": [groups(layers=(0, 1, 2), replace=True)],
        "shared and groups (SGPT)": [shared(layers=(0, 1)), groups(layers=(1, 2))],
        "a head of several layers": [shared(layers=(0,))],
        "no prompts": [fp.LayeredPrompts(0, dim, layers=(0,))],
    }


def build(name, generator):
    torch.manual_seed(0)  # for heads
    trunk = fp.vit_trunk(tiny_vit())
    if name == "border of pixels":
        return Bordered(generator)
    dim, head = trunk.dim, None
    if name == "a head of several layers":
        head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 5), nn.GELU(), nn.Linear(5, CLASSES))
    return Prompted(trunk, streams_of(dim, trunk.depth, generator)[name], head)


MODELS = [*streams_of(4, 3, None), "border of pixels"]


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
    return {name: each.grad for name, each in copies.named_parameters() if each.requires_grad}


@pytest.mark.parametrize("size", [BATCH, 1])
@pytest.mark.parametrize("name", MODELS)
def test_one_pass_gives_the_gradients_of_single_passes(name, size, generator):
    model, batch = build(name, generator), batch_of(size)
    actual, expected = gradients_of(model, *batch), looped(model, total_loss, *batch)
    assert list(actual) == list(expected)
    for key in expected:
        assert_near(actual[key], expected[key])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precisions(dtype, generator):
    model, batch = build("shared and groups (SGPT)", generator), batch_of(BATCH)
    expected = looped(model, total_loss, *batch)
    model.trunk = fp.vit_trunk(tiny_vit().to(dtype))
    for key, gradient in gradients_of(model.to(dtype), *batch_of(BATCH, dtype)).items():
        assert gradient.dtype == dtype
        scale, rounding = float(expected[key].abs().max()), dtype if dtype.itemsize == 4 else None
        assert_near(gradient / scale, expected[key] / scale, dtype=rounding)


def test_an_empty_batch_has_empty_gradients_and_its_step_is_noise(generator):
    model, batch = build("shared and groups (SGPT)", generator), batch_of(0)
    gradients = gradients_of(model, *batch)
    for name, parameter in model.named_parameters():
        assert gradients[name].shape == (0, *parameter.shape)
    total = clipped_sum(gradients, max_norm=1.0)
    assert all(not tensor.any() for tensor in total.values())
    noise = {"multiplier": 1.0, "max_norm": 1.0, "expected_batch_size": 3}
    step = noisy_mean(total, **noise, generator=generator)
    assert all(tensor.all() for tensor in step.values())


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
    for key, parameter in parameters.items():
        assert again[key] is parameter
        assert parameter.grad is None


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
    context = fp.ContextPrompts(8, num_contexts=2, length=4, generator=generator)
    expected = context().detach().expand(3, 2, 4, 8)
    assert_identical(per_sample(context, 3)(), expected, check_stride=False)


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
def test_statistics_over_samples_are_refused_and_of_single_samples_accepted(mixing, training):
    model = nn.Sequential(nn.Linear(4, 3), nn.Sequential(mixing)).train(training)
    with pytest.raises(ValueError, match=r"`model` must keep samples apart.*'1\.0'"):
        per_sample(model, 2)
    keeps = not getattr(mixing, "track_running_stats", True)
    layers = [nn.LayerNorm(3), nn.InstanceNorm1d(3), *([] if keeps else [mixing.eval()])]
    per_sample(nn.Sequential(nn.Linear(4, 3), *layers), 2)


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
