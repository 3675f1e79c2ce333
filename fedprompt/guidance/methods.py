r"""How a model's guided output moves with its parameters: three ways to one number, of one signature.

Each is handed `evaluate`, the values of the trainable parameters and a direction for each, and returns the derivative of the guided output
along that direction, :math:`J_\theta F \cdot u`. ``evaluate(parameters, then)`` runs the model under these parameters and returns
``then(guided)``; whatever is differentiated must be differentiated inside `then`. Dropout masks, buffers and attention kernels are the
same at every call.
"""

import math
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import forward_ad

from fedprompt._checks import check_number
from fedprompt.guidance._modes import ForwardRules, make_dual, tangent_of

Parameters = Mapping[str, Tensor]
"""Trainable parameters by name, or something of the same shape for each."""

Evaluate = Callable[[Parameters, Callable[[Tensor], Any]], Any]
"""(parameters, then) -> then(guided)."""


def forward_mode(
    evaluate: Evaluate, parameters: Parameters, direction: Parameters
) -> Float[Tensor, "batch dim"]:
    """Differentiate by one pass of dual numbers: exact, without a graph, in the memory of a plain forward pass. The default.

    Frozen weights cost nothing: their tangents, zeros, are never multiplied. An operator without a forward-mode rule sends the whole
    pass to :func:`double_backward`, and a warning says so.

    Args:
        evaluate: Runs the model and calls a function of its guided output.
        parameters: Where to differentiate.
        direction: Along which to differentiate.

    Returns:
        The derivative, of the shape of the guided output.

    Example:
        >>> def evaluate(parameters, then):
        ...     return then(parameters["scale"] ** 2 * torch.ones(1, 1))
        >>> forward_mode(evaluate, {"scale": torch.tensor(3.0)}, {"scale": torch.tensor(1.0)})
        tensor([[6.]])
    """
    _load_rules()
    try:
        with forward_ad.dual_level():
            duals = {
                name: make_dual(value.detach(), direction[name].detach())
                for name, value in parameters.items()
            }
            with ForwardRules(), torch.enable_grad():
                tangent: Tensor = evaluate(duals, _own_tangent)
                return tangent
    except NotImplementedError as reason:
        text = " ".join(str(reason).split())
        warnings.warn(
            f"forward_mode falls back on double_backward, which needs more memory, because: {text}",
            stacklevel=3,
        )
    return double_backward(evaluate, parameters, direction)


def double_backward(
    evaluate: Evaluate, parameters: Parameters, direction: Parameters
) -> Float[Tensor, "batch dim"]:
    r"""Differentiate by two backward passes: exact, with a second-order graph, for operators that forward mode lacks.

    The backward pass :math:`s \mapsto J^\top s` is linear in s, so its own derivative along `direction` is :math:`J u`.

    Args:
        evaluate: Runs the model and calls a function of its guided output.
        parameters: Where to differentiate.
        direction: Along which to differentiate.

    Returns:
        The derivative, of the shape of the guided output.

    Example:
        >>> def evaluate(parameters, then):
        ...     return then(parameters["scale"] ** 2 * torch.ones(1, 1))
        >>> double_backward(evaluate, {"scale": torch.tensor(3.0)}, {"scale": torch.tensor(1.0)})
        tensor([[6.]])
    """
    leaves = {name: value.detach().requires_grad_() for name, value in parameters.items()}

    def product(guided: Tensor) -> Tensor:
        seed = torch.zeros_like(guided, requires_grad=True)
        pulled = torch.autograd.grad(
            guided, list(leaves.values()), seed, create_graph=True, allow_unused=True
        )
        reached = [
            (row, direction[name])
            for name, row in zip(leaves, pulled, strict=True)
            if row is not None and row.requires_grad
        ]
        (tangent,) = torch.autograd.grad(
            [row for row, _ in reached], seed, [along for _, along in reached]
        )
        return tangent

    with torch.enable_grad():
        tangent: Tensor = evaluate(leaves, product)
        return tangent


def central_difference(
    evaluate: Evaluate, parameters: Parameters, direction: Parameters, *, step: float = 1e-4
) -> Float[Tensor, "batch dim"]:
    """Differentiate by two plain forward passes on either side: approximate, for kernels that know no derivative of a derivative.

    Which step is best depends on the model and its dtype: in float32 about 1e-2 for prompts alone and 3e-5 for a whole transformer;
    networks with ReLU and batch normalisation never come closer than a few thousandths. Never a silent fallback, therefore.

    Args:
        evaluate: Runs the model and calls a function of its guided output.
        parameters: Where to differentiate.
        direction: Along which to differentiate.
        step: Above 0; how far to go to either side, as a fraction of the norm of all parameters.

    Returns:
        The derivative, of the shape of the guided output, approximately.

    Raises:
        ValueError: If `step` is not above 0.

    Example:
        >>> def evaluate(parameters, then):
        ...     return then(parameters["scale"] ** 2 * torch.ones(1, 1))
        >>> central_difference(evaluate, {"scale": torch.tensor(3.0)}, {"scale": torch.tensor(1.0)}, step=0.125)
        tensor([[6.]])
    """
    check_number("step", step, above=0)
    length = _norm(direction)
    if length == 0:
        length = 1.0
    distance = step * (_norm(parameters) or 1.0) / length

    def moved(sign: float) -> Tensor:
        there = {
            name: value + sign * distance * direction[name] for name, value in parameters.items()
        }
        output: Tensor = evaluate(there, torch.detach)
        return output

    with torch.no_grad():
        return (moved(1.0) - moved(-1.0)) / (2 * distance)


def _own_tangent(guided: Tensor) -> Tensor:
    tangent = tangent_of(guided)
    if tangent is None:
        raise NotImplementedError("an operator of the model drops tangents without saying so")
    return tangent.detach().clone()


@cache
def _load_rules() -> None:
    """Make the first dual number of the process, at which PyTorch compiles a few rules and warns of its own ways of doing so.

    Once, because leaving ``catch_warnings`` makes Python repeat what it has already said.
    """
    with warnings.catch_warnings(), forward_ad.dual_level():
        warnings.filterwarnings("ignore", message=".torch.jit.script. is deprecated")
        make_dual(torch.zeros(1), torch.zeros(1))


def _norm(tensors: Parameters) -> float:
    return math.sqrt(sum(value.double().square().sum().item() for value in tensors.values()))
