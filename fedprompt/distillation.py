"""Mean logits of each class, and losses towards the logits of a teacher or of a peer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Integer
from torch import Tensor

import fedprompt._nouns as nouns
import fedprompt._refusals as check
from fedprompt._conversions import widened
from fedprompt.interfaces import Weighted
from fedprompt.interfaces.nouns import per_row

_LOGITS = "be floating-point of shape (batch, classes)"


def class_means(
    values: Float[Tensor, batch * event],
    labels: Integer[Tensor, " batch"],
    *,
    num_classes: int,
    keep: Bool[Tensor, " batch"] | None = None,
) -> Weighted:
    r"""Average the samples of each class.

    FedHPL (Eq. 10) and FedDistill average logits, and FedProto averages features. Means of several
    batches are combined by :func:`weighted_mean`.

    Args:
        values: Logits or features, with one row for each sample.
        labels: Classes in [0, num_classes).
        num_classes: Number of classes (at least 1).
        keep: Mask of the samples to average. If None, all samples are averaged. FedHPL keeps the
            samples that the model classifies correctly.

    Returns:
        Means (num_classes, \*event) in the dtype of `values`. Their weight (num_classes,) is the
        number of samples, in float32, or in float64 if `values` are. Float32 is exact up to 2**24.
        Classes without a sample have value 0 and weight 0.

    Raises:
        ValueError: If lengths differ, a label is out of range, or a kept value is NaN or infinite.

    Example:
        >>> values, labels = torch.tensor([[1.0], [3.0], [9.0]]), torch.tensor([0, 0, 1])
        >>> class_means(values, labels, num_classes=3)
        Weighted(value=tensor([[2.],
                [9.],
                [0.]]), weight=tensor([2., 1., 0.]))
    """
    check.count("num_classes", num_classes)
    fits = isinstance(values, Tensor) and values.is_floating_point() and values.ndim >= 1
    check.typed(fits, "values", "be floating-point of shape (batch, *event)", values)
    check.labels("labels", labels, num_classes, size=len(values), of="rows of `values`")
    if keep is not None:
        rule = "be a bool tensor of shape (batch,)"
        check.typed(isinstance(keep, Tensor) and keep.dtype == torch.bool, "keep", rule, keep)
        check.shape("keep", keep, labels.shape, "`labels`")
        values = values[keep]
        labels = labels[keep]
    check.finite("values", values)
    wide = widened(values)
    classes = labels.long().to(wide.device)
    sums = wide.new_zeros(num_classes, *wide.shape[1:]).index_add(0, classes, wide)
    count = torch.bincount(classes, minlength=num_classes)
    mean = sums / per_row(count.clamp(min=1), sums)
    dtype = torch.promote_types(values.dtype, torch.float32)
    return Weighted(mean.to(values), count.to(values.device, dtype))


def distillation_loss(
    logits: Float[Tensor, "batch classes"],
    labels: Integer[Tensor, " batch"],
    teacher: Weighted,
    *,
    temperature: float = 4.5,
) -> Float[Tensor, ""]:
    r"""Compute the KL divergence from the teacher's logits of each sample's class (FedHPL Eq. 9).

    .. math::
        \frac{1}{B} \sum_i m_{y_i}\,
        \mathrm{KL}\big(\sigma(\tilde p_{y_i} / T) \,\|\, \sigma(z_i / T)\big)

    Here :math:`\sigma` is the softmax, and :math:`m_c` is 1 if the teacher's weight of class
    :math:`c` is positive, and 0 otherwise (App. C.4). In the first round, pass a teacher of weight
    0. Multiply by ``temperature**2`` for the scale of Hinton et al.

    For half-precision logits, the loss is computed and returned in float32. It is computed in the
    dtype of the teacher if that is more precise.

    Args:
        logits: Logits of the student.
        labels: Classes in [0, classes). The range is checked on CPU tensors only, to avoid a GPU
            synchronization.
        teacher: Logits (classes, classes) with weight (classes,) of :func:`heterogeneous_means`.
            They receive no gradient.
        temperature: Softmax temperature T (above 0). The default is the paper's.

    Returns:
        Mean over the whole batch, including samples of unknown classes. An empty batch has loss 0
        and zero gradients.

    Raises:
        ValueError: If shapes disagree, or on CPU tensors, if a label is out of range or a weight of
            `teacher` is negative or not finite.

    Example:
        The teacher knows class 0 only, and agrees with the student there.

        >>> teacher = Weighted(torch.tensor([[2.0, 0.0], [0.0, 0.0]]), torch.tensor([3.0, 0.0]))
        >>> logits, labels = torch.tensor([[2.0, 0.0], [5.0, 1.0]]), torch.tensor([0, 1])
        >>> distillation_loss(logits, labels, teacher)
        tensor(0.)

    References:
        Ma et al., "FedHPL: Efficient Heterogeneous Federated Learning with Prompt Tuning and Logit
        Distillation", 2024, Eq. 9.
    """
    check.divisor("temperature", temperature)
    check.number_tensor("logits", logits, _LOGITS, ndim=2)
    batch, classes = logits.shape
    nouns.layout("teacher", teacher)
    if teacher.value.shape != (classes, classes) or teacher.weight.shape != (classes,):
        rule = f"have value ({classes}, {classes}) and weight ({classes},) to match `logits`"
        got = f"{tuple(teacher.value.shape)} and {tuple(teacher.weight.shape)}"
        raise check.wrong("teacher", rule, got)
    if check.values_readable(teacher.weight, sync=False):
        nouns.rows("teacher", teacher)
    check.labels("labels", labels, classes, size=batch, of="rows of `logits`", sync=False)
    check.same_device("labels", labels, logits.device, or_cpu=True)
    rows = labels.long()  # indices of dtype uint8 would be a mask
    taught = teacher.weight[rows] > 0
    target = torch.where(taught[:, None], teacher.value.detach()[rows], 0.0)
    divergence = torch.where(taught, _divergences(logits, target, temperature), 0.0)
    return _mean(divergence, logits)


def mutual_loss(
    logits: Float[Tensor, "batch classes"],
    other: Float[Tensor, "batch classes"],
    *,
    temperature: float,
) -> Float[Tensor, ""]:
    r"""Compute the KL divergence from another model's logits of the same samples (FML).

    .. math::
        \frac{1}{B} \sum_i \mathrm{KL}\big(\sigma(o_i / T) \,\|\, \sigma(z_i / T)\big)

    Here :math:`\sigma` is the softmax. Two models that learn from each other have one loss each:
    ``mutual_loss(first, second, ...)`` and ``mutual_loss(second, first, ...)``. In FML, one is
    private and the other one is averaged. Multiply by ``temperature**2`` for the scale of Hinton et
    al.

    For half-precision logits, the loss is computed and returned in float32.

    Args:
        logits: Logits of the model that learns.
        other: Logits of the other model, of the same samples. They receive no gradient.
        temperature: Softmax temperature T (above 0). FML and deep mutual learning use 1.

    Returns:
        Mean over the batch. An empty batch has loss 0 and zero gradients.

    Raises:
        ValueError: If shapes differ.

    Example:
        >>> first, second = torch.tensor([[[2.0, 0.0], [0.0, 0.0]], [[2.0, 0.0]] * 2])
        >>> loss = mutual_loss(first, second, temperature=1.0)
        >>> bool(loss > 0), mutual_loss(first, first, temperature=1.0)
        (True, tensor(0.))

    References:
        Shen et al., "Federated Mutual Learning", 2020. Zhang et al., "Deep Mutual Learning", CVPR
        2018.
    """
    check.divisor("temperature", temperature)
    check.number_tensor("logits", logits, _LOGITS, ndim=2)
    check.number_tensor("other", other, _LOGITS, ndim=2)
    check.shape("other", other, logits.shape, "`logits`")
    return _mean(_divergences(logits, other.detach(), temperature), logits)


def _divergences(logits: Tensor, target: Tensor, temperature: float) -> Tensor:
    """Return KL(softmax of `target` || softmax of `logits`) of each row, in float32 at least."""
    single = torch.promote_types(logits.dtype, torch.float32)
    dtype = torch.promote_types(single, target.dtype)
    student, teacher = (F.log_softmax(x.to(dtype) / temperature, 1) for x in (logits, target))
    return F.kl_div(student, teacher, reduction="none", log_target=True).sum(1)


def _mean(divergence: Tensor, logits: Tensor) -> Tensor:
    """Average over a batch that may be empty, in the dtype of the logits or in float32."""
    mean = divergence.sum() / max(len(logits), 1)
    return mean.to(torch.promote_types(logits.dtype, torch.float32))
