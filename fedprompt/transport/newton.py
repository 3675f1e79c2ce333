"""Newton's method for FedOTP's transport problem, on the few column duals."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from fedprompt.interfaces import Coupling
from fedprompt.transport._dual import FARTHEST, NEAR, climb, demand, evaluate
from fedprompt.transport._problem import Problem, Solution, couple_entropic, resolution, violation

_PLAIN_STEPS = 12
"""Number of steps before a problem goes to the line search; under ``torch.compile``, all steps."""

_COMPILED_STEPS = 8
"""Number of steps under ``torch.compile`` if epsilon is at least `_SMOOTH`.

docs/reference/transport.md has the errors that these steps leave.
"""

_SMOOTH = 0.05
"""Smallest epsilon for which `_COMPILED_STEPS` are enough."""


def newton(
    cost: Float[Tensor, "*batch rows columns"],
    a: Float[Tensor, "*#batch rows"],
    b: Float[Tensor, "*#batch columns"],
    *,
    epsilon: float = 0.1,
    tolerance: float = 1e-5,
    max_iterations: int = 100,
) -> Coupling:
    r"""Solve FedOTP's transport problem: rows give at most `a`, columns take exactly `b`.

    .. math:: \min_T \; \langle C, T \rangle + \epsilon \langle T, \log T \rangle
              \quad \text{with} \quad
              T \mathbf 1 \le a, \; T^\top \mathbf 1 = b, \; T \ge 0

    Newton's method runs on the column duals, from which the plan follows in closed form. It needs
    fewer passes over the cost than FedOTP's own algorithm (:func:`dykstra`). Problems that do not
    converge within 12 steps continue with a line search in float64.

    The plan of a problem is independent of the rest of the batch and of a constant added to its
    cost. The plan of a row with mass 0 is 0. If ``b.sum() == a.sum()``, all rows are full, as in
    :func:`sinkhorn`. Half-precision costs are solved in float32, also under autocast.

    Under ``torch.compile`` values are not checked, there is no line search, and the number of steps
    is fixed, at most 12. Check the `error` of the result there, in particular for an `epsilon`
    below 0.05.

    Args:
        cost: Cost of each pair of row and column, finite. Leading axes index problems.
        a: Mass of the rows, at least 0.
        b: Mass of the columns, above 0. Its sum is at most the sum of `a`.
        epsilon: Factor of the entropy, above 0. A smaller one gives a plan closer to that of the
            linear program. The paper uses 0.1.
        tolerance: Largest relative violation of a marginal at which a problem counts as solved,
            above 0. Values below the resolution of the dtype are raised to it.
        max_iterations: Maximum number of evaluations for one problem, at least 1. A problem that
            needs more returns its last plan, with the `error` of that plan.

    Returns:
        Plan without a graph and in float32 at least, with the violation and the number of
        evaluations of each problem.

    Raises:
        ValueError: If shapes disagree, a mass or hyper-parameter lies outside its range, or a cost
            is not finite. The message names the problems.

    Example:
        Four patches have a quarter each, and two prompts take 0.4 each. Every prompt takes the
        patches that are close to it.

        >>> cost = torch.tensor([[0.1, 0.9], [0.2, 0.9], [0.9, 0.1], [0.9, 0.2]])
        >>> coupling = newton(cost, torch.full((4,), 0.25), torch.full((2,), 0.4))
        >>> coupling.plan.sum(0)
        tensor([0.4000, 0.4000])
        >>> coupling.plan.sum(1).max() <= 0.25 + 1e-6
        tensor(True)

    References:
        Li et al., "Global and Local Prompts Cooperation via Optimal Transport for Federated
        Learning" (FedOTP), CVPR 2024, Eq. 7.
    """
    return couple_entropic(cost, a, b, _solve, epsilon, tolerance, max_iterations)


def _solve(problem: Problem, *, epsilon: float, tolerance: float, max_iterations: int) -> Solution:
    """Run plain steps, and solve the remaining problems by the line search."""
    tolerance = max(tolerance, resolution(problem.cost.dtype))
    steps = _PLAIN_STEPS if problem.eager or epsilon < _SMOOTH else _COMPILED_STEPS
    steps = min(max_iterations, steps)
    plan, v, iterations, error = _plain_steps(
        problem, epsilon=epsilon, tolerance=tolerance, max_iterations=steps
    )
    duals = v.log()
    if problem.eager and max_iterations > steps:
        left = torch.nonzero(~(error <= tolerance)).flatten()
        if len(left):
            rest = problem.take(left)
            steps_left = max_iterations - steps
            plan[left], duals[left], more = climb(
                rest, v[left], epsilon=epsilon, tolerance=tolerance, max_iterations=steps_left
            )
            iterations[left] += more
            error[left] = violation(plan[left], rest)
    return Solution(plan, error, iterations, duals)


def _plain_steps(
    problem: Problem, *, epsilon: float, tolerance: float, max_iterations: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run Newton steps without a line search; return plan, v, evaluations and error.

    A step is ``v * (1 + d)``, or ``v / (1 - d)`` if d is negative. The first v is the solution with
    all rows slack, a lower bound of the true one. Each column of the kernel is scaled to a maximum
    of 1. A problem with a small error takes one more step, which squares the error, and then stops.
    """
    kernel = (problem.cost - problem.cost.amin(2, keepdim=True)).mul_(-1 / epsilon).exp_()
    v = problem.b / kernel.sum(2)
    cap = torch.where(problem.full, math.inf, 1.0).to(v.dtype)
    near = NEAR * tolerance**0.5
    active = torch.ones_like(cap[:, 0], dtype=torch.bool)
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
    # Rows hold by construction, up to rounding.
    error = ((plan.sum(2) - problem.b) / problem.b).abs().amax(1)
    return plan, v, iterations, error
