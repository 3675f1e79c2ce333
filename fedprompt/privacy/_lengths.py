"""Norms and clipping factors of vectors whose squares may overflow or underflow float64."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor


def clip_factors(
    rows: Sequence[Float[Tensor, "batch _"]], *, max_norm: float
) -> tuple[Float[Tensor, " batch"], Float[Tensor, " batch"]]:
    """Compute `scale` and `factor` for which ``row / scale * factor`` has at most norm `max_norm`.

    The entries of one vector are spread over all `rows`. A vector within the bound has
    ``factor == scale``. Each scale is a power of two near the largest entry of its vector. Division
    by it is exact, and no square overflows or underflows.
    """
    peak = torch.zeros(len(rows[0]), dtype=torch.float64, device=rows[0].device)
    for row in rows:
        if row.shape[1]:
            peak = torch.maximum(peak, row.detach().abs().amax(1).to(peak))
    scale = _power_of_two(peak)
    parts = [torch.linalg.vector_norm(scaled_down(row.detach(), scale), dim=1) for row in rows]
    norm = torch.stack([part.to(peak.device) for part in parts]).norm(dim=0)
    margin = 1 - 2**-40  # covers the rounding errors of the norm
    return scale, torch.where(norm > max_norm / scale, max_norm / norm * margin, scale)


def scaled_down(row: Float[Tensor, "batch _"], scale: Float[Tensor, " batch"]) -> Tensor:
    """Divide each vector by its scale, in float64."""
    return row / scale[:, None]  # the division promotes, so `row` is never copied in float64


def _power_of_two(number: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Round down to a power of two by clearing the mantissa. The result is a normal number."""
    exponent = number.view(torch.int64) & (0x7FF << 52)
    return exponent.view(torch.float64).clamp(min=torch.finfo(torch.float64).tiny)
