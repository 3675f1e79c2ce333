"""Alternating row and column scaling in the log domain: what FedOTP's algorithm and Sinkhorn's share."""

import math

import torch
from torch import Tensor

from fedprompt.transport._problem import Problem, violation

COMPILED_STEPS = 32


def alternate(
    problem: Problem, *, epsilon: float, tolerance: float, max_iterations: int, rows_exact: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Scale rows to their mass (but not up, unless all are full or `rows_exact`), then columns to theirs, and again.

    Columns come last, so they hold up to rounding. A problem rests once no column's scale changes by more than
    `tolerance`, relatively: by as much do its rows then exceed their masses. Starts with every row at scale 1, and is
    therefore invariant to ``cost + constant``.
    """
    exponent = (problem.cost.amin((1, 2), keepdim=True) - problem.cost) / epsilon
    log_a, log_b = problem.a.log(), problem.b.log()
    cap = torch.where(problem.full | rows_exact, math.inf, 0.0).to(log_a.dtype)
    x, row_scale = log_b - exponent.logsumexp(2), torch.zeros_like(log_a)
    active = torch.ones_like(problem.full[:, 0])
    iterations = torch.zeros_like(active, dtype=torch.int64)
    for _ in range(max_iterations if problem.eager else min(max_iterations, COMPILED_STEPS)):
        row_scale = torch.where(active[:, None], torch.minimum(log_a - (exponent + x[..., None]).logsumexp(1), cap), row_scale)
        new = torch.where(active[:, None], log_b - (exponent + row_scale[:, None]).logsumexp(2), x)
        change, x = (new - x).abs().amax(1), new
        iterations += active
        active = active & ~(change <= tolerance)
        if problem.eager and not bool(active.any()):
            break
    plan = (exponent + row_scale[:, None] + x[..., None]).exp()
    return plan, violation(plan, problem, rows_exact=rows_exact), iterations
