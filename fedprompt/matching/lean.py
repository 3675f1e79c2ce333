"""FedOTP's logits with the costs and plans of a few images in memory at a time."""

from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from fedprompt._checks import check_divisor, check_number, values_readable, wrong_value
from fedprompt._cosine import unit
from fedprompt.interfaces import TransportSolver
from fedprompt.matching.logits import check_features, check_pair, patch_cosines
from fedprompt.transport import newton, plan_from_duals

ENTRIES = {"cpu": 2**18}
"""Entries of the cost that are in memory at a time: the size of a CPU cache."""

ENTRIES_ELSEWHERE = 2**27
"""The same on an accelerator: half a gigabyte of float32."""


def lean_transport_logits(
    patches: Float[Tensor, "batch patches dim"],
    text: Float[Tensor, "prompts classes dim"],
    *,
    scale: float | Float[Tensor, ""],
    mass: float = 0.8,
    epsilon: float = 0.1,
    tolerance: float = 1e-5,
    max_iterations: int = 100,
    fused: bool = False,
) -> Float[Tensor, "batch classes"]:
    r"""Compute the default :func:`transport_logits` with the plans of a few images in memory.

    Logits and gradients equal those of :func:`transport_logits` with
    :func:`~fedprompt.transport.newton` and :func:`~fedprompt.transport.plan_fixed`. Costs and plans
    exist for one block of images at a time. For the backward pass only the column duals :math:`x`
    are kept, one number for each image, class and prompt. The plan follows from them without
    iterations:

    .. math:: T_{vj} = \min\!\big(a_v / s_v, 1\big) \, e^{x_j - C_{vj} / \epsilon}, \qquad
              s_v = \sum_j e^{x_j - C_{vj} / \epsilon}

    The backward pass computes the product of patches and text again. The smallest block is one
    image with all classes. Under ``torch.compile`` the whole batch is one block, so only the memory
    between forward and backward pass is reduced.

    Args:
        patches: Image features, one for each patch and without the class token.
        text: Text features, one for each prompt and class.
        scale: Factor of the logits, as for :func:`transport_logits`.
        mass: Fraction of the image that is transported, in (0, 1].
        epsilon: Factor of the entropy, as for :func:`~fedprompt.transport.newton`.
        tolerance: Largest relative violation of a marginal, as for
            :func:`~fedprompt.transport.newton`.
        max_iterations: Maximum number of evaluations, as for :func:`~fedprompt.transport.newton`.
        fused: Whether a Triton kernel is used on a GPU, as for :func:`~fedprompt.transport.newton`.

    Returns:
        Logits in float32 at least. They are differentiable once. A second derivative raises a
        RuntimeError.

    Raises:
        ValueError: If shapes disagree, a feature is not finite, or a hyper-parameter lies outside
            its range.

    Example:
        >>> patches, text = torch.ones(1, 4, 8), torch.ones(2, 3, 8, requires_grad=True)
        >>> lean_transport_logits(patches, text, scale=10, mass=1.0).detach()
        tensor([[10.0000, 10.0000, 10.0000]])

    References:
        Li et al., "Global and Local Prompts Cooperation via Optimal Transport for Federated
        Learning" (FedOTP), CVPR 2024, Eqs. 6-10.
    """
    check_features("patches", patches, 3, "(batch, patches, dim)")
    check_features("text", text, 3, "(prompts, classes, dim)", batched=False)
    check_pair("patches", patches, text, scale)
    check_number("mass", mass, above=0, at_most=1)
    check_divisor("epsilon", epsilon)
    _check_finite("patches", patches)
    _check_finite("text", text)
    solver = partial(
        newton, epsilon=epsilon, tolerance=tolerance, max_iterations=max_iterations, fused=fused
    )
    with torch.autocast(patches.device.type, enabled=False):
        units = unit(text).transpose(0, 1).contiguous()
        scores: Tensor = _Scores.apply(patches, units, mass, epsilon, solver)[0]
        return scale * scores


class _Scores(torch.autograd.Function):
    """Autograd function from patches and text to scores and duals.

    Scores are sums of plan times cosine, ``(batch, classes)``. Duals are ``(batch, classes,
    prompts)``. Text is normalized, ``(classes, prompts, dim)``.
    """

    @staticmethod
    def forward(
        patches: Tensor, text: Tensor, mass: float, epsilon: float, solver: TransportSolver
    ) -> tuple[Tensor, Tensor]:
        classes, prompts, _ = text.shape
        scores = text.new_empty(len(patches), classes)
        duals = text.new_empty(len(patches), classes, prompts)
        for images in _blocks(patches, text):
            cost, a, b = _problem(unit(patches[images]), text, mass)
            coupling = solver(cost, a, b)
            plan = coupling.plan
            scores[images] = plan.sum((2, 3)) - (plan * cost).sum((2, 3))
            duals[images] = cast(Tensor, coupling.duals)  # newton always returns duals
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
            plan = plan_from_duals(duals[images], *_problem(units, text, mass), epsilon=epsilon)
            weighted = plan.mul_(gradient[images, :, None, None])
            weights = rearrange(
                weighted, "batch classes patches prompts -> batch (classes prompts) patches"
            )
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
            "`lean_transport_logits` is differentiable once; "
            "use `transport_logits` for a second derivative."
        )


def _blocks(patches: Tensor, text: Tensor) -> Iterator[slice]:
    """Split a batch into blocks of images with bounded costs; under ``torch.compile`` one block."""
    entries = patches.shape[1] * text.shape[0] * text.shape[1]
    size = max(ENTRIES.get(patches.device.type, ENTRIES_ELSEWHERE) // entries, 1)
    size = size if values_readable(patches, text) else max(len(patches), 1)
    return (slice(start, start + size) for start in range(0, max(len(patches), 1), size))


def _check_finite(name: str, features: Tensor) -> None:
    """Require finite features, by one sum; if it is not finite, by a check of each entry."""
    if not values_readable(features) or bool(torch.isfinite(features.sum())):
        return
    broken = torch.nonzero(~torch.isfinite(features).flatten(1).all(1)).flatten().tolist()
    if broken:
        raise wrong_value(name, "be finite", f"NaN or infinity in {name}[{broken[0]}]")


def _through_unit(gradient: Tensor, units: Tensor, features: Tensor) -> Tensor:
    """Convert a gradient with respect to normalized features to one with respect to features."""
    norm = features.to(units.dtype).norm(dim=-1, keepdim=True).clamp(min=1e-12)
    across: Tensor = (gradient - units * (units * gradient).sum(-1, keepdim=True)) / norm
    return across


def _problem(units: Tensor, text: Tensor, mass: float) -> tuple[Tensor, Tensor, Tensor]:
    cost = (1 - patch_cosines(units, text)).transpose(2, 3)
    a = cost.new_full(cost.shape[2:3], 1 / cost.shape[2])
    b = cost.new_full(cost.shape[3:], mass / cost.shape[3])
    return cost, a, b
