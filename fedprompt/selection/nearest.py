"""The nearest key, with a handicap for those that many have chosen."""

import torch
from jaxtyping import Float, Real
from torch import Tensor

from fedprompt._checks import check_number
from fedprompt.interfaces import Selection
from fedprompt.selection._cosine import check_pair, cosines, shares


@torch.no_grad()
def select_nearest(
    query: Float[Tensor, "batch dim"],
    keys: Float[Tensor, "groups dim"],
    *,
    usage: Real[Tensor, " groups"] | None = None,
    offset: float = 5e-4,
) -> Selection:
    r"""Choose for each query the key of the largest cosine, or in training the one that is both close and little used (SGPT).

    .. math:: g(h) = \arg\min_g \; \big(1 - \cos(h, k_g)\big) \, (q_g + \text{offset}), \qquad q_g = v_g \,\big/ \textstyle\sum_j v_j

    with the counts :math:`v`. Equal counts, all zero or not, give exactly the plain cosine. The paper's Eq. 6 has no offset: its product
    is 0 for an unused group, whatever the cosine, so that one unused group takes every sample. With an offset, cosines
    decide among the unused groups. Ties go to the lower index.

    Args:
        query: Features of the unprompted backbone.
        keys: One for each group; only directions matter, here and in `query`.
        usage: How often each group was chosen so far, in any unit; None at inference.
        offset: Above 0; the default is that of the authors' code. The larger, the less usage counts.

    Returns:
        The choices and their cosines, without a graph and in float32 at least.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If shapes or devices disagree, there is no group, or `offset` is not above 0. On a CPU, where looking costs no sync and
            outside of ``torch.compile``, also if an entry is NaN or infinite or a count is negative.

    Example:
        A query that is close to key 0 goes to key 1 once key 0 is crowded.

        >>> query, keys = torch.tensor([[1.0, 0.9]]), torch.eye(2)
        >>> select_nearest(query, keys).indices, select_nearest(query, keys, usage=torch.tensor([90, 10])).indices
        (tensor([0]), tensor([1]))

    References:
        Deng et al., "Unlocking the Potential of Prompt-Tuning in Bridging Generalized and Personalized Federated Learning" (SGPT),
        CVPR 2024, Eqs. 5 and 6.
    """
    check_number("offset", offset, above=0)
    check_pair(query, keys)
    similarity = cosines(query, keys)
    crowding = shares(usage, similarity) + offset
    # Relative to the largest, equal counts are exactly 1: then rounding cannot turn a choice.
    indices = ((1 - similarity) * (crowding / crowding.max())).argmin(1)
    return Selection(indices, similarity.gather(1, indices[:, None])[:, 0])
