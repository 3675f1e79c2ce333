"""Small linear systems whose matrix is a diagonal plus a Laplacian, solved without a single subtraction."""

from collections.abc import Sequence

import torch
from torch import Tensor


def row_sums(columns: Sequence[Tensor]) -> Tensor:
    """Sum each ``(problems, rows)`` over its rows: ``(problems, columns)``."""
    return torch.cat([column.sum(1, keepdim=True) for column in columns], 1)


def couplings(left: Sequence[Tensor], weight: Tensor, right: Tensor) -> list[Tensor]:
    """Return, for each column j, the products with every later column, summed over rows: ``(problems, columns - j - 1)``.

    Args:
        left: One ``(problems, rows)`` for each column.
        weight: ``(problems, rows)``.
        right: ``(problems, columns, rows)``.
    """
    columns = len(left)
    weighted = [column * weight for column in left[: columns - 1]]
    if columns <= 4:  # fuses when compiled; more columns are one batch of matrix products
        return [
            row_sums([column * right[:, k] for k in range(j + 1, columns)])
            for j, column in enumerate(weighted)
        ]
    products = torch.bmm(torch.stack(weighted, 1), right.transpose(1, 2))
    return [products[:, j, j + 1 :] for j in range(columns - 1)]


def eliminate(free: Tensor, off: list[Tensor], right: Tensor) -> Tensor:
    r"""Solve :math:`(\mathrm{diag}(f) + L) d = g` for the Laplacian :math:`L` of non-negative couplings.

    Each unknown that is eliminated hands its own part of `free`, `off` and `right` on to the others. Diagonal entries are never formed, so
    nothing cancels, however close the matrix is to singular (Grassmann, Taksar and Heyman's form of Gaussian elimination).

    Args:
        free: f ``(problems, columns)``, at least 0, with some entry above 0.
        off: The couplings above the diagonal, as :func:`couplings` returns them.
        right: g ``(problems, columns)``.
    """
    off, pivots = list(off), []
    columns = free.shape[1]
    for k in range(columns - 1):
        pivot = free[:, :1] + off[k].sum(1, keepdim=True)
        share = off[k] / pivot
        for i in range(k + 1, columns - 1):
            off[i] = off[i] + share[:, i - k - 1 : i - k] * off[k][:, i - k :]
        pivots.append((share, right[:, :1] / pivot))
        free, right = (
            torch.addcmul(free[:, 1:], share, free[:, :1]),
            torch.addcmul(right[:, 1:], share, right[:, :1]),
        )
    solution = right / free
    for share, own in reversed(pivots):
        solution = torch.cat([own + (share * solution).sum(1, keepdim=True), solution], 1)
    return solution
