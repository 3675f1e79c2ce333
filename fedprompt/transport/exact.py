"""Reference solvers: the exact linear program (epsilon = 0), and the independent coupling."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from fedprompt.interfaces import Coupling
from fedprompt.transport._problem import Problem, Solution, couple, violation


def exact(
    cost: Float[Tensor, "*batch rows columns"],
    a: Float[Tensor, "*#batch rows"],
    b: Float[Tensor, "*#batch columns"],
) -> Coupling:
    r"""Solve the linear program that :func:`newton` approaches as `epsilon` goes to 0, by POT's network simplex.

    .. math:: \min_T \; \langle C, T \rangle \quad \text{with} \quad T \mathbf 1 \le a, \; T^\top \mathbf 1 = b, \; T \ge 0

    What the rows keep goes to one more column of cost 0. One problem after the other, on the CPU: for evaluation and tests.

    Args:
        cost: One problem for each leading index; finite.
        a: Mass of the rows, at least 0.
        b: Mass of the columns, above 0; sums to at most the sum of `a`.

    Returns:
        A plan, without a graph and in float32 at least, with each problem's violation; POT does not count its iterations, so they are 0.

    Raises:
        ValueError: If shapes disagree, a mass lies outside its range, or a cost is not finite; names the problems.

    Example:
        The cheapest half of the rows is enough.

        >>> exact(torch.tensor([[0.3], [0.1], [0.2], [0.4]]), torch.full((4,), 0.25), torch.tensor([0.5])).plan.flatten()
        tensor([0.0000, 0.2500, 0.2500, 0.0000])

    References:
        Bonneel et al., "Displacement Interpolation Using Lagrangian Mass Transport", SIGGRAPH Asia 2011.
    """
    return couple(cost, a, b, _simplex, epsilon=0.0)


def _simplex(problem: Problem) -> Solution:
    import ot

    plans = []
    parts = (part.double().cpu() for part in (problem.cost, problem.a, problem.b))
    for cost, a, b in zip(*parts, strict=True):
        total = 2 ** a.sum().log2().round()  # POT expects masses that sum to about 1
        a, b = a / total, b / total
        kept = (a.sum() - b.sum()).clamp(min=0)
        masses = torch.cat([b, kept[None]])
        padded = torch.cat([cost, torch.zeros_like(cost[:1])]).T.contiguous()
        plan = ot.emd((a * (masses.sum() / a.sum())).numpy(), masses.numpy(), padded.numpy())
        plans.append(total * torch.from_numpy(plan)[:, :-1].T)
    plan = torch.stack(plans) if plans else problem.cost
    return _at_once(plan.to(problem.cost), problem)


def independent(
    cost: Float[Tensor, "*batch rows columns"],
    a: Float[Tensor, "*#batch rows"],
    b: Float[Tensor, "*#batch columns"],
) -> Coupling:
    r"""Give every column the same share of every row, :math:`T = a b^\top / \sum a`, whatever the cost.

    As the solver of :func:`transport_logits` it averages similarities: FedOTP's ablation without transport. It is the
    limit of :func:`newton` for a growing `epsilon` where all rows have the same mass, or where the columns take all of
    it. Otherwise that limit is another plan, in which small rows are full and large ones are not.

    Args:
        cost: One problem for each leading index; finite.
        a: Mass of the rows, at least 0.
        b: Mass of the columns, above 0; sums to at most the sum of `a`.

    Returns:
        The plan, without a graph and in float32 at least, after 0 iterations.

    Raises:
        ValueError: If shapes disagree, a mass lies outside its range, or a cost is not finite; names the problems.

    Example:
        >>> independent(torch.rand(2, 2), torch.tensor([0.25, 0.75]), torch.tensor([0.4, 0.4])).plan
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
