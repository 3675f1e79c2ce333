"""Newton's method for FedOTP's transport problem, on the few column duals."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fedprompt.interfaces import Coupling
from fedprompt.transport._dual import FARTHEST, NEAR, demand, evaluate
from fedprompt.transport._fused import fits, fused_steps
from fedprompt.transport._line_search import climb
from fedprompt.transport._problem import Problem, check_options, couple, violation

PLAIN_STEPS = 12  # a problem that needs more goes to the line search
COMPILED_STEPS = 8  # costs of cosines at SMOOTH or more need no more for masses up to 0.95
SMOOTH = 0.05  # compiled: from this epsilon on, fewer steps are enough for costs of cosines


def newton(
    cost: Float[Tensor, "*batch rows columns"],
    a: Float[Tensor, "*#batch rows"],
    b: Float[Tensor, "*#batch columns"],
    *,
    epsilon: float = 0.1,
    tolerance: float = 1e-5,
    max_iterations: int = 100,
) -> Coupling:
    r"""Solve FedOTP's transport problem: rows give at most what they have, columns take exactly what they need.

    .. math:: \min_T \; \langle C, T \rangle + \epsilon \langle T, \log T \rangle
              \quad \text{with} \quad T \mathbf 1 \le a, \; T^\top \mathbf 1 = b, \; T \ge 0

    Only the column duals are unknown: each row follows from them in closed form. Newton's method on these few numbers needs 3 to 15
    passes over the cost where FedOTP's own alternation (:func:`dykstra`) needs 10 to some thousand. Problems that do not converge at once
    get a line search in float64. On NVIDIA GPUs small problems take their first steps in one fused kernel.

    A problem's plan depends neither on its companions in the batch nor on a constant added to its cost. A row of mass 0 gives nothing.
    With ``b.sum() == a.sum()`` all rows are full, which is :func:`sinkhorn`'s problem. Costs of a half precision, and everything under
    autocast, are solved in float32.

    Args:
        cost: One problem for each leading index; finite.
        a: Mass of the rows, at least 0.
        b: Mass of the columns, above 0; sums to at most the sum of `a`.
        epsilon: Weight of the entropy, above 0; the smaller, the closer to the linear program. The paper's is 0.1.
        tolerance: Largest relative violation of a marginal at which a problem counts as solved; below what the dtype resolves, the
            latter is meant.
        max_iterations: Most evaluations for one problem. What was reached stands in the result's `error`: at an `epsilon` of 0.001, costs
            spread over [0, 2] and a mass of 0.999 or more, up to 7 problems in 100 need more, and 200 were enough. Under
            ``torch.compile`` no value is checked and the number of steps is fixed, without a line search: 8 for an `epsilon` of at least
            0.05, otherwise 12 (both at most this). For 49 or 196 rows and 2 or 4 columns, 8 leave errors up to 2e-5 where costs of one
            problem scatter like cosines of CLIP's features (standard deviation 0.035 to 0.12) and masses are at most 0.95. Costs spread
            over all of [0, 2] are left with errors up to 1e-3 at `epsilon` 0.1 and mass 0.8, and an `epsilon` of 0.01 with plans that
            may be NaN: read `error`, or solve those outside of the compiled part.

    Returns:
        The plan, without a graph and in float32 at least, with each problem's violation and number of evaluations.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If shapes disagree, a mass or hyper-parameter lies outside its range, or a cost is not finite; names the problems.

    Example:
        Four patches with a quarter each, two prompts that take 0.4 each: every prompt finds the patches close to it.

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

    def kernel(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
        solution = solve(problem, epsilon=epsilon, tolerance=tolerance, max_iterations=max_iterations)
        return solution.plan, solution.error, solution.iterations

    return couple(cost, a, b, kernel)


class Solution(NamedTuple):
    """What :func:`solve` finds; ``plan_at(problem, duals, epsilon)`` is the plan again.

    Attributes:
        plan: ``(problems, columns, rows)``.
        duals: ``(problems, columns)``, log v for costs counted from each column's least.
        error: ``(problems,)``.
        iterations: ``(problems,)``.
    """

    plan: Tensor
    duals: Tensor
    error: Tensor
    iterations: Tensor


def solve(problem: Problem, *, epsilon: float, tolerance: float, max_iterations: int) -> Solution:
    """Take plain steps, and lead the problems that need more through the line search."""
    tolerance = max(tolerance, 8 * torch.finfo(problem.cost.dtype).eps)
    steps = min(max_iterations, PLAIN_STEPS if problem.eager or epsilon < SMOOTH else COMPILED_STEPS)
    take_steps = fused_steps if fits(problem) else _plain_steps
    plan, v, iterations, error = take_steps(problem, epsilon=epsilon, tolerance=tolerance, max_iterations=steps)
    duals = v.log()
    if problem.eager and max_iterations > steps:
        left = torch.nonzero(~(error <= tolerance)).flatten()
        if len(left):
            rest = problem.take(left)
            plan[left], duals[left], more = climb(
                rest, v[left], epsilon=epsilon, tolerance=tolerance, max_iterations=max_iterations - steps
            )
            iterations[left] += more
            error[left] = violation(plan[left], rest)
    return Solution(plan, duals, error, iterations)


def _plain_steps(problem: Problem, *, epsilon: float, tolerance: float, max_iterations: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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
    return plan, v, iterations, ((plan.sum(2) - problem.b) / problem.b).abs().amax(1)  # rows hold by construction, to rounding
