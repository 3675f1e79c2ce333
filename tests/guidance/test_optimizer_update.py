"""Steps of optimizers as functions of gradients: torch's own steps, and their derivatives."""

import copy
from functools import partial

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from fedprompt.guidance import optimizer_update
from guided import STUDY, Guided, mlp

SGD = partial(torch.optim.SGD, lr=0.01)
ADAM, ADAMW = (partial(made, lr=0.01, eps=0.1) for made in (torch.optim.Adam, torch.optim.AdamW))
OPTIMIZERS = {
    "SGD": SGD,
    "momentum": partial(SGD, momentum=0.9, weight_decay=0.1, dampening=0.3),
    "Nesterov": partial(SGD, momentum=0.9, weight_decay=0.1, nesterov=True),
    "SGD, upwards": partial(SGD, momentum=0.9, maximize=True),
    "Adam": partial(ADAM, weight_decay=0.1),
    "AdamW": partial(ADAMW, betas=(0.8, 0.99), weight_decay=0.1, maximize=True),
}


def trained(make, steps):
    """Return a model and its optimizer after some steps, with another rate for the head."""
    model = Guided(mlp(), features=True)
    groups = {"params": model.body.parameters()}, {"params": model.head.parameters(), "lr": 0.03}
    optimizer = make(groups)
    for images, labels in STUDY[:1] * steps:
        optimizer.zero_grad()
        F.cross_entropy(model(images)[1], labels).backward()
        optimizer.step()
    return model, optimizer


def stepped_by_torch(model, optimizer, gradients):
    """Take the step with copies of a model and of its optimizer."""
    model, optimizer = copy.deepcopy((model, optimizer))
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name].detach().clone()
    optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("steps", [0, 1, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_step_and_its_derivative_are_those_of_the_optimizer(name, steps):
    model, optimizer = trained(OPTIMIZERS[name], steps)
    values = {name: value.detach() for name, value in model.named_parameters()}
    draw = torch.Generator().manual_seed(1)
    gradients, slope, along = (
        {key: torch.randn(value.shape, generator=draw).double() for key, value in values.items()}
        for _ in range(3)
    )
    before = copy.deepcopy(optimizer.state_dict())
    leaves = {key: value.requires_grad_() for key, value in gradients.items()}
    found = optimizer_update(optimizer, model)(values, leaves, learning_rate=0.03)
    for key, expected in stepped_by_torch(model, optimizer, gradients).items():
        torch.testing.assert_close(found[key], expected, rtol=0, atol=1e-15)
    torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)
    total = sum((slope[key] * found[key]).sum() for key in values)
    pulled = torch.autograd.grad(total, [*leaves.values()])
    far = [
        stepped_by_torch(
            model, optimizer, {key: gradients[key] + by * along[key] for key in values}
        )
        for by in (1e-5, -1e-5)
    ]
    expected = sum((slope[key] * (far[0][key] - far[1][key])).sum() for key in values) / 2e-5
    actual = sum((one * along[key]).sum() for one, key in zip(pulled, values, strict=True))
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-8)


def test_a_parameter_without_gradient_or_moments_has_a_finite_derivative():
    """The root of Adam's second moment has no derivative at 0; the step has 1 / eps."""
    model = nn.Linear(1, 1, bias=False).double()
    zero = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
    update = optimizer_update(torch.optim.Adam(model.parameters(), lr=0.01, eps=0.5), model)
    stepped = update({"weight": model.weight.detach()}, {"weight": zero}, learning_rate=0.01)
    assert torch.autograd.grad(stepped["weight"], zero)[0].item() == pytest.approx(-0.01 / 0.5)
