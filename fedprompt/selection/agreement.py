"""Agreement of selected groups with known ones."""

import torch
from jaxtyping import Real
from torch import Tensor

import fedprompt._checks as check
from fedprompt.selection._inputs import checked_table


def clustering_accuracy(counts: Real[Tensor, "groups classes"]) -> float:
    """Compute the share of samples that are in the group matched to their class.

    Groups and classes are matched one to one, so that the share is as large as possible. A group
    or a class may stay without a match. In contrast to ``purity`` of :func:`selection_health`, two
    groups of one class do not both count.

    Args:
        counts: Table of groups and classes, as from :func:`contingency_table`.

    Returns:
        Share in [0, 1]. Without any sample, 0.

    Raises:
        ValueError: If `counts` has an empty axis, or an entry is negative or not finite.

    Example:
        The first group has class 0 and the second class 1. The third group has no class left.

        >>> clustering_accuracy(torch.tensor([[5, 0], [1, 2], [2, 0]]))
        0.7

    References:
        Kuhn, "The Hungarian Method for the Assignment Problem", Naval Research Logistics
        Quarterly 1955.
    """
    table = checked_table(counts)
    if counts.ndim != 2:
        raise check.wrong("counts", "have shape (groups, classes)", tuple(counts.shape))
    size = max(table.shape)
    square = torch.zeros(size, size, dtype=torch.float64)
    square[: table.shape[0], : table.shape[1]] = table
    columns = _assignment((-square).tolist())
    return float(square[torch.arange(size), columns].sum() / (square.sum() or 1.0))


def _assignment(cost: list[list[float]]) -> list[int]:
    """Return the column of each row of a square matrix, with the smallest total cost.

    Rows are added one by one. Each takes the shortest path over matched rows to a free column,
    where the potentials of rows and columns keep all reduced costs at least 0.
    """
    size = len(cost)
    rows = [0.0] * size
    columns = [0.0] * (size + 1)
    owner = [-1] * (size + 1)  # the last column is where a new row starts
    for new in range(size):
        owner[size] = new
        at = size
        distance = [float("inf")] * size
        before = [size] * size
        done = [False] * (size + 1)
        while owner[at] >= 0:
            done[at] = True
            row = owner[at]
            for column in range(size):
                reduced = cost[row][column] - rows[row] - columns[column]
                if not done[column] and reduced < distance[column]:
                    distance[column] = reduced
                    before[column] = at
            at = min((c for c in range(size) if not done[c]), key=distance.__getitem__)
            shift = distance[at]
            for column in range(size + 1):
                if done[column]:
                    rows[owner[column]] += shift
                    columns[column] -= shift
                elif column < size:
                    distance[column] -= shift
        while at != size:
            owner[at], at = owner[before[at]], before[at]
    return sorted(range(size), key=owner.__getitem__)
