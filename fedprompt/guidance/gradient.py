"""The gradient of a client's quiz loss, after one guided step, with respect to the guides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

import fedprompt._refusals as check
from fedprompt._conversions import single
from fedprompt._random_streams import RandomStates
from fedprompt.guidance import _passes
from fedprompt.guidance._passes import Evaluate, Parameters, Passes
from fedprompt.guidance.derivatives import forward_mode
from fedprompt.guidance.loss import Guides, check_outputs, guide_loss, guides_of, label_loss
from fedprompt.interfaces import GuideDerivative, GuideLoss, GuideUpdate, Weighted

Batches = Sequence[Tensor] | Sequence[Sequence[Tensor]]
"""One pair (images, labels), or several."""
_Pair = tuple[Tensor, Tensor]
_Gradients = dict[str, Tensor]
_BatchLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(guided, logits, labels) -> a scalar."""
_Step = tuple[Parameters, Callable[[_Gradients], _Gradients]]
"""(parameters after the step, function from their gradients to those of the step's gradients)."""


def guide_gradient(
    model: nn.Module,
    guides: Float[Tensor, "classes dim"] | Weighted,
    study: Batches,
    quiz: Batches,
    *,
    learning_rate: float,
    guide_weight: float = 1.0,
    loss: GuideLoss | None = None,
    update: GuideUpdate | None = None,
    method: GuideDerivative | None = None,
) -> Weighted:
    r"""Differentiate the quiz loss after one guided step with respect to the guides, exactly.

    .. math::

        \pi = \nabla_v \, \mathrm{CE}_{\text{quiz}}\big(
            \theta - \eta \nabla_\theta [\mathrm{CE} + w\,\ell(F, v_y)]_{\text{study}}\big)
            = -\eta\, w\, \nabla_v \big\langle
            \nabla_F \ell(F, v_y),\; J_\theta F \cdot g \big\rangle

    These are Eq. 5 to 7 of FedL2G, where g is the gradient of the quiz loss after the step. The
    second form contains only one derivative of the network, along g, which is one forward-mode
    pass. It needs no second-order graph, and no more memory than an ordinary training step.

    The model's parameters, gradients, buffers and mode, and PyTorch's random streams, are unchanged
    afterwards. In train mode, batch normalization uses the statistics of each batch, and dropout
    masks are the same in every pass over a study batch. Gradient checkpointing
    (``use_reentrant=False``) is supported and gives the same numbers.

    Use a separate model in each thread. Threads may share a frozen trunk. Calls in several threads
    run one after another, because attention settings, forward mode and the global random streams
    belong to the process. Meanwhile, no other thread may run this model or draw from these streams.

    Args:
        model: Module that returns (guided (batch, dim), logits (batch, classes)) for images. Its
            trainable parameters take the step. Frozen parameters, and tensors that are not
            parameters of the module, are constants.
        guides: Table that all clients share. As a :class:`Weighted`, rows of weight 0 are ignored.
        study: Batch for the step: a pair (images, labels), or several pairs, whose losses are
            averaged.
        quiz: Batch for the loss after the step, in the same form.
        learning_rate: Learning rate of the step (at least 0).
        guide_weight: Factor of the guide loss, as in local training (at least 0).
        loss: Guide loss, twice differentiable: (guided, guides of the samples) to a scalar. If
            None, the mean squared error.
        update: Differentiable step of the parameters. :func:`~fedprompt.guidance.optimizer_update`
            makes it from a client's optimizer. If None, the step is plain gradient descent without
            momentum or weight decay, as in FedL2G.
        method: Method for the derivative along g: :func:`~fedprompt.guidance.forward_mode` (if
            None) or :func:`~fedprompt.guidance.double_backward`.

    Returns:
        Gradient (classes, dim). Classes of the study samples that have a guide have weight 1. All
        other rows are exactly 0, with weight 0.

    Raises:
        ValueError: If a shape or a label does not fit, a trainable parameter receives no gradient
            or a non-finite one, or no trainable parameter affects the guided output.
        RuntimeError: Under ``torch.inference_mode``, or if another thread runs this function or
            :func:`~fedprompt.privacy.per_sample` on modules of `model`.

    Example:
        A linear model with one input is guided in its logits towards class 1.

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
        Zhang et al., "FedL2G: Learning to Guide Local Training in Heterogeneous Federated
        Learning", 2024, Eq. 5-7. Eq. 8 and 9 omit the Jacobian of the network, so they are not
        this gradient.
    """
    check.gradients_are_recorded("guide_gradient")
    check.module("model", model)
    check.factor("learning_rate", learning_rate)
    check.factor("guide_weight", guide_weight)
    loss = F.mse_loss if loss is None else loss
    method = forward_mode if method is None else method
    check.function("loss", loss)
    check.function("method", method)
    check.optional(check.function, "update", update)
    rows = guides_of(guides)
    rows = rows._replace(table=rows.table.detach())
    study_batches = _batches_of("study", study, len(rows.table))
    quiz_batches = _batches_of("quiz", quiz, len(rows.table))
    study_loss = partial(_study_loss, rows=rows, guide_weight=guide_weight, loss=loss)
    inputs = [images for images, _ in study_batches + quiz_batches]
    with _passes.passes_alone(model, inputs) as passes:
        parameters = passes.parameters()
        check.some("model", parameters, "have a parameter that requires gradients")
        mean_gradient = partial(_mean_gradient, passes, rows.table)
        studied, gradients = mean_gradient("study", study_batches, parameters, loss=study_loss)
        arguments = parameters, gradients, learning_rate
        stepped, pull_back = _descend(*arguments) if update is None else _take(update, *arguments)
        quiz_loss = lambda guided, logits, labels: label_loss(logits, labels)  # noqa: E731
        _, slope = mean_gradient("quiz", quiz_batches, stepped, loss=quiz_loss)
        unused = [name for name in parameters if name not in gradients and name not in slope]
        rule = "use every parameter that requires gradients, or freeze it"
        check.require(not unused, "model", rule, f"no gradient for {unused[:5]}")
        pulled = pull_back(slope)
        direction = {
            name: pulled.get(name, torch.zeros_like(value)) for name, value in parameters.items()
        }
        value = torch.zeros_like(rows.table)
        for batch in studied:
            tangent = method(_repeat(passes, batch), parameters, direction)
            check.instance("method", tangent, Tensor, "return a tensor")
            check.shape("method", tangent, batch.guided.shape, "the guided output,")
            value += guide_weight / len(studied) * _response(rows, batch, tangent, loss)
    return Weighted(value, _studied_classes(rows, studied))


