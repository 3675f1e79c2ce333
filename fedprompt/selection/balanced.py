"""Selection of keys for a whole batch at once, by optimal transport."""

from __future__ import annotations

import torch
from jaxtyping import Float, Real
from torch import Tensor

import fedprompt._refusals as check
from fedprompt._convergence import solved
from fedprompt._cosine import cosines
from fedprompt.interfaces import Selection, TransportSolver
from fedprompt.selection._inputs import check_pair, shares


@torch.no_grad()
def select_balanced(
    query: Float[Tensor, "batch dim"],
    keys: Float[Tensor, "groups dim"],
    *,
    usage: Real[Tensor, " groups"] | None = None,
    solver: TransportSolver,
) -> Selection:
    r"""Assign a batch to the keys by optimal transport, with a share of the batch for every group.

    .. math:: g(h_i) = \arg\max_g \; T_{ig}, \qquad
              T = \arg\min_T \langle 1 - \cos(h, k), T \rangle + \dots \quad \text{with} \quad
              T \mathbf 1 = \tfrac 1B \mathbf 1, \quad T^\top \mathbf 1 = b, \qquad
              b_g \propto \frac{1}{1 + G q_g}

    with the shares :math:`q` of :func:`select_nearest`. Without counts, each of the :math:`G`
    groups takes :math:`1/G` of the batch. Groups that were used more take less, but always more
    than 0 and at most :math:`2/G`.

    Use this rule if batches are mixed, and :func:`select_nearest` otherwise, because a batch with
    one kind of sample is spread over all groups as well.

    Args:
        query: Features of the unprompted backbone.
        keys: Keys, one for each group. Only directions matter, here and in `query`.
        usage: Number of previous selections of each group, in any unit.
        solver: Transport solver with its options bound, such as
            ``partial(sinkhorn, epsilon=0.05)``. With :func:`~fedprompt.transport.exact`, each group
            receives its share if all shares are whole numbers, and otherwise misses it by fewer
            than :math:`G - 1` samples. With an entropic solver, choices are approximately even.

    Returns:
        Selected keys and their cosines, without a graph and in float32 at least.

    Raises:
        ValueError: If shapes or devices disagree, there is no group, or the solver refuses the
            problem. On a CPU and outside of ``torch.compile``, also if an entry is NaN or infinite
            or a count is negative.

    Example:
        Three of four queries are closer to key 0. One of them is assigned to key 1.

        >>> from fedprompt.selection import select_nearest
        >>> from fedprompt.transport import exact
        >>> query = torch.tensor([[1.0, 0.0], [1.0, 0.2], [1.0, 0.4], [0.0, 1.0]])
        >>> select_nearest(query, torch.eye(2)).indices
        tensor([0, 0, 0, 1])
        >>> select_balanced(query, torch.eye(2), solver=exact).indices
        tensor([0, 0, 1, 1])

    References:
        Caron et al., "Unsupervised Learning of Visual Features by Contrasting Cluster Assignments",
        NeurIPS 2020, Sec. 3.1, for the transport problem with equal shares. The rule that derives
        shares from counts is specific to this library.
    """
    check.function("solver", solver, "be a transport solver, such as `exact`")
    check_pair(query, keys)
    similarity = cosines(query, keys)
    batch, groups = similarity.shape
    capacity = 1 / (1 + groups * shares(usage, similarity))
    capacity = capacity / capacity.max()  # exactly 1 for equal counts, as in select_nearest
    rows = similarity.new_full((batch,), 1 / max(batch, 1))
    if batch:
        coupling = solved(solver(1 - similarity, rows, capacity / capacity.sum()))
    indices = (coupling.plan if batch else similarity).argmax(1)
    return Selection(indices, similarity.gather(1, indices[:, None])[:, 0])
