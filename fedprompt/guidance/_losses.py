"""The two parts of a guided loss."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fedprompt.guidance._validation import Guides, check_scalar_loss

GuideLoss = Callable[[Tensor, Tensor], Tensor]
"""(guided (batch, dim), guides of the samples (batch, dim)) -> a scalar."""


def label_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute the cross-entropy in float32 at least."""
    return F.cross_entropy(at_least_single(logits), labels)


def guide_loss(guided: Tensor, labels: Tensor, guides: Guides, loss: GuideLoss) -> Tensor:
    """Compute the loss between samples and the guides of their classes.

    A sample without a guide is compared with itself, and receives no gradient.
    """
    guided = at_least_single(guided)
    rows = guides.table[labels]
    if guides.mask is not None:
        mask = guides.mask[labels, None]
        still = guided.detach()
        rows = torch.where(mask, rows, still)
        guided = torch.where(mask, guided, still)
    value = loss(guided, at_least_single(rows))
    check_scalar_loss(value)
    return value


def at_least_single(tensor: Tensor) -> Tensor:
    """Convert half precision to float32. Other dtypes are unchanged."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