class _Studied(NamedTuple):
    """A study batch after its pass, with the random states that repeat the pass."""

    images: Tensor
    labels: Tensor
    guided: Tensor
    states: RandomStates


def _study_loss(
    guided: Tensor,
    logits: Tensor,
    labels: Tensor,
    *,
    rows: Guides,
    guide_weight: float,
    loss: GuideLoss,
) -> Tensor:
    rule = "compute its guided output from a trainable parameter"
    got = "an output without a gradient, which no guide can move"
    check.require(guided.requires_grad, "model", rule, got)
    return label_loss(logits, labels) + guide_weight * guide_loss(guided, labels, rows, loss)


def _mean_gradient(
    passes: Passes,
    table: Tensor,
    argument: str,
    batches: list[_Pair],
    parameters: Mapping[str, Tensor],
    *,
    loss: _BatchLoss,
) -> tuple[list[_Studied], _Gradients]:
    """Differentiate the mean loss over batches, with one batch in memory at a time.

    Parameters that no batch reaches have no entry in the result.
    """
    leaves = {name: value.detach().requires_grad_() for name, value in parameters.items()}
    done = list[_Studied]()
    total = _Gradients()
    for images, labels in batches:
        states = passes.streams.states()

        def gradient(outputs: Any, labels: Tensor = labels) -> tuple[Tensor, tuple[Any, ...]]:
            guided, logits = _pair_of(outputs)
            check_outputs(guided, logits, len(labels), table)
            value = loss(guided, logits, labels) / len(batches)
            gradients = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
            return guided.detach(), gradients

        with torch.enable_grad(), _passes.ReplayableAttention():
            guided, gradients = passes.run(leaves, images, gradient)
        done.append(_Studied(images, labels, guided, states))
        for name, new in zip(leaves, gradients, strict=True):
            if new is not None:
                total[name] = total[name] + new if name in total else new.detach()
    _check_finite_gradients(argument, total)
    return done, total


def _descend(parameters: Parameters, gradients: _Gradients, learning_rate: float) -> _Step:
    """Take one step of plain gradient descent. Its pull-back is a multiplication."""
    stepped = {
        name: value - learning_rate * gradients[name] if name in gradients else value
        for name, value in parameters.items()
    }

    def pull_back(slope: _Gradients) -> _Gradients:
        return {name: value.mul_(-learning_rate) for name, value in slope.items()}

    return stepped, pull_back


def _take(
    update: GuideUpdate, parameters: Parameters, gradients: _Gradients, learning_rate: float
) -> _Step:
    """Take a user's step. Its pull-back is a backward pass through the step."""
    leaves = {
        name: gradients.get(name, torch.zeros_like(value)).requires_grad_()
        for name, value in parameters.items()
    }
    with torch.enable_grad():
        stepped = update(parameters, leaves, learning_rate=learning_rate)
    _check_stepped(stepped, parameters)

    def pull_back(slope: _Gradients) -> _Gradients:
        moved = [name for name in slope if stepped[name].requires_grad]
        outputs = [stepped[name] for name in moved]
        slopes = [slope[name] for name in moved]
        pulled = torch.autograd.grad(outputs, list(leaves.values()), slopes, allow_unused=True)
        return {name: new for name, new in zip(leaves, pulled, strict=True) if new is not None}

    return stepped, pull_back


