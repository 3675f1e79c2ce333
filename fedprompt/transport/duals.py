"""Plans from their column duals, in closed form."""

import torch
from jaxtyping import Float
from torch import Tensor

import fedprompt._refusals as check
from fedprompt.transport._dual import plan_at
from fedprompt.transport._problem import check_layout, check_problem, flat, unwrapped


@torch.no_grad()
def plan_from_duals(
    duals: Float[Tensor, "*batch columns"],
    cost: Float[Tensor, "*batch rows columns"],
    a: Float[Tensor, "*#batch rows"],
    b: Float[Tensor, "*#batch columns"],
    *,
    epsilon: float = 0.1,
) -> Float[Tensor, "*batch rows columns"]:
    r"""Compute the plan of an entropic solver from its duals, without iterations.

    .. math:: T_{vj} = \min(a_v / s_v, 1) \, e^{x_j - D_{vj} / \epsilon}, \qquad
              s_v = \sum_j e^{x_j - D_{vj} / \epsilon}, \qquad
              D_{vj} = C_{vj} - \min_w C_{wj}

    The minimum is left out if ``b.sum() == a.sum()``. There is one dual for each column, so
    duals can be stored where plans do not fit into memory. If :func:`dykstra` or :func:`sinkhorn`
    stops before it converges, the plan differs from theirs by half an iteration.

    Args:
        duals: Duals x, from ``Coupling.duals`` of :func:`newton`, :func:`dykstra` or
            :func:`sinkhorn`.
        cost: Cost of the solved problems.
        a: Mass of the rows in the solved problems.
        b: Mass of the columns in the solved problems.
        epsilon: Factor of the entropy in the solved problems, above 0.

    Returns:
        Plan without a graph and in float32 at least.

    Raises:
        ValueError: If shapes disagree, `epsilon` is not above 0, or a solver would refuse the cost
            or the masses.

    Example:
        >>> from fedprompt.transport import newton
        >>> cost, a, b = torch.eye(3)[:, :2], torch.full((3,), 1 / 3), torch.tensor([0.3, 0.4])
        >>> coupling = newton(cost, a, b)
        >>> plan = plan_from_duals(coupling.duals, cost, a, b)
        >>> torch.allclose(plan, coupling.plan, atol=1e-6)
        True
    """
    check_layout(cost, a, b)
    check.divisor("epsilon", epsilon)
    check.number_tensor("duals", duals, "be a floating-point tensor (..., columns)", read=True)
    check.shape("duals", duals, cost.shape[:-2] + cost.shape[-1:], "the columns of `cost`")

    def solved(cost: Tensor, a: Tensor, b: Tensor, duals: Tensor) -> tuple[Tensor]:
        check_problem(cost, a, b, epsilon)
        problem = flat(cost, a, b)
        x = duals.to(problem.cost.dtype).reshape(problem.b.shape)
        plan = torch.empty_like(problem.cost)
        for part in problem.chunks():
            plan[part] = plan_at(problem.take(part), x[part], epsilon)
        return (plan.transpose(1, 2).reshape(cost.shape),)

    with torch.autocast(cost.device.type, enabled=False):
        return unwrapped(solved, cost, a, b, duals)[0]
