"""FedOTP's own algorithm for its transport problem."""

from functools import partial

from jaxtyping import Float
from torch import Tensor

from fedprompt.interfaces import Coupling
from fedprompt.transport._alternation import alternate
from fedprompt.transport._problem import check_options, couple


def dykstra(
    cost: Float[Tensor, "*batch rows columns"],
    a: Float[Tensor, "*#batch rows"],
    b: Float[Tensor, "*#batch columns"],
    *,
    epsilon: float = 0.1,
    tolerance: float = 1e-5,
    max_iterations: int = 1000,
) -> Coupling:
    r"""Solve the problem of :func:`newton` by the algorithm that FedOTP prints: scale full rows down, then columns to their mass.

    .. math:: u \leftarrow \min(a / (K v), 1), \qquad v \leftarrow b / (K^\top u), \qquad K = e^{-C / \epsilon}

    in the log domain, so that a small `epsilon` neither underflows nor stops too late. Each problem stops by itself, when no column's v
    changes by more than `tolerance` relatively; the published code compares the batch mean of absolute changes, which depends on the size
    of the cost. The closer the masses, the slower: some thousand iterations shortly before ``b.sum() == a.sum()``. There all rows are full
    and the minimum is dropped. For comparison and tests; :func:`newton` finds the same plan faster.

    Args:
        cost: One problem for each leading index; finite.
        a: Mass of the rows, at least 0.
        b: Mass of the columns, above 0; sums to at most the sum of `a`.
        epsilon: Weight of the entropy, above 0; the paper's is 0.1.
        tolerance: Largest relative change of a column's scale at which a problem rests.
        max_iterations: Most iterations for one problem; under ``torch.compile`` 32 (at most this) are run, whatever the change.

    Returns:
        Plan without a graph and in float32 at least, with the violation and the number of iterations of each problem.
        Columns hold up to rounding, which a small `epsilon` magnifies: by about ``cost / epsilon`` units in the last
        place. `error` includes it.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If shapes disagree, a mass or hyper-parameter lies outside its range, or a cost is not finite; names the problems.

    Example:
        >>> cost = torch.tensor([[0.1, 0.9], [0.2, 0.9], [0.9, 0.1], [0.9, 0.2]])
        >>> a, b = torch.full((4,), 0.25), torch.full((2,), 0.4)
        >>> torch.allclose(dykstra(cost, a, b).plan, newton(cost, a, b).plan, atol=1e-5)
        True

    References:
        Li et al., "Global and Local Prompts Cooperation via Optimal Transport for Federated Learning", CVPR 2024, Algorithm 1.
    """
    check_options(epsilon, tolerance, max_iterations)
    solve = partial(alternate, epsilon=epsilon, tolerance=tolerance, max_iterations=max_iterations, rows_exact=False)
    return couple(cost, a, b, solve)
