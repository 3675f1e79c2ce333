"""Lengths of vectors whose squares float64 may not hold."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor


def clip_factors(
    rows: Sequence[Float[Tensor, "batch _"]], *, max_norm: float
) -> tuple[Float[Tensor, " batch"], Float[Tensor, " batch"]]:
    """Return `scale` and `factor`: ``row / scale * factor`` has at most the norm `max_norm`.

    The entries of one vector are spread over all `rows`. A vector that is short enough has
    ``factor == scale``. Scales are powers of two near the largest entry, so that dividing by
    them is exact, and no square overflows or vanishes.
    """
    peak = torch.zeros(len(rows[0]), dtype=torch.float64, device=rows[0].device)
    for row in rows:
        if row.shape[1]:
            peak = torch.maximum(peak, row.detach().abs().amax(1).to(peak))
    scale = _power_of_two(peak)
    parts = [torch.linalg.vector_norm(scaled_down(row.detach(), scale), dim=1) for row in rows]
    norm = torch.stack([part.to(peak.device) for part in parts]).norm(dim=0)
    room = 1 - 2**-40  # for the rounding of this sum
    return scale, torch.where(norm > max_norm / scale, max_norm / norm * room, scale)


def scaled_down(row: Float[Tensor, "batch _"], scale: Float[Tensor, " batch"]) -> Tensor:
    """Divide each vector by its scale, in float64."""
    return row / scale[:, None]  # promotes without a copy of `row` in float64


def _power_of_two(number: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Round down to a power of two, at least the smallest normal number: clear the mantissa."""
    exponent = number.view(torch.int64) & (0x7FF << 52)
    return exponent.view(torch.float64).clamp(min=torch.finfo(torch.float64).tiny)
