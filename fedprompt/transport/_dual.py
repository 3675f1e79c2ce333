"""The dual of FedOTP's problem in the column duals, and Newton's method with a line search for it.

The dual is concave. One pass over the rows computes its slope and its curvature. The line search
runs in float64.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fedprompt.transport._elimination import couplings, eliminate, row_sums
from fedprompt.transport._problem import Problem

FARTHEST = 1e3
"""Largest factor of one plain step in v. Twelve such steps do not overflow float32."""

NEAR = 0.05
"""An error below this factor times the root of the tolerance needs one more step."""

GROUND = 1e-7
"""Fraction of each column's mass added to the diagonal: a matrix with all rows full is singular."""


class Evaluation(NamedTuple):
    """Quantities of one pass; the plan is ``kernel * scale[:, None] * v[..., None]``.

    Attributes:
        scale: ``(problems, rows)``, scale of each row.
        slope: ``(problems, columns)``, mass of each column minus the sum of the plan over rows.
        error: ``(problems,)``, largest slope relative to the column's mass.
        newton: ``(problems, columns)``, Newton step in log v.
    """

    scale: Tensor
    slope: Tensor
    error: Tensor
    newton: Tensor


def levelled_cost(problem: Problem, epsilon: float) -> Tensor:
    """Return ``(cost - smallest cost of the column) / epsilon``, to which log v refers."""
    return (problem.cost - problem.cost.amin(2, keepdim=True)).div_(epsilon)


def row_kernel(problem: Problem, cost: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``exp(x - cost)``, scaled to a maximum of 1 in each row, and the divisors.

    The scaling prevents that all entries of a row underflow.
    """
    exponent = x[..., None] - cost
    top = exponent.amax(1)
    # Above exp(60) a row is full in any case. If columns take the rows' whole mass, all are full.
    cap = torch.where(problem.full, math.inf, top.clamp(max=60).exp())
    return exponent.sub_(top[:, None]).exp_(), cap


def plan_at(problem: Problem, x: Tensor, epsilon: float) -> Tensor:
    """Compute the plan of duals x = log v ``(problems, columns)``, in closed form."""
    kernel, cap = row_kernel(problem, levelled_cost(problem, epsilon), x)
    return kernel.mul_(torch.minimum(problem.a / kernel.sum(1), cap)[:, None])


def demand(kernel: Tensor, v: Tensor) -> Tensor:
    """Return the demand on each row, ``kernel^T v``, at least 1e-18."""
    s = kernel[:, 0] * v[:, :1]
    for j in range(1, v.shape[1]):
        s = torch.addcmul(s, kernel[:, j], v[:, j : j + 1])
    return s.clamp(min=1e-18)


def evaluate(problem: Problem, kernel: Tensor, v: Tensor, cap: Tensor) -> Evaluation:
    """Scale each row by ``min(a / s, cap)`` for its demand s, and compute slope and Newton step.

    A row is full if ``a / s`` is smaller than its cap, and slack otherwise. In a slack row the
    columns are independent. In a full row the mass that one column gains is lost by the others. So
    the negative curvature is a diagonal of slack mass plus the Laplacian of ``T_j T_k / a`` over
    full rows.
    """
    inverse = demand(kernel, v).reciprocal()
    ratio = problem.a * inverse
    scale = torch.minimum(ratio, cap)
    slack = (ratio - scale).sign()  # 1 or 0; faster than a comparison in eager mode on a CPU
    plan = [column * scale for column in kernel.unbind(1)]  # when compiled, all sums are one loop
    given = v * row_sums(plan)
    free = v * row_sums([column * slack for column in plan])
    # If no row can be slack, the duals are unique up to a constant only, and the last is pinned.
    free = torch.addcmul(free, given, problem.pinned).add(problem.b, alpha=GROUND)
    full = torch.addcmul(inverse, slack, inverse, value=-1)
    off = [
        v[:, j : j + 1] * products * v[:, j + 1 :]  # in this order, because v * v may overflow
        for j, products in enumerate(couplings(plan, full, kernel))
    ]
    slope = problem.b - given
    newton = eliminate(free, off, slope)
    return Evaluation(scale, slope, (slope / problem.b).abs().amax(1), newton)


class Search(NamedTuple):
    """State of the line search, each ``(problems, columns)`` or ``(problems, 1)``.

    Attributes:
        base: Last accepted log v.
        direction: Direction of the step from the base.
        length: Length of the last trial step.
        slope: Slope of the dual along the direction, at the base.
    """

    base: Tensor
    direction: Tensor
    length: Tensor
    slope: Tensor


def climb(
    problem: Problem, v: Tensor, *, epsilon: float, tolerance: float, max_iterations: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Solve by Newton steps with a line search; return plan, log v and number of steps.

    The search starts from `v`, the duals of the plain steps, where they are finite. Trials that
    only shorten a step are not counted. Their number is at most twice the number of steps.
    """
    dtype = problem.cost.dtype
    problem = problem.double()
    cost = levelled_cost(problem, epsilon)
    x = problem.b.log() - (-cost).exp().sum(2).log()  # all rows slack: below the solution
    warm = v.to(x.dtype).log()
    x = torch.where(torch.isfinite(warm), warm, x)
    ones = torch.ones_like(x)
    zero = torch.zeros_like(x[:, :1])
    search = Search(x, torch.zeros_like(x), zero + 1, zero)
    active = torch.ones_like(zero, dtype=torch.bool)
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
    """Whether every row is full although the columns take less than all: ``(problems, 1)``."""
    return (now.scale < cap).all(1, keepdim=True) & ~problem.full


def next_step(search: Search, x: Tensor, now: Evaluation, beyond: Tensor) -> tuple[Search, Tensor]:
    """Accept x and choose the next direction, or shorten the step; return also which are accepted.

    The dual is concave, so its slope along a direction decreases. A step is too long if the slope
    at x is far below 0, or below 0 with all rows full (`beyond`). In the second case the dual is
    flat, and a small slope does not mean a small distance. The secant through both slopes gives the
    shorter step. If the slope has hardly decreased, the next step is twice as long.
    """
    here = (now.slope * search.direction).sum(1, keepdim=True)
    accepted = here >= torch.where(beyond, 0.0, -0.5 * search.slope)
    secant = (search.slope / (search.slope - here)).nan_to_num(nan=0.5)
    shorter = search.length * secant.clamp(0.1, 0.7)
    longer = torch.where(here > 0.5 * search.slope, 2 * search.length, 1.0)
    direction = now.newton.sign() * now.newton.abs().log1p()  # v * (1 + d), or v / (1 - d) if d < 0
    ascends = (now.slope * direction).sum(1, keepdim=True) > 0
    longest = now.newton.abs().amax(1, keepdim=True).clamp(min=2)
    # Newton's own direction always ascends.
    direction = torch.where(ascends, direction, 2 / longest * now.newton)
    slope = (now.slope * direction).sum(1, keepdim=True)
    steps = zip(Search(x, direction, longer, slope), search._replace(length=shorter), strict=True)
    return Search(*(torch.where(accepted, onward, again) for onward, again in steps)), accepted
