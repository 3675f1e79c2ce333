r"""What the gradient of a transport score is meant to be; all three share one signature.

A plan comes from a solver without a graph. These functions make a differentiable score of it, and say by that how the plan's own
dependence on the cost is treated.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from fedprompt._checks import check_number, kind, wrong_type, wrong_value
from fedprompt.interfaces import Coupling
from fedprompt.transport._elimination import couplings, eliminate
from fedprompt.transport._problem import check_problem

TransportScore = Callable[[Tensor, Coupling, Tensor, Tensor], Tensor]
"""(cost, coupling, a, b) -> a differentiable score of each problem."""


def plan_fixed(
    cost: Float[Tensor, "*batch rows columns"],
    coupling: Coupling,
    a: Float[Tensor, "*#batch rows"],
    b: Float[Tensor, "*#batch columns"],
) -> Float[Tensor, "*batch"]:
    r"""Score a plan by :math:`\langle C, T \rangle` and differentiate as if the plan were a constant: FedOTP's choice.

    The gradient in the cost is the plan itself. That is the gradient of the *regularised* value, the score of :func:`envelope`, and not
    of the number that is returned: moving the cost would also move the plan, which :func:`implicit` counts in.

    Args:
        cost: What the plan was made for; gradients flow into it.
        coupling: From any solver.
        a: Mass of the rows; not read.
        b: Mass of the columns; not read.

    Returns:
        The transport cost of each problem.

    Raises:
        TypeError: If `coupling` is not a :class:`Coupling`.
        ValueError: If shapes disagree.

    Example:
        >>> cost, a, b = torch.eye(2, requires_grad=True), torch.tensor([0.5, 0.5]), torch.tensor([0.4, 0.4])
        >>> coupling = newton(cost, a, b)
        >>> plan_fixed(cost, coupling, a, b).backward()
        >>> torch.equal(cost.grad, coupling.plan)
        True
    """
    _check(cost, coupling)
    return (coupling.plan * cost).sum((-2, -1))


def envelope(
    cost: Float[Tensor, "*batch rows columns"],
    coupling: Coupling,
    a: Float[Tensor, "*#batch rows"],
    b: Float[Tensor, "*#batch columns"],
    *,
    epsilon: float = 0.1,
) -> Float[Tensor, "*batch"]:
    r"""Score a plan by the regularised value :math:`\langle C, T \rangle + \epsilon \langle T, \log T \rangle`, with its exact gradient.

    The solver minimises this value, so that at its solution a small change of the plan changes nothing (the envelope theorem): the
    gradient in the cost is the plan, as for :func:`plan_fixed`, and here it is the gradient of the number that is returned.

    Args:
        cost: What the plan was made for; gradients flow into it.
        coupling: From :func:`newton`, :func:`dykstra` or :func:`sinkhorn`.
        a: Mass of the rows, the solver's.
        b: Mass of the columns, the solver's.
        epsilon: The solver's.

    Returns:
        The regularised value of each problem.

    Raises:
        TypeError: If `coupling` is not a :class:`Coupling`.
        ValueError: If shapes disagree or `epsilon` is not above 0.

    Example:
        >>> cost, a, b = torch.eye(2), torch.tensor([0.5, 0.5]), torch.tensor([0.5, 0.5])
        >>> envelope(cost, independent(cost, a, b), a, b, epsilon=0.1)  # 0.5 + 0.1 log(1/4)
        tensor(0.3614)
    """
    _check(cost, coupling)
    check_problem(cost, a, b)
    check_number("epsilon", epsilon, above=0)
    return plan_fixed(cost, coupling, a, b) + epsilon * torch.xlogy(coupling.plan, coupling.plan).sum((-2, -1))


def implicit(
    cost: Float[Tensor, "*batch rows columns"],
    coupling: Coupling,
    a: Float[Tensor, "*#batch rows"],
    b: Float[Tensor, "*#batch columns"],
    *,
    epsilon: float = 0.1,
) -> Float[Tensor, "*batch"]:
    r"""Score a plan by :math:`\langle C, T \rangle`, with the exact gradient of that number: the plan moves with the cost.

    By the implicit function theorem at the solution, with :math:`t_v` the plan's row v,

    .. math:: \nabla_{C_v} \langle C, T \rangle = t_v - \tfrac1\epsilon M_v (C_v - z), \quad
              M_v = \mathrm{diag}(t_v) - [\text{row } v \text{ full}]\, t_v t_v^\top / a_v, \quad
              \Big(\sum_v M_v\Big) z = \sum_v M_v C_v

    One pass over the plan and one small solve, no matter how many iterations the solver took. Entries may be negative, which
    :func:`plan_fixed` never is. Exact where no row is just about to become full, and to the accuracy of the plan. A second derivative
    would miss terms.

    Args:
        cost: What the plan was made for; gradients flow into it.
        coupling: From :func:`newton`, :func:`dykstra` or :func:`sinkhorn`, solved to a small error.
        a: Mass of the rows, the solver's.
        b: Mass of the columns, the solver's.
        epsilon: The solver's.

    Returns:
        The transport cost of each problem, as from :func:`plan_fixed`.

    Raises:
        TypeError: If `coupling` is not a :class:`Coupling`.
        ValueError: If shapes disagree or `epsilon` is not above 0.

    Example:
        Of equal masses and two rows each, a dearer pair is used less, and the score rises by less than the plan says.

        >>> cost, a, b = torch.eye(2, requires_grad=True), torch.tensor([0.5, 0.5]), torch.tensor([0.5, 0.5])
        >>> coupling = newton(cost, a, b, epsilon=1.0)
        >>> implicit(cost, coupling, a, b, epsilon=1.0).backward()
        >>> bool(cost.grad[0, 0] < coupling.plan[0, 0])
        True
    """
    _check(cost, coupling)
    check_problem(cost, a, b)
    check_number("epsilon", epsilon, above=0)
    score = plan_fixed(cost, coupling, a, b)
    with torch.no_grad(), torch.autocast(cost.device.type, enabled=False):
        moved = -_moved_by(cost, coupling, a, b) / epsilon
    return score + (moved * (cost - cost.detach())).sum((-2, -1))  # adds 0, and its gradient


def _moved_by(cost: Tensor, coupling: Coupling, a: Tensor, b: Tensor) -> Tensor:
    """Return ``M_v (C_v - z)`` for all rows, in the plan's shape."""
    plan = coupling.plan.transpose(-2, -1).flatten(0, -3) if cost.ndim > 2 else coupling.plan.T[None]
    inner = cost.to(plan.dtype).transpose(-2, -1).reshape(plan.shape)
    a, b = (mass.to(plan.dtype).expand(*cost.shape[:-2], -1).reshape(len(plan), -1) for mass in (a, b))
    given = plan.sum(1)
    resolution = torch.maximum(2 * coupling.error.flatten(), coupling.error.new_tensor(100 * torch.finfo(plan.dtype).eps))[:, None]
    full = (given >= a * (1 - resolution)) & (given > 0)
    all_full = b.sum(1, keepdim=True) >= a.sum(1, keepdim=True) * (1 - resolution)
    full = full | (all_full & (given > 0))
    rival = torch.where(full, 1 / given.clamp(min=torch.finfo(plan.dtype).tiny), 0.0)[:, None]

    inner = inner - (plan * inner).sum((1, 2), keepdim=True) / plan.sum((1, 2), keepdim=True)  # a constant changes nothing
    right = (plan * (inner - rival * (plan * inner).sum(1, keepdim=True))).sum(2)
    free = (plan * ~full[:, None]).sum(2)
    last = free[:, -1:] + plan[:, -1].sum(1, keepdim=True) * all_full
    duals = eliminate(torch.cat([free[:, :-1], last], 1) + 1e-30, couplings(plan.unbind(1), rival[:, 0], plan), right)
    inner = inner - duals[..., None]
    result = plan * (inner - rival * (plan * inner).sum(1, keepdim=True))
    return result.transpose(1, 2).reshape(cost.shape)


def _check(cost: Tensor, coupling: Coupling) -> None:
    if not isinstance(coupling, Coupling):
        raise wrong_type("coupling", "be a Coupling, from a transport solver", kind(coupling))
    if not isinstance(cost, Tensor) or cost.shape != coupling.plan.shape:
        raise wrong_value("cost", f"have the shape of the plan {tuple(coupling.plan.shape)}", kind(cost))
