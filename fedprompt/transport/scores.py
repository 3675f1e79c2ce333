"""Differentiable scores of transport plans, all with the signature ``(cost, coupling)``.

Solvers return plans without a graph. These functions compute a differentiable score from a plan.
They differ in how the gradient treats the dependence of the plan on the cost.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

import fedprompt._refusals as check
from fedprompt._convergence import UNSTATED, solved
from fedprompt.interfaces import Coupling
from fedprompt.transport._elimination import couplings, eliminate
from fedprompt.transport._problem import check_layout, slack_of


def plan_fixed(
    cost: Float[Tensor, "*batch rows columns"], coupling: Coupling
) -> Float[Tensor, "*batch"]:
    r"""Score a plan by :math:`\langle C, T \rangle`, with the plan as a constant in the gradient.

    This is the score of FedOTP. Its gradient in the cost is the plan. That is the exact gradient of
    the *regularized* value, the score of :func:`envelope`, and not of the returned number. The
    exact gradient of the returned number is that of :func:`implicit`.

    Args:
        cost: Cost that the plan was computed for; gradients flow into it.
        coupling: Result of any solver.

    Returns:
        Transport cost of each problem.

    Raises:
        ValueError: If shapes disagree.

    Example:
        >>> from fedprompt.transport import newton
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
    r"""Score a plan by the value that the solver minimizes, the regularized transport cost.

    .. math:: \langle C, T \rangle + \epsilon \langle T, \log T \rangle

    For a plan of :func:`unbalanced` the value is that of its docstring, with all divergences. The
    gradient in the cost is the plan, as for :func:`plan_fixed`. Here it is the exact gradient
    of the returned number: at a minimum, a small change of the plan does not change the value (the
    envelope theorem).

    Args:
        cost: Cost that the plan was computed for; gradients flow into it.
        coupling: Result of a solver that minimizes a value: any but :func:`independent`.

    Returns:
        Regularized value of each problem.

    Raises:
        ValueError: If shapes disagree or the coupling's epsilon is not finite.

    Example:
        Two rows give a half each to one column: 0.5 * 1 + 0.1 * log(0.5) = 0.4307.

        >>> from fedprompt.transport import newton
        >>> cost, a = torch.tensor([[1.0], [0.0]]), torch.tensor([0.5, 0.5])
        >>> envelope(cost, newton(cost, a, torch.tensor([1.0]), epsilon=0.1))
        tensor(0.4307)
    """
    value = plan_fixed(cost, coupling)
    check.number("coupling.epsilon", coupling.epsilon, at_least=0)
    _check_solved(coupling)
    plan, rho = coupling.plan, coupling.rho
    if rho is None:
        return value + coupling.epsilon * torch.xlogy(plan, plan).sum((-2, -1))
    a, b = (mass.to(plan.dtype) for mass in (coupling.a, coupling.b))
    value = value + coupling.epsilon * _divergence(plan, a[..., None] * b[..., None, :], (-2, -1))
    for weight, axis, mass in ((rho[0], -1, a), (rho[1], -2, b)):
        if weight < math.inf:
            value = value + weight * _divergence(plan.sum(axis), mass, (-1,))
    return value


