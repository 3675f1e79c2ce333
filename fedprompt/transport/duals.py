"""Scores that keep a plan's few column duals, from which the plan follows in closed form, instead of the plan."""

import torch
from torch import Tensor

from fedprompt.transport._dual import plan_at
from fedprompt.transport._problem import check_values, flat
from fedprompt.transport.newton import solve


def score_and_duals(
    cost: Tensor, a: Tensor, b: Tensor, *, epsilon: float, tolerance: float, max_iterations: int, fused: bool, first: int = 0
) -> tuple[Tensor, Tensor]:
    """Solve as :func:`newton` does, without ever holding all plans; return ``sum(T * (1 - cost))`` and the duals.

    Args:
        cost: ``(*batch, rows, columns)``, best with the rows contiguous.
        a: ``(rows,)``.
        b: ``(columns,)``.
        epsilon: As for :func:`newton`.
        tolerance: As for :func:`newton`.
        max_iterations: As for :func:`newton`.
        fused: As for :func:`newton`.
        first: Where the first axis starts to count, in errors.
    """
    check_values(cost, a, b, first=first)
    problem = flat(cost, a, b)
    scores, duals = torch.empty_like(problem.b[:, 0]), torch.empty_like(problem.b)
    for part in problem.chunks():
        its = problem.take(part)
        solution = solve(its, epsilon=epsilon, tolerance=tolerance, max_iterations=max_iterations, fused=fused)
        scores[part] = solution.plan.sum((1, 2)) - (solution.plan * its.cost).sum((1, 2))
        duals[part] = solution.duals
    return scores.reshape(cost.shape[:-2]), duals.reshape(*cost.shape[:-2], -1)


def plans_from_duals(cost: Tensor, a: Tensor, b: Tensor, duals: Tensor, *, epsilon: float) -> Tensor:
    """Return the plans, the rows contiguous."""
    problem, duals = flat(cost, a, b), duals.reshape(-1, len(b))
    plan = torch.empty_like(problem.cost)
    for part in problem.chunks():
        plan[part] = plan_at(problem.take(part), duals[part], epsilon)
    return plan.reshape(cost.transpose(-2, -1).shape).transpose(-2, -1)
