"""Logits from the cosine of pooled features, and from transport of patches to prompts."""

from __future__ import annotations

import inspect

import torch
from jaxtyping import Float
from torch import Tensor

import fedprompt._refusals as check
from fedprompt._convergence import solved
from fedprompt._cosine import cosines, unit
from fedprompt.interfaces import Coupling, TransportScore, TransportSolver
from fedprompt.matching._lean import LeanScores, problem
from fedprompt.transport import newton, plan_fixed


def cosine_logits(
    image: Float[Tensor, "batch dim"],
    text: Float[Tensor, "batch classes dim"] | Float[Tensor, "classes dim"],
    *,
    scale: float | Float[Tensor, ""],
) -> Float[Tensor, "batch classes"]:
    """Compute CLIP's logits: `scale` times the cosine of image and text features.

    Args:
        image: Pooled image features. They need not be normalized.
        text: Text features, one for each class, or one for each image and class. They need not be
            normalized.
        scale: Factor of the logits, above 0: ``logit_scale.exp()`` of a CLIP model, about 100.

    Returns:
        Logits in float32 at least.

    Raises:
        TypeError: If one of the features is float64 and the other is not.
        ValueError: If shapes or devices disagree.

    Example:
        >>> image, text = torch.tensor([[3.0, 0.0]]), torch.tensor([[1.0, 0.0], [0.0, 2.0]])
        >>> cosine_logits(image, text, scale=100)
        tensor([[100.,   0.]])

        Contexts that depend on the image (CoCoOp) give different text features for each image:

        >>> image, text = torch.eye(2), torch.stack([torch.eye(2), torch.eye(2).flip(0)])
        >>> cosine_logits(image, text, scale=100)
        tensor([[100.,   0.],
                [100.,   0.]])
    """
    _check_features("image", image, 2, "(batch, dim)")
    per_image = isinstance(text, Tensor) and text.ndim == 3
    shape = "(classes, dim) or (batch, classes, dim)"
    _check_features("text", text, 3 if per_image else 2, shape, batched=per_image)
    _check_pair("image", image, text, scale)
    if per_image and text.shape[0] != image.shape[0]:
        rule = (
            "have shape (classes, dim), such as text[0] of a tower's (contexts, classes, dim), or "
            f"one set of classes for each of {image.shape[0]} images"
        )
        raise check.wrong("text", rule, tuple(text.shape))
    return scale * cosines(image, text)


