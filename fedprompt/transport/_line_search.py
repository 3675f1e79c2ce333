"""Newton with a line search, in float64: for costs that are large against epsilon, and for masses close to full."""

from typing import NamedTuple

import torch
from torch import Tensor

from fedprompt.transport._dual import Evaluation, evaluate, levelled_cost, plan_at, row_kernel
from fedprompt.transport._problem import Problem


class Search(NamedTuple):
    """Where each problem's search stands, all ``(problems, columns)`` or ``(problems, 1)``."""

    base: Tensor  # log v, the last accepted
    direction: Tensor
    length: Tensor  # of the step tried last
    slope: Tensor  # of the dual along the direction, at the base


def climb(problem: Problem, v: Tensor, *, epsilon: float, tolerance: float, max_iterations: int) -> tuple[Tensor, Tensor, Tensor]:
    """Solve, from the duals of :func:`newton`'s plain steps where they are finite; return plan, log v and number of Newton steps.

    Trials that shorten a step are not counted, and there are at most two for each step on average.
    """
    dtype, problem = problem.cost.dtype, problem.double()
    cost = levelled_cost(problem, epsilon)
    x = problem.b.log() - (-cost).exp().sum(2).log()  # all rows slack: below the solution
    warm = v.to(x.dtype).log()
    x = torch.where(torch.isfinite(warm), warm, x)
    nothing, ones = torch.zeros_like(x[:, :1]), torch.ones_like(x)
    search = Search(x, torch.zeros_like(x), nothing + 1, nothing)
    active = torch.ones_like(nothing, dtype=torch.bool)
    iterations = torch.zeros_like(active, dtype=torch.int64)
    for _ in range(3 * max_iterations):
        kernel, cap = row_kernel(problem, cost, x)
        now = evaluate(problem, kernel, ones, cap)
        active = active & (now.error[:, None] > 0.9 * tolerance) & (iterations < max_iterations)
        if not bool(active.any()):
            break
        search, accepted = next_step(search, x, now, all_full(problem, now, cap))
        x = torch.where(active, search.base + search.length * search.direction, x)
        iterations += active & accepted
    return plan_at(problem, x, epsilon).to(dtype), x.to(dtype), iterations[:, 0]


def all_full(problem: Problem, now: Evaluation, cap: Tensor) -> Tensor:
    """Return ``(problems, 1)``, whether every row is full although the columns take less than all."""
    return (now.scale < cap).all(1, keepdim=True) & ~problem.full


def next_step(search: Search, x: Tensor, now: Evaluation, beyond: Tensor) -> tuple[Search, Tensor]:
    """Accept x and look in Newton's direction, or shorten the step, problem by problem; return also which were accepted.

    The dual is concave: its slope along a direction falls. A step is too long where that slope has become steeply negative, or negative
    and all rows are full (`beyond`): there the dual is flat, and hides how far it is. The secant through both slopes says how much too
    long. Where the slope has hardly fallen, the next step goes twice as far.
    """
    here = (now.slope * search.direction).sum(1, keepdim=True)
    accepted = here >= torch.where(beyond, 0.0, -0.5 * search.slope)
    shorter = search.length * (search.slope / (search.slope - here)).nan_to_num(nan=0.5).clamp(0.1, 0.7)
    longer = torch.where(here > 0.5 * search.slope, 2 * search.length, 1.0)
    direction = now.newton.sign() * now.newton.abs().log1p()  # v * (1 + d), or v / (1 - d) downwards
    ascends = (now.slope * direction).sum(1, keepdim=True) > 0
    longest = now.newton.abs().amax(1, keepdim=True).clamp(min=2)
    direction = torch.where(ascends, direction, 2 / longest * now.newton)  # Newton's own direction always does
    slope = (now.slope * direction).sum(1, keepdim=True)
    following = Search(
        base=torch.where(accepted, x, search.base),
        direction=torch.where(accepted, direction, search.direction),
        length=torch.where(accepted, longer, shorter),
        slope=torch.where(accepted, slope, search.slope),
    )
    return following, accepted
