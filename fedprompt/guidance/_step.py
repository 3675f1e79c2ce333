"""One guided step that is not kept, and which way of moving it would have lowered the quiz loss."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedprompt._checks import kind, wrong_type, wrong_value
from fedprompt.guidance._modes import ReplayableAttention
from fedprompt.guidance._passes import Passes, RandomStates, random_states
from fedprompt.guidance.guides import GuideLoss, check_guided, guided_loss, label_loss
from fedprompt.interfaces import Weighted

Pairs = list[tuple[Tensor, Tensor]]
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
Update = Callable[..., Mapping[str, Tensor]]
"""(parameters, gradients, learning_rate=...) -> the parameters after one step."""


class Seen(NamedTuple):
    """What a pass over one batch leaves behind for its tangent pass."""

    images: Tensor
    labels: Tensor
    guided: Tensor
    states: RandomStates


class Step(NamedTuple):
    """The hyper-parameters of the step."""

    learning_rate: float
    weight: float
    loss: GuideLoss
    update: Update | None


def judged_step(
    passes: Passes,
    guides: Tensor | Weighted,
    study: Pairs,
    quiz: Pairs,
    devices: list[torch.device],
    step: Step,
) -> tuple[list[Seen], dict[str, Tensor]]:
    """Take the step on `study`, judge it by `quiz`; return the study batches and how the quiz loss moves with each study gradient."""
    parameters = passes.parameters()

    def studied(guided: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        if not guided.requires_grad:
            raise wrong_value(
                "model",
                "let a trainable parameter reach its guided output",
                "one without gradient, which no guide can move",
            )
        return guided_loss(guided, logits, labels, guides, weight=step.weight, loss=step.loss)

    def judged(guided: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        return label_loss(logits, labels)

    seen, gradients = _mean_gradient("study", passes, parameters, guides, study, devices, studied)
    if step.update is None:
        stepped = {
            name: value - step.learning_rate * gradients[name] if name in gradients else value
            for name, value in parameters.items()
        }
        used = set(gradients)
        del gradients
        _, slope = _mean_gradient("quiz", passes, stepped, guides, quiz, devices, judged)
        _check_used(parameters, used | slope.keys())
        direction = {name: value.mul_(-step.learning_rate) for name, value in slope.items()}
    else:
        leaves = {
            name: gradients.get(name, torch.zeros_like(value)).requires_grad_()
            for name, value in parameters.items()
        }
        with torch.enable_grad():
            stepped = dict(step.update(parameters, leaves, learning_rate=step.learning_rate))
        _check_stepped(stepped, parameters)
        _, slope = _mean_gradient("quiz", passes, stepped, guides, quiz, devices, judged)
        _check_used(parameters, gradients.keys() | slope.keys())
        moved = [name for name in slope if stepped[name].requires_grad]
        pulled = torch.autograd.grad(
            [stepped[name] for name in moved],
            list(leaves.values()),
            [slope[name] for name in moved],
            allow_unused=True,
        )
        direction = {
            name: value for name, value in zip(leaves, pulled, strict=True) if value is not None
        }
    return seen, {
        name: direction.get(name, torch.zeros_like(value)) for name, value in parameters.items()
    }


def _mean_gradient(
    argument: str,
    passes: Passes,
    parameters: Mapping[str, Tensor],
    guides: Tensor | Weighted,
    pairs: Pairs,
    devices: list[torch.device],
    loss: Loss,
) -> tuple[list[Seen], dict[str, Tensor]]:
    """The gradient of the mean loss over batches, one batch in memory at a time; parameters that no batch reaches are left out."""
    leaves = {name: value.detach().requires_grad_() for name, value in parameters.items()}
    seen, total = [], dict[str, Tensor]()
    for images, labels in pairs:
        states = random_states(devices)

        def gradient(outputs: Any, labels: Tensor = labels) -> tuple[Tensor, list[Tensor | None]]:
            guided, logits = _checked_outputs(outputs, labels, guides)
            value = loss(guided, logits, labels) / len(pairs)
            return guided.detach(), list(
                torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
            )

        with torch.enable_grad(), ReplayableAttention():
            guided, gradients = passes.run(leaves, images, gradient)
        seen.append(Seen(images, labels, guided, states))
        for name, own in zip(leaves, gradients, strict=True):
            if own is not None:
                total[name] = total[name] + own if name in total else own.detach()
    _check_finite(argument, total)
    return seen, total


def _checked_outputs(
    outputs: Any, labels: Tensor, guides: Tensor | Weighted
) -> tuple[Tensor, Tensor]:
    if (
        not isinstance(outputs, tuple | list)
        or len(outputs) != 2
        or not all(isinstance(output, Tensor) for output in outputs)
    ):
        got = (
            [kind(output) for output in outputs]
            if isinstance(outputs, tuple | list)
            else kind(outputs)
        )
        raise wrong_type("model", "return two tensors (guided, logits)", got)
    guided, logits = outputs
    check_guided(guided, logits, labels, guides)
    return guided, logits


def _check_used(parameters: Mapping[str, Tensor], used: set[str]) -> None:
    unused = [name.removeprefix("model.") for name in parameters if name not in used]
    if unused:
        raise wrong_value(
            "model",
            "use every parameter that requires gradients, or freeze it",
            f"no gradient for {unused[:5]}",
        )


def _check_finite(argument: str, gradients: Mapping[str, Tensor]) -> None:
    """One reduction and one sync where all is well; a sum that overflows is only a reason to look closer."""
    if not gradients or bool(
        torch.isfinite(torch.stack([value.sum().float() for value in gradients.values()])).all()
    ):
        return
    broken = [
        name.removeprefix("model.")
        for name, value in gradients.items()
        if not bool(torch.isfinite(value).all())
    ]
    if broken:
        raise wrong_value(argument, "give finite gradients", f"NaN or infinity for {broken[:5]}")


def _check_stepped(stepped: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
    shapes = {name.removeprefix("model."): tuple(value.shape) for name, value in stepped.items()}
    expected = {
        name.removeprefix("model."): tuple(value.shape) for name, value in parameters.items()
    }
    if shapes != expected:
        raise wrong_value("update", f"return the parameters {expected} after the step", shapes)
    if not any(value.requires_grad for value in stepped.values()):
        raise wrong_value(
            "update",
            "compute the step from the gradients, in differentiable operations",
            "one that does not depend on them",
        )
