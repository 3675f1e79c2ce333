"""Newton's method for FedOTP's transport problem, on the few column duals."""

import math
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from fedprompt.interfaces import Coupling
from fedprompt.transport._dual import FARTHEST, NEAR, climb, demand, evaluate
from fedprompt.transport._fused import fits, fused_steps
from fedprompt.transport._problem import (
    Problem,
    Solution,
    check_flag,
    check_options,
    couple,
    violation,
)

PLAIN_STEPS = 12  # a problem that needs more goes to the line search
COMPILED_STEPS = (
    8  # when compiled, for an epsilon of at least SMOOTH; docs/api/transport.md has the errors
)
SMOOTH = 0.05


def newton(
    cost: Float[Tensor, "*batch rows columns"],
    a: Float[Tensor, "*#batch rows"],
    b: Float[Tensor, "*#batch columns"],
    *,
    epsilon: float = 0.1,
    tolerance: float = 1e-5,
    max_iterations: int = 100,
    fused: bool = False,
) -> Coupling:
    r"""Solve FedOTP's transport problem: rows give at most `a`, columns take exactly `b`.

    .. math:: \min_T \; \langle C, T \rangle + \epsilon \langle T, \log T \rangle
              \quad \text{with} \quad T \mathbf 1 \le a, \; T^\top \mathbf 1 = b, \; T \ge 0

    Only the column duals are unknown: each row follows from them in closed form. Newton's method on these few numbers
    needs far fewer passes over the cost than FedOTP's own alternation (:func:`dykstra`). Problems that do not converge
    at once get a line search in float64. How many passes are needed depends on `epsilon` and on ``b.sum() / a.sum()``;
    the documentation of this package has a table.

    The plan of a problem is independent of the rest of the batch and of a constant added to its cost. A row of mass 0
    gives nothing. With ``b.sum() == a.sum()`` all rows are full, as in :func:`sinkhorn`. Half-precision costs are solved
    in float32, also under autocast.

    Args:
        cost: One problem for each leading index; finite.
        a: Mass of the rows, at least 0.
        b: Mass of the columns, above 0. Its sum is at most the sum of `a`.
        epsilon: Weight of the entropy, above 0. The smaller, the closer to the linear program. The paper's is 0.1.
        tolerance: Largest relative violation of a marginal at which a problem counts as solved. Values below the
            resolution of the dtype are raised to it.
        max_iterations: Maximum number of evaluations for one problem. A problem that needs more keeps what it reached,
            and its `error` says how far that is. Under ``torch.compile`` no value is checked, there is no line search,
            and the number of steps is fixed (at most 12): check `error` there, in particular for an `epsilon` below
            0.05.
        fused: Whether small float32 problems on an NVIDIA GPU take their first steps in one Triton kernel. Elsewhere
            the argument has no effect. The kernel has not been run on a GPU yet.

    Returns:
        Plan without a graph and in float32 at least, with the violation and the number of evaluations of each problem.

    Raises:
        ValueError: If shapes disagree, a mass or hyper-parameter lies outside its range, or a cost is not finite. The
            message names the problems.

    Example:
        Four patches have a quarter each, and two prompts take 0.4 each. Every prompt finds the patches close to it.

        >>> cost = torch.tensor([[0.1, 0.9], [0.2, 0.9], [0.9, 0.1], [0.9, 0.2]])
        >>> coupling = newton(cost, torch.full((4,), 0.25), torch.full((2,), 0.4))
        >>> coupling.plan.sum(0)
        tensor([0.4000, 0.4000])
        >>> coupling.plan.sum(1).max() <= 0.25 + 1e-6
        tensor(True)

    References:
        Li et al., "Global and Local Prompts Cooperation via Optimal Transport for Federated Learning", CVPR 2024, Eq. 7.
    """
    check_options(epsilon, tolerance, max_iterations)
    check_flag("fused", fused)
    solver = partial(
        _solve, epsilon=epsilon, tolerance=tolerance, max_iterations=max_iterations, fused=fused
    )
    return couple(cost, a, b, solver, epsilon=epsilon)


def _solve(
    problem: Problem, *, epsilon: float, tolerance: float, max_iterations: int, fused: bool
) -> Solution:
    """Take plain steps, and lead the problems that need more through the line search."""
    tolerance = max(tolerance, 8 * torch.finfo(problem.cost.dtype).eps)
    steps = min(
        max_iterations, PLAIN_STEPS if problem.eager or epsilon < SMOOTH else COMPILED_STEPS
    )
    take_steps = fused_steps if fused and fits(problem) else _plain_steps
    plan, v, iterations, error = take_steps(
        problem, epsilon=epsilon, tolerance=tolerance, max_iterations=steps
    )
    duals = v.log()
    if problem.eager and max_iterations > steps:
        left = torch.nonzero(~(error <= tolerance)).flatten()
        if len(left):
            rest = problem.take(left)
            plan[left], duals[left], more = climb(
                rest,
                v[left],
                epsilon=epsilon,
                tolerance=tolerance,
                max_iterations=max_iterations - steps,
            )
            iterations[left] += more
            error[left] = violation(plan[left], rest)
    return Solution(plan, error, iterations, duals)


def _plain_steps(
    problem: Problem, *, epsilon: float, tolerance: float, max_iterations: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Newton steps ``v * (1 + d)``, or ``v / (1 - d)`` downwards, without a line search; return as :func:`fused_steps`.

    Starts where all rows are slack, which is below the solution, with a kernel whose columns each have 1 as the largest entry. A problem
    whose error is small takes the step it has just computed, which squares the error, and then rests.
    """
    kernel = (problem.cost - problem.cost.amin(2, keepdim=True)).mul_(-1 / epsilon).exp_()
    v = problem.b / kernel.sum(2)
    cap = torch.where(problem.full, math.inf, 1.0).to(v.dtype)
    active, near = torch.ones_like(cap[:, 0], dtype=torch.bool), NEAR * tolerance**0.5
    iterations = torch.zeros_like(active, dtype=torch.int64)
    for _ in range(max_iterations):
        now = evaluate(problem, kernel, v, cap)
        up, down = now.newton.clamp(0, FARTHEST), now.newton.clamp(-FARTHEST, 0)
        v = torch.where(active[:, None], torch.addcmul(v, v, up) / (1 - down), v)
        iterations += active
        active = active & (now.error > near)
        if problem.eager and not bool(active.any()):
            break
    scale = torch.minimum(problem.a / demand(kernel, v), cap)
    plan = kernel.mul_(scale[:, None]).mul_(v[..., None])
    return (
        plan,
        v,
        iterations,
        ((plan.sum(2) - problem.b) / problem.b).abs().amax(1),
    )  # rows hold by construction, to rounding
