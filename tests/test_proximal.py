"""The proximal term, against loops over numbers."""

import pytest
import torch
import torch.nn as nn

from fedprompt import proximal_loss, snapshot
from same import assert_identical


def model_and_values(generator, *, dtype=torch.float64):
    model = nn.ModuleDict({"shared": nn.Linear(3, 2), "private": nn.Linear(2, 2)}).to(dtype)
    values = {
        name: value + torch.randn(value.shape, generator=generator, dtype=dtype)
        for name, value in snapshot(model, only=["shared"]).items()
    }
    return model, values


def test_it_is_half_the_squared_distance_with_the_difference_as_gradient(generator):
    model, values = model_and_values(generator)
    loss, expected = proximal_loss(model, values), 0.0
    loss.backward()
    for name, parameter in model.named_parameters():
        if name in values:
            change = parameter.detach() - values[name]
            expected += sum(number**2 for number in change.flatten().tolist())
            assert_identical(parameter.grad, change)
        else:
            assert parameter.grad is None
    assert loss.item() == pytest.approx(expected / 2, rel=1e-12)


def test_values_receive_no_gradient_and_a_frozen_parameter_no_pull(generator):
    model, values = model_and_values(generator)
    values = {name: value.requires_grad_() for name, value in values.items()}
    model["shared"].bias.requires_grad_(False)
    proximal_loss(model, values).backward()
    assert model["shared"].bias.grad is None
    assert all(value.grad is None for value in values.values())


def test_a_tied_parameter_counts_once():
    model = nn.ModuleDict({"first": nn.Linear(2, 1, bias=False)})
    model["second"] = model["first"]
    values = {f"{name}.weight": model["first"].weight.detach() + 1 for name in model}
    assert proximal_loss(model, values).item() == pytest.approx(1.0)  # (1 + 1) / 2


def test_names_are_those_inside_a_wrapper(generator):
    model, values = model_and_values(generator)
    assert_identical(proximal_loss(nn.DataParallel(model), values), proximal_loss(model, values))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_precision_is_summed_in_float32(dtype):
    model = nn.Linear(300, 300, bias=False).to(dtype)
    values = {"weight": model.weight.detach().float() + 2}  # 90,000 squares of 4 exceed float16
    loss = proximal_loss(model, values)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(180_000.0, rel=1e-5)
