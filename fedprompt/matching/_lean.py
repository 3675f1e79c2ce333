"""Transport problems of images and classes, and their scores in little memory."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import fedprompt._refusals as check
from fedprompt._cosine import unit
from fedprompt.interfaces import Coupling, TransportSolver
from fedprompt.transport import plan_from_duals

ENTRIES = {"cpu": 2**18}
"""Entries of the cost that are in memory at a time: the size of a CPU cache."""

ENTRIES_ELSEWHERE = 2**27
"""The same on an accelerator: half a gigabyte of float32."""


_APART = 1e-2
"""Largest difference of a plan from that of its duals, as a fraction of its mass."""


class LeanScores(torch.autograd.Function):
    r"""Sums of plan times cosine, with the plans of a few images in memory at a time.

    Costs and plans exist for one block of images at a time. For the backward pass only the column
    duals :math:`x` are kept, one number for each image, class and prompt. The plan follows from
    them without iterations:

    .. math:: T_{vj} = \min\!\big(a_v / s_v, 1\big) \, e^{x_j - C_{vj} / \epsilon}, \qquad
              s_v = \sum_j e^{x_j - C_{vj} / \epsilon}

    Scores are ``(batch, classes)`` and duals ``(batch, classes, prompts)``. Text is normalized,
    ``(classes, prompts, dim)``.
    """

    @staticmethod
    def forward(
        patches: Tensor, text: Tensor, mass: float, epsilon: float, solver: TransportSolver
    ) -> tuple[Tensor, Tensor]:
        classes, prompts, _ = text.shape
        scores = text.new_empty(len(patches), classes)
        duals = text.new_empty(len(patches), classes, prompts)
        for images in _blocks(patches, text):
            cost, a, b = problem(unit(patches[images]), text, mass)
            coupling = solver(cost, a, b)
            plan = coupling.plan
            scores[images] = plan.sum((2, 3)) - (plan * cost).sum((2, 3))
            if coupling.duals is None:
                raise check.wrong("solver", "return duals for lean logits", "none")
            if not images.start and len(patches):
                _check_duals(coupling, cost, a, b, epsilon)
            duals[images] = coupling.duals
        return scores, duals

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        patches, text, ctx.mass, ctx.epsilon, *_ = inputs
        ctx.save_for_backward(patches, text, output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        patches, text, duals = ctx.saved_tensors
        gradients = _gradients if torch.compiler.is_compiling() else _Gradients.apply
        needed = ctx.needs_input_grad[:2]
        found = gradients(gradient, patches, text, duals, ctx.mass, ctx.epsilon, needed)
        return *found, None, None, None


def _check_duals(coupling: Coupling, cost: Tensor, a: Tensor, b: Tensor, epsilon: float) -> None:
    """Require that the plans of one image follow from their duals; compare their values.

    Plans of a solver that did not converge, which is reported elsewhere, may differ by their error.
    """
    if coupling.duals is None or not check.values_readable(cost):
        return
    plan = plan_from_duals(coupling.duals[:1], cost[:1], a, b, epsilon=epsilon)
    off = ((plan - coupling.plan[:1]).abs().sum() / plan.sum()).item()
    error = 0.0 if coupling.tolerance is None else coupling.error[:1].amax().item()
    rule = "return the duals of its plans, as `plan_from_duals` takes them, for lean logits"
    fits = off <= max(_APART, error)
    check.require(fits, "solver", rule, f"plans that differ by {off:.1g} of their mass")


def _gradients(
    gradient: Tensor,
    patches: Tensor,
    text: Tensor,
    duals: Tensor,
    mass: float,
    epsilon: float,
    needed: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of patches and of normalized text, or None where not needed."""
    of_patches = torch.empty_like(patches) if needed[0] else None
    of_text = torch.zeros_like(text) if needed[1] else None
    with torch.autocast(patches.device.type, enabled=False):
        for images in _blocks(patches, text):
            units = unit(patches[images])
            plan = plan_from_duals(duals[images], *problem(units, text, mass), epsilon=epsilon)
            weighted = plan.mul_(gradient[images, :, None, None])
            weights = weighted.transpose(2, 3).flatten(1, 2)  # (batch, classes * prompts, patches)
            if of_text is not None:
                of_text.flatten(0, 1).addbmm_(weights, units)
            if of_patches is not None:
                moved = weights.transpose(1, 2) @ text.flatten(0, 1)
                of_patches[images] = _through_unit(moved, units, patches[images])
    return of_patches, of_text


class _Gradients(torch.autograd.Function):
    """Autograd function around :func:`_gradients` whose backward raises an error.

    It connects all inputs with the results, so every second derivative runs its backward. The
    decorator ``once_differentiable`` is not enough: ``torch.autograd.grad(..., inputs)`` skips it.
    """

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor | None, Tensor | None]:
        return _gradients(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        """Save nothing, because there is no derivative."""

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        raise RuntimeError(
            "Lean logits are differentiable once; pass `lean=False` for a second derivative."
        )


def _blocks(patches: Tensor, text: Tensor) -> Iterator[slice]:
    """Split a batch into blocks of images with bounded costs; under ``torch.compile`` one block."""
    entries = patches.shape[1] * text.shape[0] * text.shape[1]
    size = max(ENTRIES.get(patches.device.type, ENTRIES_ELSEWHERE) // entries, 1)
    size = size if check.values_readable(patches, text) else max(len(patches), 1)
    return (slice(start, start + size) for start in range(0, max(len(patches), 1), size))


def _through_unit(gradient: Tensor, units: Tensor, features: Tensor) -> Tensor:
    """Convert a gradient with respect to normalized features to one with respect to features."""
    norm: Tensor = features.to(units.dtype).norm(dim=-1, keepdim=True).clamp(min=1e-12)
    return (gradient - units * (units * gradient).sum(-1, keepdim=True)) / norm


def problem(units: Tensor, text: Tensor, mass: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return costs ``(batch, classes, patches, prompts)`` and masses of normalized features.

    Args:
        units: ``(batch, patches, dim)``.
        text: ``(classes, prompts, dim)``.
        mass: Sum of the masses of the prompts.
    """
    similarity = torch.unflatten(text.flatten(0, 1) @ units.mT, 1, text.shape[:2])
    cost = (1 - similarity).transpose(2, 3)
    a = cost.new_full(cost.shape[2:3], 1 / cost.shape[2])
    b = cost.new_full(cost.shape[3:], mass / cost.shape[3])
    return cost, a, b
