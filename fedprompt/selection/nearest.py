"""Selection of the nearest key, with a penalty on keys that were selected often."""

from __future__ import annotations

import torch
from jaxtyping import Float, Real
from torch import Tensor

import fedprompt._refusals as check
from fedprompt._cosine import cosines
from fedprompt.interfaces import Selection
from fedprompt.selection._inputs import check_pair, shares


@torch.no_grad()
def select_nearest(
    query: Float[Tensor, "batch dim"],
    keys: Float[Tensor, "groups dim"],
    *,
    usage: Real[Tensor, " groups"] | None = None,
    offset: float = 5e-4,
) -> Selection:
    r"""Select the nearest key; during training, prefer keys that were used less often.

    .. math:: g(h) = \arg\min_g \; \big(1 - \cos(h, k_g)\big) \, (q_g + \text{offset}), \qquad
              q_g = v_g \,\big/ \textstyle\sum_j v_j

    with the counts :math:`v`. With equal counts, the key with the largest cosine is selected. Eq. 6
    of the paper has no offset, so a single unused group takes every sample, whatever its cosine.
    Ties go to the lower index.

    Args:
        query: Features of the unprompted backbone.
        keys: Keys, one for each group. Only directions matter, here and in `query`.
        usage: Number of previous selections of each group, in any unit. None at inference.
        offset: Number added to each share, above 0. The default is taken from the authors' code.
            With a larger offset, counts have less influence.

    Returns:
        Selected keys and their cosines, without a graph and in float32 at least.

    Raises:
        ValueError: If shapes or devices disagree, there is no group, or `offset` is not above 0. On
            a CPU and outside of ``torch.compile``, also if an entry is NaN or infinite or a count
            is negative.

    Example:
        A query close to key 0 is assigned to key 1 when key 0 was selected often.

        >>> query, keys = torch.tensor([[1.0, 0.9]]), torch.eye(2)
        >>> select_nearest(query, keys).indices
        tensor([0])
        >>> select_nearest(query, keys, usage=torch.tensor([90, 10])).indices
        tensor([1])

    References:
        Deng et al., "Unlocking the Potential of Prompt-Tuning in Bridging Generalized and
        Personalized Federated Learning" (SGPT), CVPR 2024, Eqs. 5 and 6.
    """
    check.factor("offset", offset, above=0)
    check_pair(query, keys)
    similarity = cosines(query, keys)
    crowding = shares(usage, similarity) + offset
    # Divided by the largest, equal counts become exactly 1, so rounding cannot change a choice.
    distance = (1 - similarity).clamp(min=0)  # a rounded cosine may be above 1
    indices = (distance * (crowding / crowding.max())).argmin(1)
    return Selection(indices, similarity.gather(1, indices[:, None])[:, 0])
