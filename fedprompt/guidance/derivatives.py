r"""Two methods for the derivative of a model's guided output along a direction.

Both take `evaluate`, the trainable parameters and a direction for each parameter. Both return the
derivative of the guided output along that direction, :math:`J_\theta F \cdot u`.

``evaluate(parameters, then)`` runs the model under these parameters and returns ``then(guided)``.
All differentiation happens inside `then`. Dropout masks, buffers and attention kernels are the same
at every call.
"""

import warnings
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import forward_ad

import fedprompt._refusals as check
from fedprompt._threads import PROCESS_STATE
from fedprompt.guidance._forward_rules import ForwardRules, make_dual, tangent_of
from fedprompt.guidance._passes import Evaluate, Parameters


def forward_mode(
    evaluate: Evaluate, parameters: Parameters, direction: Parameters
) -> Float[Tensor, "batch dim"]:
    """Differentiate by one forward pass of dual numbers. This is exact, and the default.

    The pass builds no graph and needs about the memory of a plain forward pass. If an operator of
    the model has no forward-mode rule, :func:`double_backward` is used instead, with a warning.
    Forward mode belongs to the process, so calls in several threads run one after another.

    Args:
        evaluate: Function that runs the model and applies a function to its guided output.
        parameters: Trainable parameters at which to differentiate, by name.
        direction: Direction of the derivative, one tensor for each parameter.

    Returns:
        Derivative, of the shape of the guided output.

    Example:
        >>> def evaluate(parameters, then):
        ...     return then(parameters["scale"] ** 2 * torch.ones(1, 1))
        >>> at, along = {"scale": torch.tensor(3.0)}, {"scale": torch.tensor(1.0)}
        >>> forward_mode(evaluate, at, along)
        tensor([[6.]])
    """
    _check(evaluate, parameters, direction)
    try:
        with PROCESS_STATE:
            _load_rules()
            with forward_ad.dual_level():
                duals = {
                    name: make_dual(value.detach(), direction[name].detach())
                    for name, value in parameters.items()
                }
                with ForwardRules(), torch.enable_grad():
                    return evaluate(duals, _tangent)
    except NotImplementedError as reason:
        text = " ".join(str(reason).split())
        warnings.warn(
            f"forward_mode uses double_backward instead, which needs more memory. Reason: {text}",
            stacklevel=3,
        )
    return double_backward(evaluate, parameters, direction)


def double_backward(
    evaluate: Evaluate, parameters: Parameters, direction: Parameters
) -> Float[Tensor, "batch dim"]:
    r"""Differentiate by two backward passes. This is exact, and needs a second-order graph.

    The backward pass :math:`s \mapsto J^\top s` is linear in s. Its derivative along `direction`
    is :math:`J u`. Use this method if an operator of the model does not support forward mode.

    Args:
        evaluate: Function that runs the model and applies a function to its guided output.
        parameters: Trainable parameters at which to differentiate, by name.
        direction: Direction of the derivative, one tensor for each parameter.

    Returns:
        Derivative, of the shape of the guided output.

    Example:
        >>> def evaluate(parameters, then):
        ...     return then(parameters["scale"] ** 2 * torch.ones(1, 1))
        >>> at, along = {"scale": torch.tensor(3.0)}, {"scale": torch.tensor(1.0)}
        >>> double_backward(evaluate, at, along)
        tensor([[6.]])
    """
    _check(evaluate, parameters, direction)
    leaves = {name: value.detach().requires_grad_() for name, value in parameters.items()}

    def product(guided: Tensor) -> Tensor:
        seed = torch.zeros_like(guided, requires_grad=True)
        pulled = torch.autograd.grad(
            guided, list(leaves.values()), seed, create_graph=True, allow_unused=True
        )
        reached = {
            name: row
            for name, row in zip(leaves, pulled, strict=True)
            if row is not None and row.requires_grad
        }
        along = [direction[name] for name in reached]
        return torch.autograd.grad(list(reached.values()), seed, along)[0]

    with torch.enable_grad():
        return evaluate(leaves, product)


def _check(evaluate: object, parameters: Parameters, direction: Parameters) -> None:
    """Require a function, and tensors of equal names, shapes and dtypes."""
    check.function("evaluate", evaluate)
    check.tensors("parameters", parameters)
    check.tensors("direction", direction)
    rule = f"have the names of `parameters` {list(parameters)}"
    check.require(direction.keys() == parameters.keys(), "direction", rule, list(direction))
    for name, value in parameters.items():
        place = f"direction[{name!r}]"
        check.tensor(place, direction[name], value.dtype, value.shape, "`parameters`")


def _tangent(guided: Tensor) -> Tensor:
    if (tangent := tangent_of(guided)) is None:
        raise NotImplementedError("an operator of the model silently drops tangents")
    return tangent.detach().clone()


@cache
def _load_rules() -> None:
    """Create the first dual number of the process, for which PyTorch compiles rules and warns.

    This runs once, because Python repeats earlier warnings after each ``catch_warnings``.
    """
    with warnings.catch_warnings(), forward_ad.dual_level():
        warnings.filterwarnings("ignore", message=".torch.jit.script. is deprecated")
        make_dual(torch.zeros(1), torch.zeros(1))
