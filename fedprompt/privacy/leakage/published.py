"""Membership from a published model, and an overfitted model as the attack's positive control."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

import fedprompt._refusals as check
from fedprompt._random_streams import kept_streams

_LEAST = 1e-3
"""Smallest standard deviation of confidences, in nats."""


@torch.no_grad()
def confidences(
    model: nn.Module,
    inputs: Float[Tensor, "images ..."],
    labels: Int[Tensor, " images"],
    *,
    batch_size: int = 64,
) -> Float[Tensor, " images"]:
    r"""Score how sure a model is of the labels of images.

    .. math:: \varphi = \log \frac{p_y}{1 - p_y} = z_y - \log \sum_{k \ne y} e^{z_k}

    Members have higher scores if a model is overfitted. As a test of membership, this is the loss
    with a threshold. :func:`likelihood_ratios` needs the same scores of shadow models.

    Args:
        model: Prediction of a method, or a classifier of ``compare.load``. It is in eval mode for
            this call, and in its own modes again afterwards.
        inputs: Inputs of the model. They are moved to the device of its first tensor.
        labels: Classes of the inputs.
        batch_size: Number of inputs that are classified at a time (at least 1).

    Returns:
        Score of each image, in float64 on the CPU.

    Raises:
        ValueError: If the model has fewer than two classes, or a logit is not finite.

    Example:
        >>> model = nn.Linear(2, 2, bias=False)
        >>> _ = nn.init.eye_(model.weight)
        >>> confidences(model, torch.tensor([[3.0, 1.0], [3.0, 1.0]]), torch.tensor([0, 1]))
        tensor([ 2., -2.], dtype=torch.float64)

    References:
        Yeom et al., "Privacy Risk in Machine Learning", CSF 2018; the scaled confidence is that of
        Carlini et al., "Membership Inference Attacks From First Principles", S&P 2022. Bian et al.,
        "Your Prompts Are Not Safe" (PIPRA), AAAI 2026, of which the abstract was read, attack a
        prompt without outputs: they train a discriminator on features of prompts and images. This
        is not done here, so a prompt may show more.
    """
    check.module("model", model)
    check.number_tensor("inputs", inputs)
    check.count("batch_size", batch_size)
    check.some("inputs", inputs.ndim and len(inputs), "have at least one input")
    tensors = [*model.parameters(), *model.buffers()]
    device, found = tensors[0].device if tensors else inputs.device, list[Tensor]()
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        with kept_streams():
            for part in torch.split(inputs, batch_size):
                logits = model(part.to(device))
                check.instance("model", logits, Tensor, "return logits (batch, classes)")
                found.append(logits.double().cpu())
    finally:
        for module, training in modes.items():
            module.training = training
    logits = torch.cat(found)
    check.require(logits.ndim == 2 and logits.shape[1] > 1, "model", "return logits of two or "
                  "more classes", logits)  # fmt: skip
    check.finite("model(inputs)", logits)
    check.labels("labels", labels, logits.shape[1], size=len(logits), of="inputs")
    right = F.one_hot(labels.long().cpu(), logits.shape[1]).bool()
    return logits[right] - logits.masked_fill(right, -torch.inf).logsumexp(1)


def likelihood_ratios(
    scores: Float[Tensor, " images"],
    shadows: Float[Tensor, "models images"],
    inside: Bool[Tensor, "models images"],
) -> Float[Tensor, " images"]:
    r"""Calibrate confidences by shadow models, which were trained with and without each image.

    .. math:: \log \mathcal N(\varphi; \mu_1, \sigma_1^2) - \log \mathcal N(\varphi; \mu_0,
        \sigma_0^2)

    :math:`\mu_1` and :math:`\mu_0` are an image's mean confidences of shadow models with and
    without it. The two deviations are pooled over images, because few shadow models do not show
    those of an image. If no shadow model has any of the images, the score is
    :math:`(\varphi - \mu_0) / \sigma_0`.

    Args:
        scores: Confidences of the model that is attacked.
        shadows: Confidences of at least two shadow models for the same images.
        inside: Whether a shadow model was trained on an image.

    Returns:
        Score of each image, in float64 on the CPU.

    Raises:
        ValueError: If an image is in all shadow models, or in none of them while others are.

    Example:
        The second image is easy for every model, so its confidence shows nothing.

        >>> shadows = torch.tensor([[3.0, 9.0], [1.0, 9.2], [2.8, 9.1], [1.2, 8.9]])
        >>> inside = torch.tensor([[True, False], [False, True]] * 2)
        >>> likelihood_ratios(torch.tensor([3.0, 9.0]), shadows, inside).round(decimals=1)
        tensor([143.8000,  -0.4000], dtype=torch.float64)

    References:
        Carlini et al., "Membership Inference Attacks From First Principles", S&P 2022 (LiRA), with
        one deviation for all images, as they advise for few shadow models.
    """
    check.number_tensor("scores", scores, "be a floating-point tensor of scores", ndim=1)
    check.number_tensor("shadows", shadows, "be floating-point (models, images)", ndim=2)
    check.finite("scores", scores)
    check.finite("shadows", shadows)
    count = len(shadows)
    check.require(count > 1, "shadows", "have at least two models", count)
    check.shape("shadows", shadows, (count, len(scores)), "(models, images) =")
    fits = isinstance(inside, Tensor) and inside.dtype == torch.bool
    check.typed(fits, "inside", "be a bool tensor (models, images)", inside)
    check.shape("inside", inside, shadows.shape, "the shape of `shadows`,")
    scores, shadows, inside = scores.double().cpu(), shadows.double().cpu(), inside.cpu()
    check.require(not inside.all(0).any(), "inside", "have a model without each image", "none")
    mean, deviation = _pooled(shadows, ~inside)
    apart = (scores - mean) / deviation
    if not inside.any():
        return apart
    check.require(inside.any(0).all(), "inside", "have a model with each image, or none", "some")
    mean, other = _pooled(shadows, inside)
    return (
        apart.square() / 2 + deviation.log() - ((scores - mean) / other).square() / 2 - other.log()
    )


def _pooled(shadows: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of each image over some models, and one deviation for all images."""
    counts = chosen.sum(0)
    mean = torch.where(chosen, shadows, 0).sum(0) / counts
    squares = torch.where(chosen, (shadows - mean).square(), 0).sum()
    freedom = (counts - 1).sum().clamp(min=1)
    return mean, (squares / freedom).sqrt().clamp(min=_LEAST)


