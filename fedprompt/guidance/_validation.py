"""Checks of guides, batches, model outputs, gradients and steps. Each input passes here once."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fedprompt._nouns as nouns
import fedprompt._refusals as check
from fedprompt.interfaces import Weighted

Pair = tuple[Tensor, Tensor]


class Guides(NamedTuple):
    """Validated guides: one row for each class, and a mask of the known rows (None: all)."""

    table: Tensor
    mask: Tensor | None


def checked_guides(guides: Any) -> Guides:
    """Require a floating-point table, alone or as an entry with one weight for each row."""
    weighted = isinstance(guides, Weighted)
    table, weight = nouns.layout("guides", guides) if weighted else (guides, None)
    rule = "be a floating-point tensor of shape (classes, dim), or a Weighted of one"
    check.number_tensor("guides", table, rule)
    if table.ndim != 2 or 0 in table.shape:
        raise check.wrong("guides", "have shape (classes, dim)", tuple(table.shape))
    if weight is None:
        check.finite("guides", table, sync=False)
        return Guides(table, None)
    check.shape("guides.weight", weight, table.shape[:1])
    if check.values_readable(weight, sync=False):
        nouns.rows("guides", Weighted(table, weight))
    return Guides(table, weight > 0)


def check_outputs(guided: Tensor, logits: Tensor, batch: int, table: Tensor) -> None:
    """Require that the two outputs of a model have the shapes of the batch and the guides."""
    classes, dim = table.shape
    check.number_tensor("logits", logits)
    check.shape("logits", logits, (batch, classes), "labels by rows of `guides`,")
    check.number_tensor("guided", guided)
    check.shape("guided", guided, (batch, dim), "labels by columns of `guides`,")


def checked_pair(outputs: Any) -> Pair:
    """Require that a model returned (guided, logits)."""
    several = isinstance(outputs, tuple | list)
    if several and len(outputs) == 2 and all(isinstance(output, Tensor) for output in outputs):
        return outputs[0], outputs[1]
    got = [check.kind(output) for output in outputs] if several else check.kind(outputs)
    raise check.wrong_type("model", "return two tensors (guided, logits)", got)


def check_call(
    model: object, learning_rate: float, guide_weight: float, loss: Any, method: Any, update: Any
) -> None:
    """Require a module and the numbers of the step, in a place where gradients can be computed."""
    check.gradients_are_recorded("guide_gradient")
    check.module("model", model)
    check.factor("learning_rate", learning_rate)
    check.factor("guide_weight", guide_weight)
    check.function("loss", loss)
    check.function("method", method)
    check.optional(check.function, "update", update)


def checked_batches(argument: str, batches: Any, num_classes: int) -> list[Pair]:
    """Require one pair (images, labels) or several, none empty, and return a list."""
    fits = isinstance(batches, Sequence) and not isinstance(batches, str)
    check.typed(fits, argument, "be a pair (images, labels) or a sequence of pairs", batches)
    if len(batches) == 2 and not isinstance(batches[0], Sequence):
        return [_checked_batch(argument, batches, num_classes)]
    check.some(argument, batches, "contain at least one batch")
    return [
        _checked_batch(f"{argument}[{position}]", batch, num_classes)
        for position, batch in enumerate(batches)
    ]


def _checked_batch(argument: str, batch: Any, num_classes: int) -> Pair:
    pair = isinstance(batch, Sequence) and len(batch) == 2
    if not pair or not all(isinstance(part, Tensor) for part in batch):
        raise check.wrong_type(argument, "be a pair of tensors (images, labels)", check.kind(batch))
    images, labels = batch
    check.dense(argument, images, stored=False)
    check.labels(f"{argument} labels", labels, num_classes)
    check.some(argument, len(labels), "contain at least one sample")
    if images.ndim == 0 or len(images) != len(labels):
        shapes = f"{tuple(images.shape)} and {tuple(labels.shape)}"
        raise check.wrong(argument, "have as many images as labels", shapes)
    return images, labels.long()


def check_reached(guided: Tensor) -> None:
    """Require that a step can move the guided output."""
    if not guided.requires_grad:
        rule = "compute its guided output from a trainable parameter"
        raise check.wrong("model", rule, "an output without a gradient, which no guide can move")


def check_used(parameters: Mapping[str, Tensor], used: set[str]) -> None:
    """Require that the study loss or the quiz loss depends on every trainable parameter."""
    if unused := [name for name in parameters if name not in used]:
        rule = "use every parameter that requires gradients, or freeze it"
        raise check.wrong("model", rule, f"no gradient for {unused[:5]}")


def check_finite_gradients(argument: str, gradients: Mapping[str, Tensor]) -> None:
    """Require finite gradients, with a single synchronization if they are.

    The sums are checked first. Finite gradients may have an infinite sum, so the gradients
    themselves decide in that case.
    """
    if not gradients:
        return
    sums = torch.stack([value.sum().float() for value in gradients.values()])
    if bool(torch.isfinite(sums).all()):
        return
    if broken := [name for name, value in gradients.items() if not torch.isfinite(value).all()]:
        raise check.wrong(argument, "give finite gradients", f"NaN or infinity for {broken[:5]}")


def check_stepped(stepped: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
    """Require that a user's step returns every parameter, computed from the gradients."""
    check.instance("update", stepped, Mapping, "return a mapping from names to parameters")
    for name, value in parameters.items():
        new = stepped.get(name)
        if not isinstance(new, Tensor) or new.shape != value.shape:
            rule = f"return parameter {name!r} with shape {tuple(value.shape)}"
            raise check.wrong("update", rule, "none" if new is None else check.kind(new))
    check.known("update", stepped, parameters, "return no other parameters than")
    if not any(value.requires_grad for value in stepped.values()):
        rule = "compute the step from the gradients, in differentiable operations"
        raise check.wrong("update", rule, "parameters that do not depend on them")


def check_scalar_loss(value: object) -> None:
    """Require that a guide loss is a scalar."""
    rule = "return a scalar, such as a mean over the batch"
    check.require(isinstance(value, Tensor) and value.shape == (), "loss", rule, check.kind(value))


def check_twice_differentiable(slope: Tensor | None) -> None:
    """Require that a guide loss, or its gradient, can be differentiated."""
    got = "a gradient with respect to `guided` that is constant"
    check.require(slope is not None and slope.requires_grad, "loss", "be twice differentiable", got)