def _repeat(passes: Passes, batch: _Studied) -> Evaluate:
    """Return a function that repeats the pass over a study batch: same masks, same buffers."""

    def evaluate(parameters: Parameters, then: Callable[[Tensor], Tensor]) -> Tensor:
        passes.streams.replay(batch.states)
        with _passes.differentiable_attention():
            return passes.run(parameters, batch.images, lambda outputs: then(outputs[0]))

    return evaluate


def _response(guides: Guides, batch: _Studied, tangent: Tensor, loss: GuideLoss) -> Tensor:
    """Differentiate the slope of the guide loss along the tangent with respect to the guides."""
    with torch.enable_grad():
        table = guides.table.clone().requires_grad_()
        guided = single(batch.guided).clone().requires_grad_()
        value = guide_loss(guided, batch.labels, guides._replace(table=table), loss)
        _check_twice_differentiable(value)
        (slope,) = torch.autograd.grad(value, guided, create_graph=True, allow_unused=True)
        _check_twice_differentiable(slope)
        (response,) = torch.autograd.grad(slope, table, tangent.to(slope.dtype), allow_unused=True)
    return torch.zeros_like(table) if response is None else response


def _studied_classes(guides: Guides, studied: list[_Studied]) -> Tensor:
    """Return 1 for the classes of the study samples that have a guide, and 0 for the others."""
    present = torch.zeros(len(guides.table), device=guides.table.device)
    for batch in studied:
        present[batch.labels] = 1.0
    return present if guides.mask is None else present.where(guides.mask, 0.0)


def _pair_of(outputs: Any) -> _Pair:
    """Require that a model returned (guided, logits)."""
    several = isinstance(outputs, tuple | list)
    if several and len(outputs) == 2 and all(isinstance(output, Tensor) for output in outputs):
        return outputs[0], outputs[1]
    got = [check.kind(output) for output in outputs] if several else check.kind(outputs)
    raise check.wrong_type("model", "return two tensors (guided, logits)", got)


def _batches_of(argument: str, batches: Any, num_classes: int) -> list[_Pair]:
    """Require one pair (images, labels) or several, none empty, and return a list."""
    fits = isinstance(batches, Sequence) and not isinstance(batches, str)
    check.typed(fits, argument, "be a pair (images, labels) or a sequence of pairs", batches)
    if len(batches) == 2 and not isinstance(batches[0], Sequence):
        return [_batch_of(argument, batches, num_classes)]
    check.some(argument, batches, "contain at least one batch")
    return [
        _batch_of(f"{argument}[{position}]", batch, num_classes)
        for position, batch in enumerate(batches)
    ]


def _batch_of(argument: str, batch: Any, num_classes: int) -> _Pair:
    pair = isinstance(batch, Sequence) and len(batch) == 2
    rule = "be a pair of tensors (images, labels)"
    check.typed(pair and all(isinstance(part, Tensor) for part in batch), argument, rule, batch)
    images, labels = batch
    check.dense(argument, images, stored=False)
    check.labels(f"{argument} labels", labels, num_classes)
    check.some(argument, len(labels), "contain at least one sample")
    shapes = f"{tuple(images.shape)} and {tuple(labels.shape)}"
    fits = images.shape[:1] == labels.shape
    check.require(fits, argument, "have as many images as labels", shapes)
    return images, labels.long()


def _check_finite_gradients(argument: str, gradients: Mapping[str, Tensor]) -> None:
    """Require finite gradients, with a single synchronization if they are."""
    finite = [torch.isfinite(value).all() for value in gradients.values()]
    if finite and not bool(torch.stack(finite).all()):
        broken = [name for name, fits in zip(gradients, finite, strict=True) if not fits]
        raise check.wrong(argument, "give finite gradients", f"NaN or infinity for {broken[:5]}")


def _check_stepped(stepped: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
    """Require that a user's step returns every parameter, computed from the gradients."""
    check.instance("update", stepped, Mapping, "return a mapping from names to parameters")
    for name, value in parameters.items():
        new = stepped.get(name)
        if not isinstance(new, Tensor) or new.shape != value.shape:
            rule = f"return parameter {name!r} with shape {tuple(value.shape)}"
            raise check.wrong("update", rule, "none" if new is None else check.kind(new))
    check.known("update", stepped, parameters, "return no other parameters than")
    differentiable = any(value.requires_grad for value in stepped.values())
    rule = "compute the step from the gradients, in differentiable operations"
    check.require(differentiable, "update", rule, "parameters that do not depend on them")


def _check_twice_differentiable(slope: Tensor | None) -> None:
    """Require that a guide loss, or its gradient, can be differentiated."""
    got = "a gradient with respect to `guided` that is constant"
    check.require(slope is not None and slope.requires_grad, "loss", "be twice differentiable", got)
