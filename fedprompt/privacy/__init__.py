"""Differential privacy: per-sample gradients, clipping, noise, and sums for secure aggregation."""

from fedprompt.privacy import leakage as leakage
from fedprompt.privacy.clipping import cap_weight, clip_norm, gaussian_noise
from fedprompt.privacy.dp_sgd import clipped_sum, noisy_mean, per_sample, poisson_batch
from fedprompt.privacy.sums import from_sum, to_summable

__all__ = [
    "cap_weight",
    "clip_norm",
    "clipped_sum",
    "from_sum",
    "gaussian_noise",
    "noisy_mean",
    "per_sample",
    "poisson_batch",
    "to_summable",
]
