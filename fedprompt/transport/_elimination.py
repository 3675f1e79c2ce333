"""Small linear systems with a diagonal plus a Laplacian, solved without subtractions."""

from collections.abc import Sequence

import torch
from torch import Tensor


def row_sums(columns: Sequence[Tensor]) -> Tensor:
    """Sum tensors ``(problems, rows)``, one for each column, over rows: ``(problems, columns)``."""
    return torch.cat([column.sum(1, keepdim=True) for column in columns], 1)


def couplings(left: Sequence[Tensor], weight: Tensor, right: Tensor) -> list[Tensor]:
    """Compute weighted inner products between each column and all later ones.

    Args:
        left: A tensor ``(problems, rows)`` for each column.
        weight: Weights of the rows, ``(problems, rows)``.
        right: Columns, ``(problems, columns, rows)``.

    Returns:
        For column j a tensor ``(problems, columns - j - 1)``.
    """
    columns = len(left)
    weighted = [column * weight for column in left[: columns - 1]]
    if columns <= 4:  # fused when compiled; more columns take one batch of matrix products
        return [
            row_sums([column * right[:, k] for k in range(j + 1, columns)])
            for j, column in enumerate(weighted)
        ]
    products = torch.bmm(torch.stack(weighted, 1), right.transpose(1, 2))
    return [products[:, j, j + 1 :] for j in range(columns - 1)]


def eliminate(free: Tensor, off: list[Tensor], right: Tensor) -> Tensor:
    r"""Solve :math:`(\mathrm{diag}(f) + L) d = g`, with the Laplacian L of couplings of at least 0.

    Eliminating an unknown distributes its part of `free`, `off` and `right` over the others.
    Diagonal entries are never formed, so there is no cancellation, even for a nearly singular
    matrix. This is Gaussian elimination in the form of Grassmann, Taksar and Heyman.

    Args:
        free: Diagonal f, ``(problems, columns)``, at least 0 and positive somewhere.
        off: Couplings above the diagonal, as from :func:`couplings`.
        right: Right-hand side g, ``(problems, columns)``.
    """
    off = list(off)
    pivots = []
    columns = free.shape[1]
    for k in range(columns - 1):
        pivot = free[:, :1] + off[k].sum(1, keepdim=True)
        share = off[k] / pivot
        for i in range(k + 1, columns - 1):
            off[i] = off[i] + share[:, i - k - 1 : i - k] * off[k][:, i - k :]
        pivots.append((share, right[:, :1] / pivot))
        free = torch.addcmul(free[:, 1:], share, free[:, :1])
        right = torch.addcmul(right[:, 1:], share, right[:, :1])
    solution = right / free
    for share, constant in reversed(pivots):
        solution = torch.cat([constant + (share * solution).sum(1, keepdim=True), solution], 1)
    return solution
