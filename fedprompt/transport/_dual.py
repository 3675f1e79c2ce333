"""The semi-dual of FedOTP's problem: concave in the column duals, with a slope and a curvature that one pass over the rows gives."""

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
    plan = [column * scale for column in kernel.unbind(1)]  # by columns: compiled, all sums are one loop
    given = v * row_sums(plan)
    free = v * row_sums([column * slack for column in plan])
    # With no row ever slack, the duals are known up to a constant only: the last is pinned.
    free = torch.addcmul(free, given, problem.pinned).add(problem.b, alpha=GROUND)
    off = [
        v[:, j : j + 1] * products * v[:, j + 1 :]  # v * v may overflow
        for j, products in enumerate(couplings(plan, torch.addcmul(inverse, slack, inverse, value=-1), kernel))
    ]
    slope = problem.b - given
    newton = eliminate(free, off, slope)
    return Evaluation(scale, slope, (slope / problem.b).abs().amax(1), newton)
