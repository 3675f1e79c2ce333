r"""Differentiable scores of transport plans; all share one signature, ``(cost, coupling)``.

A plan comes from a solver without a graph. These functions compute a differentiable score from it. They differ in how
they treat the plan's own dependence on the cost.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from fedprompt._checks import check_number, kind, wrong_type, wrong_value
from fedprompt.interfaces import Coupling
from fedprompt.transport._elimination import couplings, eliminate

TransportScore = Callable[[Tensor, Coupling], Tensor]
"""(cost, coupling) -> a differentiable score of each problem."""


def plan_fixed(
    cost: Float[Tensor, "*batch rows columns"], coupling: Coupling
) -> Float[Tensor, "*batch"]:
    r"""Score a plan by :math:`\langle C, T \rangle` and differentiate as if the plan were a constant: FedOTP's choice.

    The gradient in the cost is the plan. That is the gradient of the *regularized* value, the score of
    :func:`envelope`, and not of the returned number: a change of the cost would also move the plan, which
    :func:`implicit` includes.

    Args:
        cost: Cost that the plan was computed for; gradients flow into it.
        coupling: Result of any solver.

    Returns:
        Transport cost of each problem.

    Raises:
        ValueError: If shapes disagree.

    Example:
        >>> cost = torch.eye(2, requires_grad=True)
        >>> coupling = newton(cost, torch.tensor([0.5, 0.5]), torch.tensor([0.4, 0.4]))
        >>> plan_fixed(cost, coupling).backward()
        >>> torch.equal(cost.grad, coupling.plan)
        True
    """
    _check(cost, coupling)
    return (coupling.plan * cost).sum((-2, -1))


def envelope(
    cost: Float[Tensor, "*batch rows columns"], coupling: Coupling
) -> Float[Tensor, "*batch"]:
    r"""Score a plan by the regularized value :math:`\langle C, T \rangle + \epsilon \langle T, \log T \rangle`.

    The gradient is exact. The solver minimizes this value, so at its solution a small change of the plan changes
    nothing (the envelope theorem). The gradient in the cost is the plan, as for :func:`plan_fixed`, and here it is the
    gradient of the returned number.

    Args:
        cost: Cost that the plan was computed for; gradients flow into it.
        coupling: Result of a solver that minimizes a value: any but :func:`independent`.

    Returns:
        Regularized value of each problem.

    Raises:
        ValueError: If shapes disagree or the coupling's epsilon is not finite.

    Example:
        Two rows give a half each to one column: 0.5 * 1 + 0.1 * log(0.5) = 0.4307.

        >>> cost, a = torch.tensor([[1.0], [0.0]]), torch.tensor([0.5, 0.5])
        >>> envelope(cost, newton(cost, a, torch.tensor([1.0]), epsilon=0.1))
        tensor(0.4307)
    """
    _check(cost, coupling)
    check_number("coupling.epsilon", coupling.epsilon, at_least=0)
    entropy = torch.xlogy(coupling.plan, coupling.plan).sum((-2, -1))
    return plan_fixed(cost, coupling) + coupling.epsilon * entropy


def implicit(
    cost: Float[Tensor, "*batch rows columns"], coupling: Coupling
) -> Float[Tensor, "*batch"]:
    r"""Score a plan by :math:`\langle C, T \rangle`, with the exact gradient of that number: the plan moves with the cost.

    By the implicit function theorem at the solution, with :math:`t_v` the plan's row v,

    .. math:: \nabla_{C_v} \langle C, T \rangle = t_v - \tfrac1\epsilon M_v (C_v - z), \quad
              M_v = \mathrm{diag}(t_v) - [\text{row } v \text{ full}]\, t_v t_v^\top / a_v, \quad
              \Big(\sum_v M_v\Big) z = \sum_v M_v C_v

    This takes one pass over the plan and one small solve, independent of the solver's number of iterations. Entries may
    be negative, which those of :func:`plan_fixed` never are. The gradient is exact where no row is just about to become
    full, and as accurate as the plan. A plan of :func:`exact` or :func:`independent` does not move under a small change
    of the cost, so its gradient is the plan. A second derivative would miss terms.

    Args:
        cost: Cost that the plan was computed for; gradients flow into it.
        coupling: Result of a solver with a small error.

    Returns:
        Transport cost of each problem, as from :func:`plan_fixed`.

    Raises:
        ValueError: If shapes disagree or the coupling's epsilon is below 0.

    Example:
        Of equal masses and two rows each, a dearer pair is used less. The score rises by less than the plan says.

        >>> cost, half = torch.eye(2, requires_grad=True), torch.tensor([0.5, 0.5])
        >>> coupling = newton(cost, half, half, epsilon=1.0)
        >>> implicit(cost, coupling).backward()
        >>> bool(cost.grad[0, 0] < coupling.plan[0, 0])
        True
    """
    _check(cost, coupling)
    if coupling.epsilon in (0, math.inf):  # the plan does not move
        return plan_fixed(cost, coupling)
    check_number("coupling.epsilon", coupling.epsilon, at_least=0)
    with torch.no_grad(), torch.autocast(cost.device.type, enabled=False):
        moved = -_moved_by(cost, coupling) / coupling.epsilon
    return plan_fixed(cost, coupling) + (moved * (cost - cost.detach())).sum(
        (-2, -1)
    )  # adds 0, and its gradient


def _moved_by(cost: Tensor, coupling: Coupling) -> Tensor:
    """Return ``M_v (C_v - z)`` for all rows, in the plan's shape."""
    plan = (
        coupling.plan.transpose(-2, -1).flatten(0, -3) if cost.ndim > 2 else coupling.plan.T[None]
    )
    inner = cost.to(plan.dtype).transpose(-2, -1).reshape(plan.shape)
    masses = (mass.to(plan.dtype).expand(*cost.shape[:-2], -1) for mass in (coupling.a, coupling.b))
    a, b = (mass.reshape(len(plan), mass.shape[-1]) for mass in masses)
    given = plan.sum(1)
    resolution = torch.maximum(
        2 * coupling.error.flatten(), coupling.error.new_tensor(100 * torch.finfo(plan.dtype).eps)
    )[:, None]
    full = (given >= a * (1 - resolution)) & (given > 0)
    all_full = b.sum(1, keepdim=True) >= a.sum(1, keepdim=True) * (1 - resolution)
    full = full | (all_full & (given > 0))
    rival = torch.where(full, 1 / given.clamp(min=torch.finfo(plan.dtype).tiny), 0.0)[:, None]

    inner = inner - (plan * inner).sum((1, 2), keepdim=True) / plan.sum(
        (1, 2), keepdim=True
    )  # a constant changes nothing
    right = (plan * (inner - rival * (plan * inner).sum(1, keepdim=True))).sum(2)
    free = (plan * ~full[:, None]).sum(2)
    last = free[:, -1:] + plan[:, -1].sum(1, keepdim=True) * all_full
    duals = eliminate(
        torch.cat([free[:, :-1], last], 1) + 1e-30,
        couplings(plan.unbind(1), rival[:, 0], plan),
        right,
    )
    inner = inner - duals[..., None]
    result = plan * (inner - rival * (plan * inner).sum(1, keepdim=True))
    return result.transpose(1, 2).reshape(cost.shape)


def _check(cost: Tensor, coupling: Coupling) -> None:
    if not isinstance(coupling, Coupling):
        raise wrong_type("coupling", "be a Coupling, from a transport solver", kind(coupling))
    if not isinstance(cost, Tensor) or cost.shape != coupling.plan.shape:
        raise wrong_value(
            "cost", f"have the shape of the plan {tuple(coupling.plan.shape)}", kind(cost)
        )
