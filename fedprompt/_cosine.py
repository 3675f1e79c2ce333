"""Unit vectors and cosines, in float32 at least and outside of autocast."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fedprompt._conversions import single


def unit(features: Tensor) -> Tensor:
    """Normalize vectors along the last axis, in float32 at least."""
    return F.normalize(single(features), dim=-1)


def cosines(query: Tensor, keys: Tensor) -> Tensor:
    """Return the cosine between every query and every key.

    Args:
        query: Vectors of shape (batch, dim).
        keys: Vectors of shape (keys, dim), or (batch, keys, dim) with one set for each query.

    Returns:
        Cosines of shape (batch, keys).
    """
    with torch.autocast(query.device.type, enabled=False):
        if keys.ndim == 2:
            return unit(query) @ unit(keys).T
        return (unit(keys) @ unit(query)[..., None])[..., 0]
