"""Keys for a whole batch at once, so that all of them get their share of it."""

import torch
from jaxtyping import Float, Real
from torch import Tensor

from fedprompt._checks import kind, wrong_type
from fedprompt.interfaces import Selection, TransportSolver
from fedprompt.selection._cosine import check_pair, cosines, shares


@torch.no_grad()
def select_balanced(
    query: Float[Tensor, "batch dim"],
    keys: Float[Tensor, "groups dim"],
    *,
    usage: Real[Tensor, " groups"] | None = None,
    solver: TransportSolver,
) -> Selection:
    r"""Deal a batch to the keys by optimal transport: each query as close to its key as a fair share for every group allows.

    .. math:: g(h_i) = \arg\max_g \; T_{ig}, \qquad T = \arg\min_T \langle 1 - \cos(h, k), T \rangle + \dots \quad \text{with} \quad
              T \mathbf 1 = \tfrac 1B \mathbf 1, \quad T^\top \mathbf 1 = b, \qquad b_g \propto \frac{1}{1 + G q_g}

    with the shares :math:`q` of :func:`select_nearest`. Without counts, or with equal ones, each of the :math:`G` groups takes
    :math:`1/G` of the batch. Otherwise a group takes the less the more it was used, but never nothing, and never more than
    :math:`2/G`: an unused group cannot swallow a batch. A choice depends on the batch, and a batch that holds one kind of sample alone is
    dealt out nevertheless: use it where batches are mixed, and :func:`select_nearest` otherwise.

    Args:
        query: Features of the unprompted backbone.
        keys: One for each group; only directions matter, here and in `query`.
        usage: How often each group was chosen so far, in any unit.
        solver: Transport solver with its options bound, such as ``partial(sinkhorn, epsilon=0.05)``.
            With :func:`exact`, each group receives exactly its share if all shares are whole
            numbers of samples. Otherwise the plan splits at most :math:`G - 1` samples between
            groups. A split sample goes to the group of its largest part, so a group can be
            fewer than :math:`G - 1` samples away from its share. Choices from the plan of an
            entropic solver are approximately even.

    Returns:
        The choices and their cosines, without a graph and in float32 at least.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: As in :func:`select_nearest`, and what the solver refuses.

    Example:
        Three of four queries are closer to key 0; one of them gives way.

        >>> from fedprompt import select_nearest
        >>> from fedprompt.transport import exact
        >>> query = torch.tensor([[1.0, 0.0], [1.0, 0.2], [1.0, 0.4], [0.0, 1.0]])
        >>> select_nearest(query, torch.eye(2)).indices, select_balanced(query, torch.eye(2), solver=exact).indices
        (tensor([0, 0, 0, 1]), tensor([0, 0, 1, 1]))

    References:
        Caron et al., "Unsupervised Learning of Visual Features by Contrasting Cluster Assignments", NeurIPS 2020, Sec. 3.1, for the
        transport problem with equal shares; how counts move the shares is this library's own.
    """
    if not callable(solver):
        raise wrong_type("solver", "be a transport solver, such as `exact`", kind(solver))
    check_pair(query, keys)
    similarity = cosines(query, keys)
    batch, groups = similarity.shape
    room = 1 / (1 + groups * shares(usage, similarity))
    room = room / room.max()  # exactly 1 for equal counts, see select_nearest
    rows = similarity.new_full((batch,), 1 / max(batch, 1))
    plan = solver(1 - similarity, rows, room / room.sum()).plan if batch else similarity
    indices = plan.argmax(1)
    return Selection(indices, similarity.gather(1, indices[:, None])[:, 0])
