"""Frozen and trained parts of a model, observed through optimizer steps."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from fedprompt import freeze, training_only
from refusals import refused


class Model(nn.Module):
    """Frozen trunk, two kinds of prompts and a head, as in SGPT."""

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
    """Return the parts with a changed tensor."""
    return {
        name.split(".")[0]
        for name, tensor in model.state_dict().items()
        if not torch.equal(tensor, before[name])
    }


def train(model, generator, steps=3):
    """Train with momentum and weight decay, all parameters in the optimizer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(
            model(torch.randn(8, 4, generator=generator)), torch.arange(8) % 3
        ).backward()
        optimizer.step()


def test_freeze_stops_gradients_dropout_and_batch_statistics(generator):
    trunk = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.9))
    assert freeze(trunk) is trunk
    inputs, before = torch.randn(8, 4, generator=generator, requires_grad=True), bits(trunk)
    first, second = trunk(inputs), trunk(inputs)
    assert torch.equal(first, second)  # no dropout
    first.sum().backward()
    assert inputs.grad is not None  # gradients reach the inputs
    assert all(parameter.grad is None for parameter in trunk.parameters())
    assert not moved(trunk, before)  # statistics of the batch norm included
    assert not any(module.training for module in trunk.modules())


def test_block_coordinate_descent_leaves_other_blocks_bitwise_identical(model, generator):
    before = bits(model)
    with training_only(model, model.shared, model.head):
        train(model, generator)
    assert moved(model, before) == {"shared", "head"}
    before = bits(model)
    with training_only(model, model.group, model.head, model.scale):
        train(model, generator)
    assert moved(model, before) == {"group", "head", "scale"}


def test_only_the_parts_have_gradients_and_flags_are_restored(model):
    model.head.bias.requires_grad_(False)
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    with training_only(model, model.head):
        assert [
            name for name, parameter in model.named_parameters() if parameter.requires_grad
        ] == ["head.weight"]
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == before


def test_a_frozen_trunk_inside_a_part_stays_frozen(model, generator):
    before = bits(model)
    with training_only(model, model):
        assert learning(model) == {"shared", "group", "head", "scale"}
        train(model, generator)
    assert moved(model, before) == {"shared", "group", "head", "scale"}


def test_flags_are_restored_after_an_error(model):
    with pytest.raises(RuntimeError, match="out of memory"), training_only(model, model.head):
        raise RuntimeError("out of memory")
    assert learning(model) == {"shared", "group", "head", "scale"}


def test_nested_contexts_restore_flags_one_by_one(model):
    with training_only(model, model.shared, model.head):
        with training_only(model, model.head):
            assert learning(model) == {"head"}
        assert learning(model) == {"shared", "head"}
    assert learning(model) == {"shared", "group", "head", "scale"}


def test_an_inner_context_cannot_unfreeze_parts_of_an_outer_one(model):
    with training_only(model, model.head):
        with training_only(model, model.head, model.shared):
            assert learning(model) == {"head"}
        with (
            pytest.raises(ValueError, match="`parts` must contain a parameter that can be trained"),
            training_only(model, model.shared),
        ):
            raise AssertionError("entered although nothing can learn")
        assert learning(model) == {"head"}


def entered(*parts):
    """Enter with wrong parts, and require that no parameter changes."""
    model = Model()
    own = {"trunk": (model.trunk,), "a stranger": (model.head, nn.Linear(2, 2))}
    parts, before = own.get(parts[0], parts) if parts else (), learning(model)
    try:
        with training_only(model, *parts):
            raise AssertionError("entered with bad parts")
    finally:
        assert learning(model) == before


test_wrong_calls_are_refused_by_name = refused(globals())("""
entered() -> ValueError: `parts` must contain a parameter that can be trained;
entered('trunk') -> ValueError: `parts` must contain a parameter that can
entered('a stranger') -> ValueError: `parts` must belong to `
entered(nn.Parameter(zeros(1))) -> ValueError: `parts` must belong to `
entered('head') -> TypeError: `parts[0]` must be a parameter or a module
entered(zeros(2)) -> TypeError: `parts[0]` must be a parameter or a module
freeze(None) -> TypeError: `model` must be an nn.Module; got
training_only(None, nn.Linear(1, 1)).__enter__() -> TypeError: `model` must be an nn.Module; got
""")
