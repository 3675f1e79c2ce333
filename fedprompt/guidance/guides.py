"""The guides themselves, and the loss by which a client follows them."""

from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F
from jaxtyping import Float, Integer
from torch import Tensor

from fedprompt._checks import (
    check_count,
    check_labels,
    check_number,
    check_weights,
    checked_layout,
    kind,
    values_readable,
    wrong_type,
    wrong_value,
)
from fedprompt.interfaces import Weighted

GuideLoss = Callable[[Tensor, Tensor], Tensor]
"""(guided (batch, dim), guides of the batch (batch, dim)) -> a scalar."""


class GuideVectors(nn.Module):
    """One learnable vector for each class: what FedL2G's server owns, and all that ever comes down.

    The vectors stand beside logits (`dim` is the number of classes) or beside features of a width on which all clients agree. Clients
    need no module: they read the table as a tensor.

    Args:
        num_classes: Number of rows, at least 1.
        dim: Width of a row, at least 1.
        generator: Source of the first values, N(0, 1) as in FedL2G's code; None takes PyTorch's global one.

    Raises:
        TypeError: If a size is not an integer.
        ValueError: If a size is below 1.

    Example:
        >>> guides = GuideVectors(10, 4, generator=torch.Generator().manual_seed(0))
        >>> guides().shape, [name for name, _ in guides.named_parameters()]
        (torch.Size([10, 4]), ['vectors'])

    References:
        Zhang et al., "FedL2G: Learning to Guide Local Training in Heterogeneous Federated Learning", 2024.
    """

    def __init__(
        self, num_classes: int, dim: int, *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        check_count("num_classes", num_classes)
        check_count("dim", dim)
        self.vectors = nn.Parameter(torch.randn(num_classes, dim, generator=generator))

    def forward(self) -> Float[Tensor, "classes dim"]:
        """Return the table."""
        return self.vectors


def guided_loss(
    guided: Float[Tensor, "batch dim"],
    logits: Float[Tensor, "batch classes"],
    labels: Integer[Tensor, " batch"],
    guides: Float[Tensor, "classes dim"] | Weighted,
    *,
    weight: float = 1.0,
    loss: GuideLoss = F.mse_loss,
) -> Float[Tensor, ""]:
    r"""Learn from labels and follow the guides (FedL2G Eq. 4).

    .. math:: \mathrm{CE}(z, y) + \text{weight} \cdot \ell\big(f, v_y\big)

    With the default loss and prototypes as guides this is FedProto, with mean logits FedDistill (:func:`class_means` makes both).
    A server's mean is given as a :class:`Weighted`: samples of a class of weight 0 follow no guide.
    Their guided output is compared with itself and receives no gradient from the guide loss.

    Half-precision outputs are converted to float32, and the result is float32.

    Args:
        guided: What follows the guides: the logits themselves, or features.
        logits: The classifier's.
        labels: Classes in [0, classes); looked at on a CPU only, because looking costs a sync on a GPU.
        guides: One row for each class. Gradients flow into it where it requires them. As a
            :class:`Weighted`, with weight (classes,): rows of weight 0 pull nothing and may contain
            anything, NaN included; every positive weight counts the same.
        weight: Of the guide loss; 0 leaves the cross-entropy.
        loss: Of `guided` and each sample's own guide, both (batch, dim), to a scalar. FedL2G takes the mean squared error over batch
            and dim.

    Returns:
        The sum, a mean over the batch; 0 with zero gradients for an empty batch.

    Raises:
        TypeError: If `labels` are not integers or `weight` is no number.
        ValueError: If shapes disagree, a label lies outside its range, `weight` is negative or `loss` returns no scalar;
            on CPU tensors also if a weight of `guides` is negative or not finite.

    Example:
        >>> logits, labels = torch.zeros(1, 2), torch.tensor([1])
        >>> guided_loss(logits, logits, labels, torch.tensor([[9.0, 9.0], [2.0, 0.0]]))  # log 2 + (2 * 2 + 0 * 0) / 2
        tensor(2.6931)

        No client has seen class 1 yet: the cross-entropy is left.

        >>> mean = Weighted(torch.tensor([[9.0, 9.0], [0.0, 0.0]]), torch.tensor([4.0, 0.0]))
        >>> guided_loss(logits, logits, labels, mean)
        tensor(0.6931)

    References:
        Zhang et al., "FedL2G: Learning to Guide Local Training in Heterogeneous Federated Learning", 2024, Eq. 4.
    """
    check_number("weight", weight, at_least=0)
    check_guided(guided, logits, labels, guides)
    labels = labels.long()
    if len(labels) == 0:
        table = guides.value if isinstance(guides, Weighted) else guides
        return at_least_single(logits).sum() + at_least_single(guided).sum() + table[labels].sum()
    return label_loss(logits, labels) + weight * guide_loss(guided, labels, guides, loss)


def label_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute the cross-entropy in float32 at least."""
    return F.cross_entropy(at_least_single(logits), labels.long())


def guide_loss(
    guided: Tensor, labels: Tensor, guides: Tensor | Weighted, loss: GuideLoss
) -> Tensor:
    """Compute the loss between samples and their own guides, which must be a scalar.

    A sample without a guide is compared with itself, and no gradient flows into it.
    """
    guided, labels = at_least_single(guided), labels.long()
    if isinstance(guides, Weighted):
        known, still = (guides.weight[labels] > 0)[:, None], guided.detach()
        guided, rows = (
            torch.where(known, guided, still),
            torch.where(known, guides.value[labels], still),
        )
    else:
        rows = guides[labels]
    value = loss(guided, at_least_single(rows))
    if not isinstance(value, Tensor) or value.shape != ():
        raise wrong_value("loss", "return a scalar, such as a mean over the batch", kind(value))
    return value


def at_least_single(tensor: Tensor) -> Tensor:
    """Convert half precision to float32, and leave other dtypes."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def checked_guides(guides: object) -> Tensor:
    """Require a table of floating-point rows, alone or with one weight for each; return the table."""
    table = checked_layout("guides", guides).value if isinstance(guides, Weighted) else guides
    if not isinstance(table, Tensor) or not table.is_floating_point():
        rule = "be a floating-point tensor of shape (classes, dim), or such rows as a Weighted"
        raise wrong_type("guides", rule, kind(guides))
    if table.ndim != 2 or 0 in table.shape:
        raise wrong_value("guides", "have shape (classes, dim)", tuple(table.shape))
    if isinstance(guides, Weighted):
        if guides.weight.shape != table.shape[:1]:
            raise wrong_value(
                "guides.weight", f"have shape ({len(table)},)", tuple(guides.weight.shape)
            )
        if guides.weight.device.type == "cpu" and values_readable(guides.weight):
            check_weights("guides", guides)
    return table


def check_guided(guided: Tensor, logits: Tensor, labels: Tensor, guides: Tensor | Weighted) -> None:
    """Require that a model's two outputs, the labels and the guides fit together."""
    classes, dim = checked_guides(guides).shape
    if (
        not isinstance(logits, Tensor)
        or not logits.is_floating_point()
        or logits.ndim != 2
        or logits.shape[1] != classes
    ):
        raise wrong_value(
            "logits",
            f"be floating-point of shape (batch, {classes}), a column for each row of `guides`",
            kind(logits),
        )
    if (
        not isinstance(guided, Tensor)
        or not guided.is_floating_point()
        or guided.shape != (len(logits), dim)
    ):
        raise wrong_value(
            "guided",
            f"be floating-point of shape ({len(logits)}, {dim}) to match `logits` and `guides`",
            kind(guided),
        )
    if not isinstance(labels, Tensor) or labels.shape != (len(logits),):
        raise wrong_value(
            "labels", f"be integers of shape ({len(logits)},) to match `logits`", kind(labels)
        )
    check_labels("labels", labels, classes, sync=False)
