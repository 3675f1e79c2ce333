"""Classical entropic transport: both marginals hold."""

from functools import partial

from jaxtyping import Float
from torch import Tensor

from fedprompt.interfaces import Coupling
from fedprompt.transport._alternation import alternate
from fedprompt.transport._problem import check_options, couple


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
        cost: One problem for each leading index; finite.
        a: Mass of the rows, at least 0.
        b: Mass of the columns, above 0; sums to the sum of `a`.
        epsilon: Weight of the entropy, above 0.
        tolerance: Largest relative change of a column's scale at which a problem rests.
        max_iterations: Most iterations for one problem; under ``torch.compile`` 32 (at most this) are run, whatever the change.

    Returns:
        Plan without a graph and in float32 at least, with the violation and the number of iterations of each problem.
        Columns hold up to rounding, as for :func:`dykstra`.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If shapes or masses disagree, a mass or hyper-parameter lies outside its range, or a cost is not finite; names the
            problems.

    Example:
        >>> plan = sinkhorn(torch.eye(2), torch.tensor([0.3, 0.7]), torch.tensor([0.5, 0.5])).plan
        >>> plan.sum(0), plan.sum(1)
        (tensor([0.5000, 0.5000]), tensor([0.3000, 0.7000]))

    References:
        Cuturi, "Sinkhorn Distances: Lightspeed Computation of Optimal Transport", NeurIPS 2013.
    """
    check_options(epsilon, tolerance, max_iterations)
    solve = partial(alternate, epsilon=epsilon, tolerance=tolerance, max_iterations=max_iterations, rows_exact=True)
    return couple(cost, a, b, solve, rows_exact=True)
