"""The guides themselves, and the loss by which a client follows them."""

from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F
from jaxtyping import Float, Integer
from torch import Tensor

from fedprompt._checks import check_count, check_labels, check_number, kind, wrong_type, wrong_value

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
    guides: Float[Tensor, "classes dim"],
    *,
    weight: float = 1.0,
    loss: GuideLoss = F.mse_loss,
) -> Float[Tensor, ""]:
    r"""Learn from labels and follow the guides (FedL2G Eq. 4).

    .. math:: \mathrm{CE}(z, y) + \text{weight} \cdot \ell\big(f, v_y\big)

    With the default loss and prototypes as guides this is FedProto, with mean logits FedDistill (:func:`class_means` makes both).

    Args:
        guided: What follows the guides: the logits themselves, or features.
        logits: The classifier's.
        labels: Classes in [0, classes); looked at on a CPU only, because looking costs a sync on a GPU.
        guides: One row for each class. Gradients flow into it where it requires them.
        weight: Of the guide loss; 0 leaves the cross-entropy.
        loss: Of `guided` and each sample's own guide, both (batch, dim), to a scalar. FedL2G takes the mean squared error over batch
            and dim.

    Returns:
        The sum, a mean over the batch.

    Raises:
        TypeError: If `labels` are not integers or `weight` is no number.
        ValueError: If shapes disagree, a label lies outside its range, `weight` is negative or `loss` returns no scalar.

    Example:
        >>> logits, labels = torch.zeros(1, 2), torch.tensor([1])
        >>> guided_loss(logits, logits, labels, torch.tensor([[9.0, 9.0], [2.0, 0.0]]))  # log 2 + (2 * 2 + 0 * 0) / 2
        tensor(2.6931)

    References:
        Zhang et al., "FedL2G: Learning to Guide Local Training in Heterogeneous Federated Learning", 2024, Eq. 4.
    """
    check_number("weight", weight, at_least=0)
    check_guided(guided, logits, labels, guides)
    labels = labels.long()
    return F.cross_entropy(logits, labels) + weight * guide_loss(guided, guides[labels], loss)


def guide_loss(guided: Tensor, rows: Tensor, loss: GuideLoss) -> Tensor:
    """The loss between samples and their own guides, which must be a scalar."""
    value = loss(guided, rows)
    if not isinstance(value, Tensor) or value.shape != ():
        raise wrong_value("loss", "return a scalar, such as a mean over the batch", kind(value))
    return value


def check_guides(guides: object) -> None:
    """Require a table of floating-point rows."""
    if not isinstance(guides, Tensor) or not guides.is_floating_point():
        raise wrong_type(
            "guides", "be a floating-point tensor of shape (classes, dim)", kind(guides)
        )
    if guides.ndim != 2 or 0 in guides.shape:
        raise wrong_value("guides", "have shape (classes, dim)", tuple(guides.shape))


def check_guided(guided: Tensor, logits: Tensor, labels: Tensor, guides: Tensor) -> None:
    """Require that a model's two outputs, the labels and the guides fit together."""
    check_guides(guides)
    classes, dim = guides.shape
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
