"""The loss by which a client follows guides."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Integer
from torch import Tensor

import fedprompt._nouns as nouns
import fedprompt._refusals as check
from fedprompt._conversions import single
from fedprompt.interfaces import GuideLoss, Weighted


def guided_loss(
    guided: Float[Tensor, "batch dim"],
    logits: Float[Tensor, "batch classes"],
    labels: Integer[Tensor, " batch"],
    guides: Float[Tensor, "classes dim"] | Weighted,
    *,
    guide_weight: float = 1.0,
    loss: GuideLoss | None = None,
) -> Float[Tensor, ""]:
    r"""Add a loss between samples and the guides of their classes to the cross-entropy.

    .. math:: \mathrm{CE}(z, y) + \lambda\,  \ell\big(f, v_y\big)

    This is Eq. 4 of FedL2G. With the default loss it is also FedProto, if the guides are
    prototypes. It is FedDistill, if they are mean logits and `loss` is the cross-entropy to their
    softmax. :func:`class_means` computes both.

    A server's mean can be passed as a :class:`Weighted`. Samples of a class of weight 0 have no
    guide: each is compared with itself, and receives no gradient from the guide loss.

    Half-precision outputs are converted to float32, and the result is float32.

    Args:
        guided: Model outputs that follow the guides, either logits or features.
        logits: Logits of the classifier.
        labels: Class labels in [0, classes). The range is checked on CPU tensors only, to avoid a
            GPU synchronization.
        guides: Table with one row for each class. Gradients flow into it if it requires them. As a
            :class:`Weighted`, it has a weight for each class. Rows of weight 0 may contain
            anything, NaN included. Every positive weight counts the same.
        guide_weight: Factor :math:`\lambda` of the guide loss, at least 0.
        loss: Function of `guided` and the guide of each sample, both (batch, dim), to a scalar. If
            None, the mean squared error.
            The default is FedL2G's: the mean squared error over batch and dim.

    Returns:
        The mean loss over the batch. An empty batch gives 0 with zero gradients.

    Raises:
        ValueError: If shapes disagree, a label is outside its range, or `loss` does not return a
            scalar. On CPU tensors also if a weight of `guides` is negative or not finite.

    Example:
        >>> logits, labels = torch.zeros(1, 2), torch.tensor([1])
        >>> guides = torch.tensor([[9.0, 9.0], [2.0, 0.0]])
        >>> guided_loss(logits, logits, labels, guides)  # log 2 + (2 * 2 + 0 * 0) / 2
        tensor(2.6931)

        Class 1 has weight 0, so only the cross-entropy remains.

        >>> guided_loss(logits, logits, labels, Weighted(guides, torch.tensor([4.0, 0.0])))
        tensor(0.6931)

    References:
        Zhang et al., "FedL2G: Learning to Guide Local Training in Heterogeneous Federated
        Learning", 2024, Eq. 4.
    """
    check.factor("guide_weight", guide_weight)
    loss = F.mse_loss if loss is None else loss
    check.function("loss", loss)
    checked = guides_of(guides)
    check.labels("labels", labels, len(checked.table), sync=False)
    check_outputs(guided, logits, len(labels), checked.table)
    labels = labels.long()
    if len(labels) == 0:
        empty = checked.table[labels]
        return single(logits).sum() + single(guided).sum() + empty.sum()
    return label_loss(logits, labels) + guide_weight * guide_loss(guided, labels, checked, loss)


class Guides(NamedTuple):
    """Validated guides: one row for each class, and a mask of the known rows (None: all)."""

    table: Tensor
    mask: Tensor | None


def guides_of(guides: Any) -> Guides:
    """Require a floating-point table, alone or as an entry with one weight for each row."""
    table, weight = guides if isinstance(guides, Weighted) else (guides, None)
    rule = "be a floating-point tensor of shape (classes, dim), or a Weighted of one"
    check.number_tensor("guides", table, rule)
    fits = table.ndim == 2 and 0 not in table.shape
    check.require(fits, "guides", "have shape (classes, dim)", table)
    if weight is None:
        check.finite("guides", table, sync=False)
        return Guides(table, None)
    check.shape("guides.weight", weight, table.shape[:1])
    if check.values_readable(weight, sync=False):
        nouns.rows("guides", guides)
    return Guides(table, weight > 0)


def check_outputs(guided: Tensor, logits: Tensor, batch: int, table: Tensor) -> None:
    """Require that the two outputs of a model have the shapes of the batch and the guides."""
    classes, dim = table.shape
    check.number_tensor("logits", logits)
    check.shape("logits", logits, (batch, classes), "labels by rows of `guides`,")
    check.number_tensor("guided", guided)
    check.shape("guided", guided, (batch, dim), "labels by columns of `guides`,")


def label_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute the cross-entropy in float32 at least."""
    return F.cross_entropy(single(logits), labels)


def guide_loss(guided: Tensor, labels: Tensor, guides: Guides, loss: GuideLoss) -> Tensor:
    """Compute the loss between samples and the guides of their classes.

    A sample without a guide is compared with itself, and receives no gradient.
    """
    guided = single(guided)
    rows = guides.table[labels]
    if guides.mask is not None:
        mask = guides.mask[labels, None]
        still = guided.detach()
        rows = torch.where(mask, rows, still)
        guided = torch.where(mask, guided, still)
    value = loss(guided, single(rows))
    if not isinstance(value, Tensor) or value.shape != ():
        rule = "return a scalar, such as a mean over the batch"
        raise check.wrong("loss", rule, check.kind(value))
    return value
