"""The one place that states how far two results of the same mathematics may lie apart."""

import torch
from torch import Tensor

# Relative to the largest entry: a few hundred roundings of float64, of float32, and a few of the half precisions.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}


def assert_near(actual: Tensor, expected: Tensor, *, dtype: torch.dtype | None = None) -> None:
    """Assert equality up to the tolerance of a dtype, by default that of `actual`."""
    tolerance = TOLERANCE[dtype or actual.dtype]
    scale = max(1.0, float(expected.detach().abs().max())) if expected.numel() else 1.0
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=tolerance * scale)
