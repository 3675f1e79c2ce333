"""The semi-dual of FedOTP's problem, and its ascent by Newton's method with a line search in float64.

The dual is concave in the column duals. One pass over the rows gives its slope and its curvature.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fedprompt.transport._elimination import couplings, eliminate, row_sums
from fedprompt.transport._problem import Problem

FARTHEST = 1e3  # twelve steps of this factor stay within float32
NEAR = 0.05  # times the root of the tolerance: from there one more step is enough
GROUND = 1e-7  # of each column's mass: keeps the curvature regular when every row is full


class Evaluation(NamedTuple):
    """What one pass finds; the plan at these duals is ``kernel * scale[:, None] * v[..., None]``.

    Attributes:
        scale: ``(problems, rows)``, what each row multiplies its kernel by.
        slope: ``(problems, columns)``, what each column takes less what it is given.
        error: ``(problems,)``, the largest slope relative to its column's mass.
        newton: ``(problems, columns)``, the Newton step in log v.
    """

    scale: Tensor
    slope: Tensor
    error: Tensor
    newton: Tensor


def levelled_cost(problem: Problem, epsilon: float) -> Tensor:
    """Return costs in units of `epsilon`, counted from each column's least: what log v belongs to."""
    return (problem.cost - problem.cost.amin(2, keepdim=True)).div_(epsilon)


def row_kernel(problem: Problem, cost: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``exp(x - cost)`` with 1 as the largest entry of each row, and what was divided out: no row can underflow."""
    exponent = x[..., None] - cost
    top = exponent.amax(1)
    # Beyond exp(60) a row is full whatever it asks. Where the columns take all there is, every row is full.
    cap = torch.where(problem.full, math.inf, top.clamp(max=60).exp())
    return exponent.sub_(top[:, None]).exp_(), cap


def plan_at(problem: Problem, x: Tensor, epsilon: float) -> Tensor:
    """Return the plan of duals x = log v ``(problems, columns)``, in closed form."""
    kernel, cap = row_kernel(problem, levelled_cost(problem, epsilon), x)
    return kernel.mul_(torch.minimum(problem.a / kernel.sum(1), cap)[:, None])


def demand(kernel: Tensor, v: Tensor) -> Tensor:
    """Return what the columns ask of each row, ``kernel^T v``, and never quite 0."""
    s = kernel[:, 0] * v[:, :1]
    for j in range(1, v.shape[1]):
        s = torch.addcmul(s, kernel[:, j], v[:, j : j + 1])
    return s.clamp(min=1e-18)


def evaluate(problem: Problem, kernel: Tensor, v: Tensor, cap: Tensor) -> Evaluation:
    """Let each row give ``min(a / s, cap)`` of its demand s, and measure what the columns get.

    A row is full where the first is the smaller. Slack rows answer each column alone; in a full row the columns compete, and what one
    gains the others lose. So minus the curvature is a diagonal of slack mass plus the Laplacian of ``T_j T_k / a`` over full rows.
    """
    inverse = demand(kernel, v).reciprocal()
    ratio = problem.a * inverse
    scale = torch.minimum(ratio, cap)
    slack = (ratio - scale).sign()  # 1 or 0: on a CPU without compiler, cheaper than to compare
    plan = [
        column * scale for column in kernel.unbind(1)
    ]  # by columns: compiled, all sums are one loop
    given = v * row_sums(plan)
    free = v * row_sums([column * slack for column in plan])
    # With no row ever slack, the duals are known up to a constant only: the last is pinned.
    free = torch.addcmul(free, given, problem.pinned).add(problem.b, alpha=GROUND)
    off = [
        v[:, j : j + 1] * products * v[:, j + 1 :]  # v * v may overflow
        for j, products in enumerate(
            couplings(plan, torch.addcmul(inverse, slack, inverse, value=-1), kernel)
        )
    ]
    slope = problem.b - given
    newton = eliminate(free, off, slope)
    return Evaluation(scale, slope, (slope / problem.b).abs().amax(1), newton)


class Search(NamedTuple):
    """Where each problem's search stands, all ``(problems, columns)`` or ``(problems, 1)``."""

    base: Tensor  # log v, the last accepted
    direction: Tensor
    length: Tensor  # of the step tried last
    slope: Tensor  # of the dual along the direction, at the base


def climb(
    problem: Problem, v: Tensor, *, epsilon: float, tolerance: float, max_iterations: int
) -> tuple[Tensor, Tensor, Tensor]:
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
    shorter = search.length * (search.slope / (search.slope - here)).nan_to_num(nan=0.5).clamp(
        0.1, 0.7
    )
    longer = torch.where(here > 0.5 * search.slope, 2 * search.length, 1.0)
    direction = (
        now.newton.sign() * now.newton.abs().log1p()
    )  # v * (1 + d), or v / (1 - d) downwards
    ascends = (now.slope * direction).sum(1, keepdim=True) > 0
    longest = now.newton.abs().amax(1, keepdim=True).clamp(min=2)
    direction = torch.where(
        ascends, direction, 2 / longest * now.newton
    )  # Newton's own direction always does
    slope = (now.slope * direction).sum(1, keepdim=True)
    following = Search(
        base=torch.where(accepted, x, search.base),
        direction=torch.where(accepted, direction, search.direction),
        length=torch.where(accepted, longer, shorter),
        slope=torch.where(accepted, slope, search.slope),
    )
    return following, accepted