def _divergence(found: Tensor, expected: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Return the Kullback-Leibler divergence of masses, of which neither sums to 1."""
    entropy = torch.xlogy(found, found) - torch.xlogy(found, expected)
    return (entropy - found + expected).sum(axes)


def implicit(
    cost: Float[Tensor, "*batch rows columns"], coupling: Coupling
) -> Float[Tensor, "*batch"]:
    r"""Score a plan by :math:`\langle C, T \rangle`, with the exact gradient of this number.

    The gradient includes the change of the plan with the cost. It follows from the implicit
    function theorem at the solution, where :math:`t_v` is row v of the plan:

    .. math:: \nabla_{C_v} \langle C, T \rangle = t_v - \tfrac1\epsilon M_v (C_v - z), \quad
              M_v = \mathrm{diag}(t_v) - [\text{row } v \text{ full}]\, t_v t_v^\top / a_v, \quad
              \Big(\sum_v M_v\Big) z = \sum_v M_v C_v

    For a plan of :func:`unbalanced` the bracket is :math:`\rho_1 / (\rho_1 + \epsilon)`, with the
    sum of the row in place of :math:`a_v`, and the matrix on the right has
    :math:`\epsilon / \rho_2` times the sums of the columns on its diagonal.

    The computation is one pass over the plan and one small linear system, however many iterations
    the solver took. Entries of the gradient can be negative, unlike those of :func:`plan_fixed`.
    The gradient is as accurate as the plan, except where a row is exactly at the limit between
    slack and full. Plans of :func:`exact` and :func:`independent` do not change with a small change
    of the cost, so their gradient is the plan. Second derivatives are not supported: they would
    miss terms.

    Args:
        cost: Cost that the plan was computed for; gradients flow into it.
        coupling: Result of a solver with a small error.

    Returns:
        Transport cost of each problem, as from :func:`plan_fixed`.

    Raises:
        ValueError: If shapes disagree or the coupling's epsilon is below 0.

    Example:
        If the cost of a pair increases, the plan uses it less. So the gradient is below the plan.

        >>> from fedprompt.transport import newton
        >>> cost, half = torch.eye(2, requires_grad=True), torch.tensor([0.5, 0.5])
        >>> coupling = newton(cost, half, half, epsilon=1.0)
        >>> implicit(cost, coupling).backward()
        >>> bool(cost.grad[0, 0] < coupling.plan[0, 0])
        True
    """
    value = plan_fixed(cost, coupling)
    if coupling.epsilon in (0, math.inf):  # the plan does not move
        return value
    _check_solved(coupling)
    with torch.no_grad(), torch.autocast(cost.device.type, enabled=False):
        moved = -_moved_by(cost, coupling) / coupling.epsilon
    # The added term has the value 0 and the gradient `moved`.
    return value + (moved * (cost - cost.detach())).sum((-2, -1))


def _moved_by(cost: Tensor, coupling: Coupling) -> Tensor:
    """Return ``M_v (C_v - z)`` for all rows, in the plan's shape."""
    *_, rows, columns = cost.shape
    plan = coupling.plan.transpose(-2, -1).reshape(-1, columns, rows)
    inner = cost.to(plan.dtype).transpose(-2, -1).reshape(plan.shape)
    masses = (mass.to(plan.dtype).expand(*cost.shape[:-2], -1) for mass in (coupling.a, coupling.b))
    a, b = (mass.reshape(len(plan), mass.shape[-1]) for mass in masses)
    given = plan.sum(1)
    eps = torch.finfo(plan.dtype).eps
    resolution = (2 * coupling.error.reshape(-1, 1)).clamp(min=100 * eps)
    full = (given >= a * (1 - resolution)) & (given > 0)
    all_full = b.sum(1, keepdim=True) >= a.sum(1, keepdim=True) * (1 - resolution)
    full = full | (all_full & (given > 0))
    held, elastic = full.to(plan.dtype), 0.0
    if coupling.rho is not None:
        for_rows, elastic = (coupling.epsilon / weight for weight in coupling.rho)
        held, all_full = (given > 0) / (1 + for_rows), torch.zeros_like(all_full)
    rival = (held / given.clamp(min=torch.finfo(plan.dtype).tiny))[:, None]

    if coupling.rho is None:
        # A constant in the cost has no effect; subtracting the mean reduces rounding errors.
        inner = inner - (plan * inner).sum((1, 2), keepdim=True) / plan.sum((1, 2), keepdim=True)
    right = (plan * (inner - rival * (plan * inner).sum(1, keepdim=True))).sum(2)
    free = (plan * (1 - held[:, None])).sum(2) + elastic * plan.sum(2)
    last = free[:, -1:] + plan[:, -1].sum(1, keepdim=True) * all_full
    free = torch.cat([free[:, :-1], last], 1) + 1e-30
    duals = eliminate(free, couplings(plan.unbind(1), rival[:, 0], plan), right)
    inner = inner - duals[..., None]
    result = plan * (inner - rival * (plan * inner).sum(1, keepdim=True))
    return result.transpose(1, 2).reshape(cost.shape)


def _check_solved(coupling: Coupling) -> None:
    """Warn about a plan that does not solve its problem, whatever error its solver reports."""
    plan, a, b = (part.detach() for part in (coupling.plan, coupling.a, coupling.b))
    error = coupling.error
    if coupling.rho is None:
        excess = (plan.sum(-1) - a) / a.clamp(min=torch.finfo(a.dtype).tiny) - slack_of(a, b)
        columns = ((plan.sum(-2) - b) / b).abs().amax(-1)
        error = torch.maximum(error, torch.maximum(excess.amax(-1), columns)).detach()
    solved(coupling._replace(error=error, tolerance=coupling.tolerance or UNSTATED))


def _check(cost: Tensor, coupling: Coupling) -> None:
    """Require a cost, and a coupling in its layout; numbers are checked on the CPU only."""
    check.instance("coupling", coupling, Coupling, "be a Coupling, from a transport solver")
    for name in ("plan", "a", "b", "error"):
        check.number_tensor(f"coupling.{name}", getattr(coupling, name), read=True)
    plan = coupling.plan
    check.number_tensor("cost", cost, read=True)
    check.shape("cost", cost, plan.shape, "the plan")
    check_layout(cost, coupling.a, coupling.b)
    check.same_device("coupling.plan", plan, cost.device, or_cpu=True)
    if check.values_readable(plan, sync=False) and bool((plan < 0).any()):
        raise check.wrong("coupling.plan", "be at least 0", plan.min().item())
    if coupling.epsilon != math.inf:
        check.number("coupling.epsilon", coupling.epsilon, at_least=0)
    check.shape("coupling.error", coupling.error, cost.shape[:-2])
    check.same_device("coupling.error", coupling.error, cost.device, or_cpu=True)
