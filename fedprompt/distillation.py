"""Class logits as knowledge: what a client uploads of its logits, and how it learns from the server's reply."""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from fedprompt._checks import (
    check_count,
    check_finite,
    check_labels,
    check_number,
    check_weights,
    checked_layout,
    kind,
    per_row,
    values_readable,
    wrong_type,
    wrong_value,
)
from fedprompt.interfaces import Weighted

__all__ = ["class_means", "distillation_loss"]


def class_means(
    values: Float[Tensor, "batch *event"],
    labels: Integer[Tensor, " batch"],
    *,
    num_classes: int,
    keep: Bool[Tensor, " batch"] | None = None,
) -> Weighted:
    r"""Average samples of each class: FedHPL's logits (Eq. 10), FedDistill's logits, FedProto's features.

    Args:
        values: Logits or features, one row for each sample.
        labels: Classes in [0, num_classes).
        num_classes: Number of rows of the result, at least 1; at most 2**24 samples of one class are counted exactly.
        keep: Which samples count; None counts all. FedHPL keeps those that the model classifies correctly.

    Returns:
        Means (num_classes, \*event) in the dtype of `values`, with the number of samples as float32 weight (num_classes,). Classes without
        a sample have value 0 and weight 0. Means of batches combine exactly by :func:`weighted_mean`.

    Raises:
        TypeError: If `labels` are not integers, `values` not floating-point, or `keep` not bool.
        ValueError: If batches differ in length, a label lies outside its range, or a kept value is NaN or infinite.

    Example:
        >>> class_means(torch.tensor([[1.0], [3.0], [9.0]]), torch.tensor([0, 0, 1]), num_classes=3)
        Weighted(value=tensor([[2.],
                [9.],
                [0.]]), weight=tensor([2., 1., 0.]))
    """
    check_count("num_classes", num_classes)
    if not isinstance(values, Tensor) or not values.is_floating_point() or values.ndim < 1:
        raise wrong_type("values", "be floating-point of shape (batch, *event)", kind(values))
    check_labels("labels", labels, num_classes)
    if len(labels) != len(values):
        raise wrong_value(
            "labels", f"have one entry for each of the {len(values)} rows of `values`", len(labels)
        )
    if keep is not None:
        if not isinstance(keep, Tensor) or keep.dtype != torch.bool:
            raise wrong_type("keep", "be a bool tensor of shape (batch,)", kind(keep))
        if keep.shape != labels.shape:
            raise wrong_value(
                "keep",
                f"have one entry for each of the {len(values)} rows of `values`",
                tuple(keep.shape),
            )
        values, labels = values[keep], labels[keep]
    check_finite("values", values)
    sums = values.new_zeros(num_classes, *values.shape[1:], dtype=torch.float64).index_add(
        0, labels.long(), values.double()
    )
    count = torch.bincount(labels, minlength=num_classes)
    mean = sums / per_row(count.clamp(min=1), sums)
    return Weighted(mean.to(values.dtype), count.float())


def distillation_loss(
    logits: Float[Tensor, "batch classes"],
    labels: Integer[Tensor, " batch"],
    teacher: Weighted,
    *,
    temperature: float = 4.5,
) -> Float[Tensor, ""]:
    r"""Pull each sample's logits towards the teacher's row for its class (FedHPL Eq. 9).

    .. math:: \frac{1}{B} \sum_i m_{y_i}\, \mathrm{KL}\big(\sigma(\tilde p_{y_i} / T) \,\|\, \sigma(z_i / T)\big)

    with the softmax :math:`\sigma` and :math:`m_c = 1` where the teacher has evidence of class :math:`c`, 0 elsewhere: a row of weight 0
    counts as no loss and no
    gradient, which equals the paper's App. C.4. Before the server's first reply, hand in zeros of weight 0. The paper prints no
    :math:`T^2`; multiply by ``temperature**2`` for Hinton's scale.

    The loss of half-precision logits is computed and returned in float32, and a teacher of higher precision than the student
    keeps its range.

    Args:
        logits: The student's.
        labels: Classes in [0, classes); looked at on a CPU only, because looking costs a sync on a GPU.
        teacher: Logits (classes, classes) with weight (classes,), from :func:`heterogeneous_means`; no gradient flows into it.
        temperature: Above 0; the paper's default is 4.5.

    Returns:
        The mean over the whole batch, rows without evidence included; 0 with zero gradients for an empty batch.

    Raises:
        TypeError: If `labels` are not integers or `teacher` is not a :class:`Weighted`.
        ValueError: If shapes disagree, `temperature` is not above 0, or a label lies outside its range; on CPU tensors also
            if a weight of `teacher` is negative or not finite.

    Example:
        The teacher knows class 0 only, and there it agrees with the student.

        >>> teacher = Weighted(torch.tensor([[2.0, 0.0], [0.0, 0.0]]), torch.tensor([3.0, 0.0]))
        >>> distillation_loss(torch.tensor([[2.0, 0.0], [5.0, 1.0]]), torch.tensor([0, 1]), teacher)
        tensor(0.)

    References:
        Ma et al., "FedHPL: Efficient Heterogeneous Federated Learning with Prompt Tuning and Logit Distillation", 2024, Eq. 9.
    """
    _check_distillation(logits, labels, teacher, temperature)
    rows = labels.long()  # uint8 would index as a mask
    known = teacher.weight[rows] > 0
    single = torch.promote_types(logits.dtype, torch.float32)
    dtype = torch.promote_types(single, teacher.value.dtype)
    student, target = (
        logits.to(dtype),
        torch.where(known[:, None], teacher.value.detach()[rows], 0.0).to(dtype),
    )
    divergence = F.kl_div(
        F.log_softmax(student / temperature, 1),
        F.log_softmax(target / temperature, 1),
        reduction="none",
        log_target=True,
    ).sum(1)
    return (torch.where(known, divergence, 0.0).sum() / max(len(logits), 1)).to(single)


def _check_distillation(
    logits: Tensor, labels: Tensor, teacher: Weighted, temperature: float
) -> None:
    check_number("temperature", temperature, above=0)
    if not isinstance(logits, Tensor) or logits.ndim != 2 or not logits.is_floating_point():
        raise wrong_value("logits", "be floating-point of shape (batch, classes)", kind(logits))
    batch, classes = logits.shape
    checked_layout("teacher", teacher)
    if teacher.value.shape != (classes, classes) or teacher.weight.shape != (classes,):
        shapes = f"{tuple(teacher.value.shape)} and {tuple(teacher.weight.shape)}"
        raise wrong_value(
            "teacher",
            f"have value ({classes}, {classes}) and weight ({classes},) to match `logits`",
            shapes,
        )
    if teacher.weight.device.type == "cpu" and values_readable(teacher.weight):
        check_weights("teacher", teacher)
    if not isinstance(labels, Tensor) or labels.shape != (batch,):
        raise wrong_value(
            "labels", f"be integers of shape ({batch},) to match `logits`", kind(labels)
        )
    check_labels("labels", labels, classes, sync=False)
