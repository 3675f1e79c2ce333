"""What a client uploads: how its loss on held-out samples, after one guided step, would move with the guides."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from fedprompt._checks import check_labels, check_number, kind, wrong_type, wrong_value
from fedprompt.guidance._passes import Passes, differentiable_attention, random_states, replay
from fedprompt.guidance._step import Pairs, Seen, Step, Update, judged_step
from fedprompt.guidance.guides import GuideLoss, at_least_single, checked_guides, guide_loss
from fedprompt.guidance.methods import Evaluate, Parameters, forward_mode
from fedprompt.interfaces import Batches, Weighted

Method = Callable[[Evaluate, Parameters, Parameters], Tensor]


def guide_gradient(
    model: nn.Module,
    guides: Float[Tensor, "classes dim"] | Weighted,
    study: Batches,
    quiz: Batches,
    *,
    learning_rate: float,
    weight: float = 1.0,
    loss: GuideLoss = F.mse_loss,
    update: Update | None = None,
    method: Method = forward_mode,
) -> Weighted:
    r"""Differentiate the quiz loss after one guided step with respect to the guides (FedL2G Eq. 5-7), exactly.

    .. math::

        \pi = \nabla_v \, \mathrm{CE}_{\text{quiz}}\big(\theta - \eta \nabla_\theta [\mathrm{CE} + w\,\ell(F, v_y)]_{\text{study}}\big)
            = -\eta\, w\, \nabla_v \big\langle \nabla_F \ell(F, v_y),\; J_\theta F \cdot g \big\rangle

    with g the gradient of the quiz loss after the step. The network enters the second form through one derivative along g alone, which one
    forward-mode pass gives: no second-order graph, and the memory of an ordinary training step. The model's parameters, gradients and
    buffers, its mode, and PyTorch's random streams are afterwards what they were.

    In train mode batch normalisation couples the samples of a batch and dropout draws masks; both are taken into account, and masks are
    the same in every pass over a study batch. Gradient checkpointing (``use_reentrant=False``) works and gives the same numbers.

    Args:
        model: Called with images; returns (guided (batch, dim), logits (batch, classes)). Parameters that require gradients take the step;
            what is frozen, and what is no parameter of the module, a trunk held as a plain attribute for one, is a constant.
        guides: The table that all clients share. As a :class:`Weighted`, rows of weight 0 pull nothing.
        study: What the step is taken on: a pair (images, labels), or several pairs, of which the mean loss counts.
        quiz: What the step is judged by, in the same form.
        learning_rate: Of the step, above 0.
        weight: Of the guide loss, as in local training.
        loss: The guide loss, twice differentiable: (guided, guides of the samples) to a scalar.
        update: The step, ``(parameters, gradients, learning_rate=...)`` to new parameters, mappings by name, in differentiable
            operations; None is FedL2G's plain gradient descent, without momentum or weight decay.
        method: How the derivative along g is computed: :func:`forward_mode`, :func:`double_backward`, :func:`central_difference`.

    Returns:
        The gradient (classes, dim), with weight 1 for the classes of the study samples that have a guide. Other rows are
        exactly 0, with weight 0.

    Raises:
        TypeError: If `model` is no module, `guides` or labels are of the wrong kind, or a batch is no pair.
        ValueError: If a batch is empty, a label lies outside the table, an output of the model has the wrong shape, no trainable parameter
            reaches the guided output, a trainable parameter has no or a non-finite gradient, or `update` returns something else than
            the parameters.

    Example:
        A linear model of one weight, guided in its logits towards class 1: :math:`\eta = 1`, one sample to study and one for the quiz.

        >>> class Client(nn.Linear):
        ...     def forward(self, images):
        ...         logits = super().forward(images)
        ...         return logits, logits
        >>> client = Client(1, 2, bias=False)
        >>> client.load_state_dict({"weight": torch.zeros(2, 1)})
        <All keys matched successfully>
        >>> batch = torch.ones(1, 1), torch.tensor([1])
        >>> guide_gradient(client, torch.zeros(2, 2), batch, batch, learning_rate=1.0)
        Weighted(value=tensor([[ 0.0000,  0.0000],
                [ 0.2689, -0.2689]]), weight=tensor([0., 1.]))

    References:
        Zhang et al., "FedL2G: Learning to Guide Local Training in Heterogeneous Federated Learning", 2024, Eq. 5-7. Its Eq. 8 and 9 are
        not this gradient: they leave the network's Jacobian out.
    """
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "guide_gradient differentiates, which torch.inference_mode forbids: call it outside."
        )
    if not isinstance(model, nn.Module):
        raise wrong_type("model", "be an nn.Module", kind(model))
    table = checked_guides(guides).detach()
    check_number("learning_rate", learning_rate, above=0)
    check_number("weight", weight, at_least=0)
    pairs, held_out = _pairs("study", study, len(table)), _pairs("quiz", quiz, len(table))
    guides = Weighted(table, guides.weight.detach()) if isinstance(guides, Weighted) else table
    passes = Passes(model)
    if not passes.parameters():
        raise wrong_value("model", "have a parameter that requires gradients", "none")
    devices = _devices(
        [*passes.parameters().values(), *(images for images, _ in (*pairs, *held_out))]
    )
    value, present = torch.zeros_like(table), torch.zeros(len(table), device=table.device)
    before = random_states(devices)
    try:
        seen, direction = judged_step(
            passes, guides, pairs, held_out, devices, Step(learning_rate, weight, loss, update)
        )
        for batch in seen:
            tangent = method(_evaluate(passes, batch, devices), passes.parameters(), direction)
            value += weight / len(seen) * _reaction(loss, batch, tangent, guides)
            present[batch.labels.long()] = 1.0
    finally:
        replay(before, devices)
    if isinstance(guides, Weighted):
        present = present.where(guides.weight > 0, 0.0)
    return Weighted(value, present)


def _evaluate(passes: Passes, batch: Seen, devices: list[torch.device]) -> Evaluate:
    """Run the model again as it ran on a study batch: the same masks, the same buffers."""

    def evaluate(parameters: Parameters, then: Callable[[Tensor], Any]) -> Any:
        replay(batch.states, devices)
        with differentiable_attention():
            return passes.run(parameters, batch.images, lambda outputs: then(outputs[0]))

    return evaluate


def _reaction(loss: GuideLoss, batch: Seen, tangent: Tensor, guides: Tensor | Weighted) -> Tensor:
    """How the change of the guide loss along the tangent would move with the guides: a second derivative in (batch, dim) alone."""
    with torch.enable_grad():
        table = (guides.value if isinstance(guides, Weighted) else guides).clone().requires_grad_()
        told = Weighted(table, guides.weight) if isinstance(guides, Weighted) else table
        guided = at_least_single(batch.guided).clone().requires_grad_()
        value = guide_loss(guided, batch.labels, told, loss)
        (slope,) = torch.autograd.grad(value, guided, create_graph=True, allow_unused=True)
        if slope is None or not slope.requires_grad:
            raise wrong_value(
                "loss",
                "be twice differentiable",
                "a gradient in `guided` that does not depend on anything",
            )
        (reaction,) = torch.autograd.grad(slope, table, tangent.to(slope.dtype), allow_unused=True)
    return torch.zeros_like(table) if reaction is None else reaction


def _pairs(argument: str, batches: object, num_classes: int) -> Pairs:
    """Require one pair (images, labels) or several, none empty, and return a list."""
    if not isinstance(batches, Sequence) or isinstance(batches, str):
        raise wrong_type(
            argument, "be a pair (images, labels) or a sequence of pairs", kind(batches)
        )
    single = len(batches) == 2 and not isinstance(batches[0], Sequence)
    pairs = [batches] if single else list(batches)
    if not pairs:
        raise wrong_value(argument, "hold at least one batch", "none")
    for position, pair in enumerate(pairs):
        name = argument if single else f"{argument}[{position}]"
        if (
            not isinstance(pair, Sequence)
            or len(pair) != 2
            or not all(isinstance(part, Tensor) for part in pair)
        ):
            raise wrong_type(name, "be a pair of tensors (images, labels)", kind(pair))
        check_labels(f"{name} labels", pair[1], num_classes)
        if len(pair[1]) == 0:
            raise wrong_value(name, "hold at least one sample", "none")
        if pair[0].ndim == 0 or len(pair[0]) != len(pair[1]):
            raise wrong_value(
                name,
                "have as many images as labels",
                f"{tuple(pair[0].shape)} and {tuple(pair[1].shape)}",
            )
    return [(pair[0], pair[1]) for pair in pairs]


def _devices(tensors: list[Tensor]) -> list[torch.device]:
    """The accelerators involved, each once."""
    return sorted({tensor.device for tensor in tensors if tensor.device.type != "cpu"}, key=str)
