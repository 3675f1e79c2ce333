"""Tolerances for two computations of the same mathematical result."""

import torch
from torch import Tensor

# Relative to the largest entry. A few hundred rounding errors in float64 and float32, a few in
# the half precisions.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}


def assert_near(actual: Tensor, expected: Tensor, *, dtype: torch.dtype | None = None) -> None:
    """Assert equality within the tolerance of a dtype, by default the dtype of `actual`."""
    tolerance = TOLERANCE[dtype or actual.dtype]
    scale = max(1.0, float(expected.detach().abs().max())) if expected.numel() else 1.0
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=tolerance * scale)
