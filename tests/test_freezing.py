"""What learns and what does not, seen through real optimiser steps."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from fedprompt import freeze, training_only


class Model(nn.Module):
    """A frozen trunk, two kinds of prompts and a head: SGPT's blocks in small."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.trunk = freeze(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)))
            self.shared, self.group, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
            self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, inputs):
        return self.scale * self.head(self.group(self.shared(self.trunk(inputs))))


@pytest.fixture
def model():
    return Model()


def learning(model):
    return {
        name.split(".")[0]
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def bits(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def moved(model, before):
    """The parts of which some tensor has other bits than before."""
    return {
        name.split(".")[0]
        for name, tensor in model.state_dict().items()
        if not torch.equal(tensor, before[name])
    }


def train(model, generator, steps=3):
    """A fresh optimiser over everything that the model has, with momentum and weight decay."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(
            model(torch.randn(8, 4, generator=generator)), torch.arange(8) % 3
        ).backward()
        optimizer.step()


def test_frozen_stops_gradients_dropout_and_statistics(generator):
    trunk = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.9))
    assert freeze(trunk) is trunk
    inputs, before = torch.randn(8, 4, generator=generator, requires_grad=True), bits(trunk)
    first, second = trunk(inputs), trunk(inputs)
    assert torch.equal(first, second)  # no dropout
    first.sum().backward()
    assert inputs.grad is not None  # gradients still pass through to the prompts before it
    assert all(parameter.grad is None for parameter in trunk.parameters())
    assert not moved(trunk, before)  # running statistics and counters of the batch norm included
    assert not any(module.training for module in trunk.modules())


def test_block_coordinate_descent_moves_one_block_and_leaves_the_others_to_the_bit(
    model, generator
):
    before = bits(model)
    with training_only(model, model.shared, model.head):
        train(model, generator)
    assert moved(model, before) == {"shared", "head"}
    before = bits(model)
    with training_only(model, model.group, model.head, model.scale):
        train(model, generator)
    assert moved(model, before) == {"group", "head", "scale"}


def test_inside_only_the_parts_learn_and_afterwards_all_is_as_before(model):
    model.head.bias.requires_grad_(False)
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    with training_only(model, model.head):
        assert [
            name for name, parameter in model.named_parameters() if parameter.requires_grad
        ] == ["head.weight"]
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == before


def test_a_single_parameter_can_be_a_part(model):
    with training_only(model, model.scale, model.head.weight):
        assert [
            name for name, parameter in model.named_parameters() if parameter.requires_grad
        ] == ["scale", "head.weight"]


def test_a_frozen_trunk_inside_a_part_stays_frozen(model, generator):
    before = bits(model)
    with training_only(model, model):
        assert learning(model) == {"shared", "group", "head", "scale"}
        train(model, generator)
    assert moved(model, before) == {"shared", "group", "head", "scale"}


def test_flags_come_back_after_an_error(model):
    with pytest.raises(RuntimeError, match="out of memory"), training_only(model, model.head):
        raise RuntimeError("out of memory")
    assert learning(model) == {"shared", "group", "head", "scale"}


def test_nested_blocks_come_back_one_by_one(model):
    with training_only(model, model.shared, model.head):
        with training_only(model, model.head):
            assert learning(model) == {"head"}
        assert learning(model) == {"shared", "head"}
    assert learning(model) == {"shared", "group", "head", "scale"}


def test_an_inner_block_cannot_wake_what_an_outer_one_froze(model):
    with training_only(model, model.head):
        with training_only(model, model.head, model.shared):
            assert learning(model) == {"head"}
        with (
            pytest.raises(ValueError, match="`parts` must hold a parameter that can learn"),
            training_only(model, model.shared),
        ):
            raise AssertionError("entered although nothing can learn")
        assert learning(model) == {"head"}


def test_parts_may_overlap_and_share_parameters(model):
    model.group.weight = model.shared.weight
    with training_only(model, model.group, model.group.bias, model.group):
        assert {
            name for name, parameter in model.named_parameters() if parameter.requires_grad
        } == {"shared.weight", "group.bias"}


def test_modes_stay_with_the_user(model):
    model.train()
    model.trunk.eval()
    modes = [module.training for module in model.modules()]
    with training_only(model, model.head):
        assert [module.training for module in model.modules()] == modes
    assert [module.training for module in model.modules()] == modes


# Bad input.


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        (
            lambda model: (),
            ValueError,
            r"`parts` must hold a parameter that can learn; got 0 parameters, none with requires_grad",
        ),
        (
            lambda model: (model.trunk,),
            ValueError,
            r"`parts` must hold a parameter that can learn; got 4 parameters, none",
        ),
        (
            lambda model: (model.head, nn.Linear(2, 2)),
            ValueError,
            r"`parts` must belong to `model`; got 2 parameters that do not",
        ),
        (
            lambda model: (nn.Parameter(torch.zeros(1)),),
            ValueError,
            r"`parts` must belong to `model`; got 1 parameters that do not",
        ),
        (
            lambda model: (model.head, "head"),
            TypeError,
            r"`parts\[1\]` must be a module or a parameter; got 'head' \(str\)",
        ),
        (
            lambda model: (torch.zeros(2),),
            TypeError,
            r"`parts\[0\]` must be a module or a parameter; got a float32 tensor of shape \(2,\)",
        ),
    ],
)
def test_bad_parts_are_refused_by_name_and_change_nothing(model, parts, error, message):
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    with pytest.raises(error, match=message), training_only(model, *parts(model)):
        raise AssertionError("entered with bad parts")
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == before


@pytest.mark.bad_input
@pytest.mark.parametrize("wrong", [None, [nn.Linear(1, 1)], torch.zeros(1)])
def test_what_is_no_module_is_refused_by_name(wrong):
    with pytest.raises(TypeError, match=r"`model` must be an nn\.Module; got "):
        freeze(wrong)
    with (
        pytest.raises(TypeError, match=r"`model` must be an nn\.Module; got "),
        training_only(wrong, nn.Linear(1, 1)),
    ):
        raise AssertionError("entered without a model")
