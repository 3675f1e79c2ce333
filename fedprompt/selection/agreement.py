"""Agreement of selected groups with known ones."""

from jaxtyping import Real
from torch import Tensor

import fedprompt._conversions as convert


def clustering_accuracy(counts: Real[Tensor, "groups classes"]) -> float:
    """Compute the share of samples that are in the group matched to their class.

    Groups and classes are matched one to one, so that the share is as large as possible. A group
    or a class may stay without a match. In contrast to ``purity`` of :func:`selection_health`, two
    groups of one class do not both count.

    Args:
        counts: Table of groups and classes, as from :func:`fedprompt.metrics.contingency_table`.

    Returns:
        Share in [0, 1]. Without any sample, 0.

    Raises:
        ValueError: If `counts` has an empty axis, or an entry is negative or not finite.

    Example:
        The first group has class 0 and the second class 1. The third group has no class left.

        >>> clustering_accuracy(torch.tensor([[5, 0], [1, 2], [2, 0]]))
        0.7

    References:
        Crouse, "On Implementing 2D Rectangular Assignment Algorithms", IEEE Transactions on
        Aerospace and Electronic Systems 2016, as in SciPy.
    """
    from scipy.optimize import linear_sum_assignment  # 0.3 s, for this function alone

    table = convert.counts("counts", counts, "(groups, classes)")
    rows, columns = linear_sum_assignment(table.numpy(), maximize=True)
    return float(table[rows, columns].sum() / (table.sum() or 1.0))