def transport_logits(
    patches: Float[Tensor, "batch patches dim"],
    text: Float[Tensor, "prompts classes dim"],
    *,
    scale: float | Float[Tensor, ""],
    solver: TransportSolver | None = None,
    mass: float = 0.8,
    gradient: TransportScore | None = None,
    lean: bool = False,
    strict: bool = False,
) -> Float[Tensor, "batch classes"]:
    r"""Compute FedOTP's logits by optimal transport of image patches to the prompts of each class.

    .. math:: \ell_{bk} = s \, \langle T^{bk}, S^{bk} \rangle, \qquad
              S^{bk}_{vj} = \cos(x_{bv}, h_{jk})

    The plan :math:`T^{bk}` solves the transport problem with cost :math:`1 - S^{bk}`. Each of the V
    patches has mass :math:`1/V`, and each prompt takes ``mass / prompts``. The paper prints
    :math:`s (1 - \langle C, T \rangle)`. This differs by :math:`s (1 - \mathrm{mass})` in all
    classes, so the softmax is equal.

    Args:
        patches: Image features, one for each patch and without the class token. They need not be
            normalized.
        text: Text features, one for each prompt and class. They need not be normalized.
        scale: Factor of the logits, above 0: ``logit_scale.exp()`` of a CLIP model, about 100.
        solver: Transport solver with its options bound, such as ``partial(newton, epsilon=0.05)``.
            If None, :func:`~fedprompt.transport.newton`. :func:`~fedprompt.transport.independent`
            averages similarities. :func:`~fedprompt.transport.sinkhorn` needs ``mass=1``.
        mass: Fraction of the image that is transported, in (0, 1]. The paper uses 0.8. With 1, all
            patches have equal influence.
        gradient: Differentiable score of a plan: :func:`~fedprompt.transport.plan_fixed` (if None),
            :func:`~fedprompt.transport.implicit` or :func:`~fedprompt.transport.envelope`.
        lean: Whether costs and plans exist for a few images at a time, in the forward and in the
            backward pass. Logits and gradients are equal, and are differentiable once; the
            gradients of :func:`~fedprompt.transport.dykstra` and
            :func:`~fedprompt.transport.sinkhorn` only if they converged. This needs a solver with
            duals, such as :func:`~fedprompt.transport.newton`, and ``plan_fixed``.
            Under ``torch.compile``, only the memory between the two passes is reduced.
        strict: Whether a plan that violates its marginals by more than ten times the solver's
            tolerance is an error. This is one synchronization on a GPU. If False, it is one warning
            in a process. On a GPU, the largest violation stays there, and is read at the first and
            at every 100th call. Nothing is read under ``torch.compile`` and
            ``torch.func.vmap``.

    Returns:
        Logits in float32 at least, also under autocast.

    Raises:
        TypeError: If one of the features is float64 and the other is not.
        ValueError: If shapes or devices disagree, `mass` lies outside (0, 1], or `lean` logits are
            not possible with the solver or the gradient. If `strict` is set, also if the solver
            did not converge.

    Example:
        Half of the patches show class 0, and the other half shows no class. With a mass of 0.5,
        the other half has almost no influence.

        >>> known, unknown = torch.eye(3)[:1], torch.eye(3)[2:]
        >>> patches = torch.cat([known.repeat(8, 1), unknown.repeat(8, 1)])[None]
        >>> text = torch.eye(3)[None, :2]
        >>> transport_logits(patches, text, scale=100, mass=0.5)
        tensor([[49.9977,  0.0000]])

    References:
        Li et al., "Global and Local Prompts Cooperation via Optimal Transport for Federated
        Learning" (FedOTP), CVPR 2024, Eqs. 6-10.
    """
    _check_features("patches", patches, 3, "(batch, patches, dim)")
    _check_features("text", text, 3, "(prompts, classes, dim)", batched=False)
    _check_pair("patches", patches, text, scale)
    for argument, features in (("patches", patches), ("text", text)):
        check.finite(argument, features, sync=lean)  # otherwise the solver reads the costs once
    check.number("mass", mass, above=0, at_most=1)
    solver = newton if solver is None else solver
    gradient = plan_fixed if gradient is None else gradient
    for argument, function in (("solver", solver), ("gradient", gradient)):
        check.function(argument, function)
    check.flag("lean", lean)
    check.flag("strict", strict)

    def solve(*problem: Tensor) -> Coupling:
        return solved(solver(*problem), strict=strict)

    with torch.autocast(patches.device.type, enabled=False):
        units = unit(text).transpose(0, 1)
        if lean:
            epsilon = _epsilon_of(solver, gradient)
            scores: Tensor = LeanScores.apply(patches, units.contiguous(), mass, epsilon, solve)[0]
            return scale * scores
        cost, a, b = problem(unit(patches), units, mass)
        coupling = solve(cost.detach(), a, b)
        score = gradient(cost, coupling)
        check.instance("gradient", score, Tensor, "return a tensor")
        check.shape("gradient", score, coupling.plan.shape[:-2], "the problems, (batch, classes) =")
        return scale * (coupling.plan.sum((2, 3)) - score)


def _epsilon_of(solver: TransportSolver, gradient: TransportScore) -> float:
    """Return the entropy's factor of a solver, for lean logits."""
    check.require(gradient is plan_fixed, "gradient", "be plan_fixed for lean logits", gradient)
    options = inspect.signature(solver).parameters
    rule = "have an `epsilon` and duals for lean logits"
    check.require("epsilon" in options, "solver", rule, solver)
    epsilon: float = options["epsilon"].default
    return epsilon


def _check_features(
    name: str, features: Tensor, ndim: int, shape: str, *, batched: bool = True
) -> None:
    """Require a floating-point tensor with `ndim` axes; only a batch axis may be empty."""
    check.number_tensor(name, features, f"be a floating-point tensor {shape}")
    if features.ndim != ndim or 0 in features.shape[int(batched) :]:
        raise check.wrong(name, f"have shape {shape} without an empty axis", tuple(features.shape))


def _check_pair(name: str, image: Tensor, text: Tensor, scale: object) -> None:
    """Require features of one width, dtype and device, and a number or a scalar as their scale.

    float32 and the half precisions may be mixed.
    """
    check.comparable("text", text, name, image)
    if isinstance(scale, Tensor):
        check.number_tensor("scale", scale, "be a number or a floating-point scalar tensor", ndim=0)
        check.same_device("scale", scale, image.device, or_cpu=True)
        check.finite("scale", scale, sync=False)
        if check.values_readable(scale, sync=False) and scale <= 0:
            raise check.wrong("scale", "be above 0", scale.item())
    else:
        check.factor("scale", scale, above=0)
