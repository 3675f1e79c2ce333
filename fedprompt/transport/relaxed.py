"""Transport with relaxed marginals: unbalanced transport in the sense of Kullback-Leibler."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

import fedprompt._refusals as check
from fedprompt.interfaces import Coupling
from fedprompt.transport._problem import Problem, Solution, couple_entropic, violation

_COMPILED_STEPS = 32
"""Number of iterations under ``torch.compile``, where values cannot be read."""


def unbalanced(
    cost: Float[Tensor, "*batch rows columns"],
    a: Float[Tensor, "*#batch rows"],
    b: Float[Tensor, "*#batch columns"],
    *,
    epsilon: float = 0.1,
    rho: float | tuple[float, float] = 1.0,
    tolerance: float = 1e-5,
    max_iterations: int = 1000,
) -> Coupling:
    r"""Solve unbalanced transport: marginals may differ from `a` and `b` at a price.

    .. math:: \min_{T \ge 0} \; \langle C, T \rangle + \epsilon \, \mathrm{KL}(T \,|\, a b^\top)
              + \rho_1 \mathrm{KL}(T \mathbf 1 \,|\, a)
              + \rho_2 \mathrm{KL}(T^\top \mathbf 1 \,|\, b), \qquad
              \mathrm{KL}(p \,|\, q) = \sum_i p_i \log (p_i / q_i) - p_i + q_i

    This is the usual meaning of "unbalanced Sinkhorn". The FedOTP paper uses the word for another
    problem, in which rows give at most `a` and columns take exactly `b`: that of :func:`newton` and
    :func:`dykstra`. Here the mass of the plan depends on the cost, so a constant added to the cost
    changes the plan.

    Sinkhorn's iterations run in the log domain. If both penalties are finite or one is, each
    iteration also moves a constant between rows and columns, so a large `rho` does not slow it
    down. If both are infinite, this is :func:`sinkhorn`.

    Args:
        cost: Cost of each pair of row and column, finite. Leading axes index problems.
        a: Mass of the rows, at least 0.
        b: Mass of the columns, above 0. Its sum may differ from the sum of `a`, unless `rho` is
            infinite.
        epsilon: Factor of the entropy, above 0. Pass ``cost + epsilon * (a[:, None] * b).log()``
            for the entropy of :func:`newton` in place of the divergence from :math:`a b^\top`.
        rho: Factor of the penalty of both marginals, or one factor for rows and one for columns,
            above 0. ``math.inf`` is an exact marginal.
        tolerance: Largest relative change of the plan's entries at which a problem stops, above 0.
        max_iterations: Maximum number of iterations for one problem, at least 1. Under
            ``torch.compile`` there are exactly 32 iterations, or `max_iterations` if that is less.

    Returns:
        Plan without a graph and in float32 at least. Its `error` is not the distance of the
        marginals from `a` and `b`, but from those that the optimality conditions give for the
        plan's scales, relatively. There are no duals.
        :func:`plan_fixed`, :func:`implicit` and :func:`envelope` score the plan.

    Raises:
        ValueError: If shapes disagree, a mass or hyper-parameter lies outside its range, or a cost
            is not finite. The message names the problems.

    Example:
        The second row is far from both columns, and gives only a part of its mass.

        >>> cost = torch.tensor([[0.0, 0.1], [2.0, 2.0]])
        >>> half = torch.tensor([0.5, 0.5])
        >>> unbalanced(cost, half, half, rho=0.5).plan.sum(1)
        tensor([0.6446, 0.0253])

    References:
        Chizat et al., "Scaling Algorithms for Unbalanced Optimal Transport Problems", Mathematics
        of Computation 2018. Séjourné et al., "Faster Unbalanced Optimal Transport: Translation
        Invariant Sinkhorn and 1-D Frank-Wolfe", AISTATS 2022, for the constant.
    """
    both = rho if isinstance(rho, tuple) else (rho, rho)
    check.pair("rho", both, "be a number, or a pair for rows and columns")
    weight: Any  # vmap cannot compare a tensor
    for weight in both:
        if not (isinstance(weight, float) and weight == math.inf):
            check.divisor("rho", weight)
    exact = True if min(both) == math.inf else None
    options = (partial(_solve, rho=both), epsilon, tolerance, max_iterations)
    coupling = couple_entropic(cost, a, b, *options, rows_exact=exact)
    return coupling if exact else coupling._replace(rho=both)


def _solve(
    problem: Problem,
    *,
    rho: tuple[float, float],
    epsilon: float,
    tolerance: float,
    max_iterations: int,
) -> Solution:
    """Scale rows and columns in turn; the plan is ``a * b * exp(x + y - cost / epsilon)``.

    The scale of a row is that of Sinkhorn's algorithm to the power ``rho / (rho + epsilon)``. The
    duals are ``y + shift`` and ``x - shift``. The shift is the best one for the x and y of an
    iteration. It is kept apart, because it grows with `rho` and cancels in the plan.
    """
    exponent = problem.cost / -epsilon
    log_a, log_b = problem.a.log(), problem.b.log()
    for_a, for_b = (epsilon / weight for weight in rho)
    shared = 1 / (for_a + for_b) if for_a + for_b else 0.0
    x, y, shift = torch.zeros_like(log_b), torch.zeros_like(log_a), torch.zeros_like(log_b[:, :1])
    active = torch.ones_like(problem.full[:, 0])
    iterations = torch.zeros_like(active, dtype=torch.int64)
    for _ in range(max_iterations if problem.eager else min(max_iterations, _COMPILED_STEPS)):
        rows = -(exponent + (log_b + x)[..., None]).logsumexp(1) - for_a * shift
        rows = rows / (1 + for_a)
        columns = -(exponent + (log_a + rows)[:, None]).logsumexp(2) + for_b * shift
        columns = columns / (1 + for_b)
        up = (columns - x).amax(1) + (rows - y).amax(1)
        down = (x - columns).amax(1) + (y - rows).amax(1)
        change = torch.maximum(up, down)
        x, y = (torch.where(active[:, None], *pair) for pair in ((columns, x), (rows, y)))
        gap = (log_a - for_a * y).logsumexp(1) - (log_b - for_b * x).logsumexp(1)
        shift = shared * gap[:, None]
        iterations += active
        active = active & ~(change <= tolerance)
        if problem.eager and not bool(active.any()):
            break
    plan = (exponent + (log_b + x)[..., None] + (log_a + y)[:, None]).exp()
    rule = f"give plans of finite mass in {plan.dtype}, which grow with exp(-cost / epsilon)"
    fits = not problem.eager or bool(plan.isfinite().all())
    check.require(fits, "cost", rule, "costs that are too large or too far below 0")
    a, b = problem.a * (for_a * -(y + shift)).exp(), problem.b * (for_b * (shift - x)).exp()
    return Solution(plan, violation(plan, problem._replace(a=a, b=b, rows_exact=True)), iterations)
