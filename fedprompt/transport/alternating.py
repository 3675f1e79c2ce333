"""Alternating row and column scaling: the algorithm of FedOTP, and Sinkhorn's algorithm."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from fedprompt.interfaces import Coupling
from fedprompt.transport._problem import Problem, Solution, couple_entropic, violation

_COMPILED_STEPS = 32
"""Number of iterations under ``torch.compile``, where values cannot be read."""


def dykstra(
    cost: Float[Tensor, "*batch rows columns"],
    a: Float[Tensor, "*#batch rows"],
    b: Float[Tensor, "*#batch columns"],
    *,
    epsilon: float = 0.1,
    tolerance: float = 1e-5,
    max_iterations: int = 1000,
) -> Coupling:
    r"""Solve the problem of :func:`newton` by the algorithm in the FedOTP paper.

    Each iteration scales overfull rows down, and then scales columns to their mass:

    .. math:: u \leftarrow \min(a / (K v), 1), \qquad v \leftarrow b / (K^\top u), \qquad
              K = e^{-C / \epsilon}

    The loop runs in the log domain, so a small `epsilon` does not underflow. A problem stops when
    no column's v changes by more than `tolerance`, relatively. (The published code compares the
    mean of absolute changes over the batch, which depends on the size of the cost.) Convergence
    slows down as ``b.sum()`` approaches ``a.sum()``. At equality all rows are full, and the minimum
    is left out.

    Use this solver for comparisons and tests. :func:`newton` finds the same plan in fewer
    iterations.

    Args:
        cost: Cost of each pair of row and column, finite. Leading axes index problems.
        a: Mass of the rows, at least 0.
        b: Mass of the columns, above 0. Its sum is at most the sum of `a`.
        epsilon: Factor of the entropy, above 0. The paper uses 0.1.
        tolerance: Largest relative change of a column's scale at which a problem stops, above 0.
        max_iterations: Maximum number of iterations for one problem, at least 1. Under
            ``torch.compile`` there are exactly 32 iterations, or `max_iterations` if that is less.

    Returns:
        Plan without a graph and in float32 at least, with the violation and the number of
        iterations of each problem.
        Columns hold up to rounding errors of about ``cost / epsilon`` units in the last place.
        `error` includes these.

    Raises:
        ValueError: If shapes disagree, a mass or hyper-parameter lies outside its range, or a cost
            is not finite. The message names the problems.

    Example:
        >>> from fedprompt.transport import newton
        >>> cost = torch.tensor([[0.1, 0.9], [0.2, 0.9], [0.9, 0.1], [0.9, 0.2]])
        >>> a, b = torch.full((4,), 0.25), torch.full((2,), 0.4)
        >>> torch.allclose(dykstra(cost, a, b).plan, newton(cost, a, b).plan, atol=1e-5)
        True

    References:
        Li et al., "Global and Local Prompts Cooperation via Optimal Transport for Federated
        Learning" (FedOTP), CVPR 2024, Algorithm 1.
    """
    return couple_entropic(cost, a, b, _solve, epsilon, tolerance, max_iterations)


def sinkhorn(
    cost: Float[Tensor, "*batch rows columns"],
    a: Float[Tensor, "*#batch rows"],
    b: Float[Tensor, "*#batch columns"],
    *,
    epsilon: float = 0.1,
    tolerance: float = 1e-5,
    max_iterations: int = 1000,
) -> Coupling:
    r"""Solve entropic transport of equal masses by Sinkhorn's algorithm, in the log domain.

    .. math:: \min_T \; \langle C, T \rangle + \epsilon \langle T, \log T \rangle
              \quad \text{with} \quad T \mathbf 1 = a, \; T^\top \mathbf 1 = b

    Args:
        cost: Cost of each pair of row and column, finite. Leading axes index problems.
        a: Mass of the rows, at least 0.
        b: Mass of the columns, above 0. Its sum is the sum of `a`.
        epsilon: Factor of the entropy, above 0.
        tolerance: Largest relative change of a column's scale at which a problem stops, above 0.
        max_iterations: Maximum number of iterations for one problem, at least 1. Under
            ``torch.compile`` there are exactly 32 iterations, or `max_iterations` if that is less.

    Returns:
        Plan without a graph and in float32 at least, with the violation and the number of
        iterations of each problem.
        Columns hold up to rounding, as for :func:`dykstra`.

    Raises:
        ValueError: If shapes or masses disagree, a mass or hyper-parameter lies outside its range,
            or a cost is not finite. The message names the problems.

    Example:
        >>> a, b = torch.tensor([0.3, 0.7]), torch.tensor([0.5, 0.5])
        >>> plan = sinkhorn(torch.eye(2), a, b).plan
        >>> plan.sum(0), plan.sum(1)
        (tensor([0.5000, 0.5000]), tensor([0.3000, 0.7000]))

    References:
        Cuturi, "Sinkhorn Distances: Lightspeed Computation of Optimal Transport", NeurIPS 2013.
    """
    return couple_entropic(cost, a, b, _solve, epsilon, tolerance, max_iterations, rows_exact=True)


def _solve(problem: Problem, *, epsilon: float, tolerance: float, max_iterations: int) -> Solution:
    """Scale rows and columns to their masses in turn.

    Rows are scaled up only if they are exact or all rows are full. Columns are scaled last, so they
    hold up to rounding. A problem stops when no column's scale changes by more than `tolerance`,
    relatively. Its rows then exceed their masses by at most this fraction. All rows start at scale
    1, so a constant added to the cost does not change the result.
    """
    least = problem.cost.amin((1, 2), keepdim=True)
    exponent = (least - problem.cost) / epsilon
    log_a, log_b = problem.a.log(), problem.b.log()
    cap = torch.where(problem.full | problem.rows_exact, math.inf, 0.0).to(log_a.dtype)
    x = log_b - exponent.logsumexp(2)
    row_scale = torch.zeros_like(log_a)
    active = torch.ones_like(problem.full[:, 0])
    iterations = torch.zeros_like(active, dtype=torch.int64)
    for _ in range(max_iterations if problem.eager else min(max_iterations, _COMPILED_STEPS)):
        scaled = torch.minimum(log_a - (exponent + x[..., None]).logsumexp(1), cap)
        row_scale = torch.where(active[:, None], scaled, row_scale)
        new = torch.where(active[:, None], log_b - (exponent + row_scale[:, None]).logsumexp(2), x)
        change = (new - x).abs().amax(1)
        x = new
        iterations += active
        active = active & ~(change <= tolerance)
        if problem.eager and not bool(active.any()):
            break
    plan = (exponent + row_scale[:, None] + x[..., None]).exp()
    # Duals refer to costs minus the smallest cost of their column.
    duals = x + (least[..., 0] - problem.cost.amin(2)) / epsilon
    return Solution(plan, violation(plan, problem), iterations, duals)
