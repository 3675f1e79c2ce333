"""Reference solvers: the exact linear program (epsilon = 0) and the independent coupling."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from fedprompt._random_streams import kept_streams
from fedprompt.interfaces import Coupling
from fedprompt.transport._problem import Problem, Solution, couple, violation


def exact(
    cost: Float[Tensor, "*batch rows columns"],
    a: Float[Tensor, "*#batch rows"],
    b: Float[Tensor, "*#batch columns"],
) -> Coupling:
    r"""Solve the linear program without entropy, by the network simplex algorithm of POT.

    .. math:: \min_T \; \langle C, T \rangle \quad \text{with} \quad
              T \mathbf 1 \le a, \; T^\top \mathbf 1 = b, \; T \ge 0

    The plans of :func:`newton` approach this optimum as `epsilon` goes to 0. Problems are solved
    one after the other, on the CPU. Use this solver for evaluation and tests.

    Args:
        cost: Cost of each pair of row and column, finite. Leading axes index problems.
        a: Mass of the rows, at least 0.
        b: Mass of the columns, above 0. Its sum is at most the sum of `a`.

    Returns:
        Plan without a graph and in float32 at least, with the violation of each problem. The number
        of iterations is 0, because POT does not return it.

    Raises:
        ValueError: If shapes disagree, a mass lies outside its range, or a cost is not finite. The
            message names the problems.

    Example:
        The column takes half of the mass, from the two cheapest rows.

        >>> cost = torch.tensor([[0.3], [0.1], [0.2], [0.4]])
        >>> exact(cost, torch.full((4,), 0.25), torch.tensor([0.5])).plan.flatten()
        tensor([0.0000, 0.2500, 0.2500, 0.0000])

    References:
        Bonneel et al., "Displacement Interpolation Using Lagrangian Mass Transport", SIGGRAPH Asia
        2011.
    """
    return couple(cost, a, b, _simplex, epsilon=0.0)


@cache
def _pot() -> Any:
    """Import POT, which takes a second and draws from Python's random stream."""
    with kept_streams():
        import ot
    return ot


def _simplex(problem: Problem) -> Solution:
    """Solve each problem with an extra column of cost 0 for the mass that the rows keep."""
    pot, plans = _pot(), []
    parts = (part.cpu().double() for part in (problem.cost, problem.a, problem.b))
    for cost, a, b in zip(*parts, strict=True):
        total = 2 ** a.sum().log2().round()  # POT expects masses that sum to about 1
        a, b = a / total, b / total
        unmoved = (a.sum() - b.sum()).clamp(min=0)
        masses = torch.cat([b, unmoved[None]])
        padded = torch.cat([cost, torch.zeros_like(cost[:1])]).T.contiguous()
        plan = pot.emd((a * (masses.sum() / a.sum())).numpy(), masses.numpy(), padded.numpy())
        plans.append(total * torch.from_numpy(plan)[:, :-1].T)
    plan = torch.stack(plans) if plans else problem.cost
    return _at_once(plan.to(problem.cost), problem)


def independent(
    cost: Float[Tensor, "*batch rows columns"],
    a: Float[Tensor, "*#batch rows"],
    b: Float[Tensor, "*#batch columns"],
) -> Coupling:
    r"""Compute the plan :math:`T = a b^\top / \sum a`, which ignores the cost.

    As the solver of :func:`~fedprompt.transport_logits` it averages similarities. This is FedOTP's
    ablation without transport. The plan is the limit of :func:`newton` for large `epsilon` if all
    rows have the same mass, or if the columns take the whole mass. Otherwise small rows are full in
    that limit and large ones are not.

    Args:
        cost: Cost of each pair of row and column, finite. Leading axes index problems.
        a: Mass of the rows, at least 0.
        b: Mass of the columns, above 0. Its sum is at most the sum of `a`.

    Returns:
        Plan without a graph and in float32 at least, after 0 iterations.

    Raises:
        ValueError: If shapes disagree, a mass lies outside its range, or a cost is not finite. The
            message names the problems.

    Example:
        >>> a, b = torch.tensor([0.25, 0.75]), torch.tensor([0.4, 0.4])
        >>> independent(torch.rand(2, 2), a, b).plan
        tensor([[0.1000, 0.1000],
                [0.3000, 0.3000]])
    """
    return couple(cost, a, b, _product, epsilon=math.inf)


def _product(problem: Problem) -> Solution:
    plan = problem.b[..., None] * (problem.a / problem.a.sum(1, keepdim=True))[:, None]
    return _at_once(plan, problem)


def _at_once(plan: Tensor, problem: Problem) -> Solution:
    iterations = torch.zeros(len(plan), dtype=torch.int64, device=plan.device)
    return Solution(plan, violation(plan, problem), iterations)
