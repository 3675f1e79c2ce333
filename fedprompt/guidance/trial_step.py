"""Steps of PyTorch's optimizers, as differentiable functions of the gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

import fedprompt._refusals as check
from fedprompt.interfaces import GuideUpdate

_Group = Mapping[str, Any]


def optimizer_update(optimizer: torch.optim.Optimizer, model: nn.Module) -> GuideUpdate:
    r"""Make the next step of an optimizer an `update` of :func:`guide_gradient`.

    The update is the step that the optimizer would take from its present state: with its momentum
    or its moments, its weight decay, and the present learning rate of each parameter group. The
    state is read when the update is called, and stays as it is.

    Adam divides by the size of the gradient. Without moments from earlier steps, as in a new
    optimizer, its step is nearly the sign of the gradient. The derivative of a sign is 0, so guides
    hardly change such a step.

    Args:
        optimizer: Optimizer of the model: SGD, Adam or AdamW, without amsgrad.
        model: Model that :func:`guide_gradient` gets. Trainable parameters that the
            optimizer does not have stay as they are.

    Returns:
        The update. Its `learning_rate` must be the learning rate of one of the groups. Each group
        has its own. A parameter that received no gradient has the gradient 0.

    Raises:
        TypeError: If the optimizer is another one, or uses amsgrad.

    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
        >>> update = optimizer_update(optimizer, model)
        >>> at, slope = {"weight": torch.ones(1, 1)}, {"weight": torch.full((1, 1), 2.0)}
        >>> update(at, slope, learning_rate=0.1)  # 1 - 0.1 * (2 + 0.5 * 1)
        {'weight': tensor([[0.7500]])}
    """
    check.module("model", model)
    rule, groups = _RULES.get(type(optimizer)), getattr(optimizer, "param_groups", [])
    amsgrad = any(group.get("amsgrad") for group in groups)
    if rule is None or amsgrad:
        remedy = "be SGD, Adam or AdamW without amsgrad; for others, write an `update`"
        got = type(optimizer).__name__ + " with amsgrad" * amsgrad
        raise check.wrong_type("optimizer", remedy, got)
    owners = getattr(model, "_orig_mod", model).named_parameters()  # inside a compiled module
    names = {parameter: name for name, parameter in owners}

    def update(
        parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor], *, learning_rate: float
    ) -> Mapping[str, Tensor]:
        if learning_rate not in (rates := [group["lr"] for group in groups]):
            raise check.wrong("learning_rate", f"be one of the optimizer, {rates}", learning_rate)
        stepped = dict(parameters)
        for group in groups:
            for own in group["params"]:
                if (name := names.get(own)) in stepped:
                    slope = -gradients[name] if group["maximize"] else gradients[name]
                    stepped[name] = rule(stepped[name], slope, group, optimizer.state.get(own, {}))
        return stepped

    return update


def _sgd(value: Tensor, gradient: Tensor, group: _Group, state: Mapping[str, Any]) -> Tensor:
    if group["weight_decay"]:
        gradient = gradient + group["weight_decay"] * value
    if momentum := group["momentum"]:
        buffer = state.get("momentum_buffer")
        fresh = (1 - group["dampening"]) * gradient
        moved = gradient if buffer is None else momentum * buffer + fresh
        gradient = gradient + momentum * moved if group["nesterov"] else moved
    stepped: Tensor = value - group["lr"] * gradient
    return stepped


def _adam(value: Tensor, gradient: Tensor, group: _Group, state: Mapping[str, Any]) -> Tensor:
    """Take a step of Adam. A second moment of 0 has a root whose derivative is 0 here."""
    rate, decay, (beta, beta2) = group["lr"], group["weight_decay"], group["betas"]
    if group["decoupled_weight_decay"]:
        value = value * (1 - rate * decay)
    elif decay:
        gradient = gradient + decay * value
    steps = float(state.get("step", 0)) + 1
    first = beta * state.get("exp_avg", 0) + (1 - beta) * gradient
    second = beta2 * state.get("exp_avg_sq", 0) + (1 - beta2) * gradient.square()
    second = second / (1 - beta2**steps)
    root = torch.where(second > 0, second, 1).sqrt().where(second > 0, 0)
    stepped: Tensor = value - rate / (1 - beta**steps) * first / (root + group["eps"])
    return stepped


_RULES: dict[type, Callable[[Tensor, Tensor, _Group, Mapping[str, Any]], Tensor]] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
}