class MemorizingClassifier(nn.Module):
    """Classifier that has memorized its training images: an attack must find them.

    It is the positive control of an attack on models. If the attack does not find the members of
    this model, its result for another one shows nothing. Each training image has the logit 10 for
    its class, which falls fast with the distance of an input (kernel regression, whose kernel has
    half of its height at half of the median distance to the nearest training image).

    Args:
        inputs: Training inputs, two or more.
        labels: Their classes.
        num_classes: Number of classes (at least 2).

    Example:
        >>> inputs, labels = torch.eye(4), torch.tensor([0, 1, 0, 1])
        >>> model = MemorizingClassifier(inputs, labels, 2)
        >>> model(inputs).argmax(1).tolist(), bool((model(inputs).amax(1) > 9.9).all())
        ([0, 1, 0, 1], True)
    """

    known: Tensor
    values: Tensor
    width: Tensor

    def __init__(
        self, inputs: Float[Tensor, "images ..."], labels: Int[Tensor, " images"], num_classes: int
    ) -> None:
        super().__init__()
        check.number_tensor("inputs", inputs)
        check.finite("inputs", inputs)
        check.require(inputs.ndim > 1 and len(inputs) > 1, "inputs", "be two or more", inputs)
        check.count("num_classes", num_classes, at_least=2)
        check.labels("labels", labels, num_classes, size=len(inputs), of="inputs")
        known = inputs.detach().flatten(1).double()
        apart = torch.cdist(known, known).fill_diagonal_(torch.inf)
        width = (apart.amin(1).median() / 2).clamp(min=1e-6)
        gram = torch.exp2(-((torch.cdist(known, known) / width) ** 2))
        gram = gram + 1e-6 * torch.eye(len(gram)).to(gram)
        wanted = 10 * F.one_hot(labels.long(), num_classes).to(gram)
        self.register_buffer("known", known)
        self.register_buffer("values", torch.linalg.solve(gram, wanted))
        self.register_buffer("width", width)

    def forward(self, inputs: Float[Tensor, "batch ..."]) -> Float[Tensor, "batch classes"]:
        """Classify inputs."""
        apart = torch.cdist(inputs.flatten(1).to(self.known), self.known)
        return torch.exp2(-((apart / self.width) ** 2)) @ self.values
