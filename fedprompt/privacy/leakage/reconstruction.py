"""Reconstruction of images from one message of a small batch, by gradient matching."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

import fedprompt._nouns as nouns
import fedprompt._refusals as check
from fedprompt._random_streams import kept_streams
from fedprompt.interfaces import Method, Weighted
from fedprompt.privacy.leakage.messages import (
    MESSAGE,
    Received,
    change_of,
    cosine,
    prediction,
    value_of,
)

Simulation = Callable[[Tensor], Mapping[str, Tensor | Weighted]]
"""Function from images to the change of the message that they cause, up to a factor."""


def descent(
    method: Method,
    received: Received,
    data: Any,
    labels: Int[Tensor, " batch"],
    *,
    encode: Callable[[Tensor], Tensor] | None = None,
) -> Simulation:
    """Make the function from images to the negative gradient of their mean loss.

    The gradient is with respect to the entries of the answer that are parameters of the method's
    prediction. For one plain gradient step, a client's change is a multiple of it. For other
    optimizers and more steps, it is an approximation.

    Args:
        method: Method whose payloads have parameters of its prediction, by their names.
        received: Message of a client.
        data: Data for the prediction of the method, such as that of a client of the server.
        labels: Labels of the batch, which the server knows.
        encode: Differentiable function from images to inputs of the method, such as the image tower
            of a CLIP. If None, inputs are images.

    Example:
        >>> from fedprompt import samples, vit_trunk
        >>> from fedprompt.methods import Federation, VitSetting, head_tuning
        >>> images, labels, *_ = samples.digits()
        >>> trunk = vit_trunk(samples.vit("S"))
        >>> method = head_tuning(VitSetting(trunk=trunk, num_classes=10, rounds=1, clients=[0]))
        >>> data = Federation(images, labels, {0: torch.arange(2)}).data(method.setting, 0, 0)
        >>> answer = method.server.answer(0, method.server.state)
        >>> simulate = descent(method, Received(0, 0, answer, answer), data, labels[:2])
        >>> [(name, tuple(change.shape)) for name, change in simulate(images[:2]).items()]
        [('head.weight', (10, 48)), ('head.bias', (10,))]
    """
    nouns.method(method)
    check.instance("received", received, Received, MESSAGE)
    check.labels("labels", labels, check.LARGEST_INT)
    check.optional(check.function, "encode", encode)
    with kept_streams():
        model, values = prediction(method, received.answer, data, received.payload)
    names = [*values]

    def simulate(images: Tensor) -> dict[str, Tensor]:
        inputs = images if encode is None else encode(images)
        logits = functional_call(model, values, (inputs,))
        loss = F.cross_entropy(logits, labels.to(logits.device))
        slopes = torch.autograd.grad(-loss, [*values.values()], create_graph=True)
        return dict(zip(names, slopes, strict=True))

    return simulate


def reconstructed(
    received: Received,
    simulate: Simulation,
    start: Float[Tensor, "batch channels height width"],
    *,
    steps: int = 300,
    learning_rate: float = 0.1,
    smoothness: float = 1e-3,
    bounds: tuple[float, float] = (0.0, 1.0),
) -> Float[Tensor, "batch channels height width"]:
    r"""Reconstruct the images of a batch from one message, by gradient matching.

    Adam minimizes, over images in `bounds`, one minus the cosine of the simulated change and of the
    change that the client sent, plus the total variation of the images:

    .. math:: 1 - \cos\big(g(x), M - a\big) + \lambda \mathrm{TV}(x)

    Args:
        received: Message of a client that made one step on one small batch.
        simulate: Function from images to the change that they cause (:func:`descent`). For other
            messages write your own, such as the class means of features for prototypes.
        start: First images, such as uniform noise.
        steps: Number of steps (at least 1).
        learning_rate: Learning rate of Adam (above 0). It falls to 0 along a cosine.
        smoothness: Factor :math:`\lambda` of the total variation (at least 0).
        bounds: Smallest and largest value of a pixel.

    Returns:
        Images, in an order that may differ from the order of the batch.

    Raises:
        ValueError: If the simulated change and the payload have no entry in common.

    Example:
        The gradient of a linear classifier contains the image.

        >>> image = torch.eye(4)[None, None]
        >>> def simulate(images):
        ...     return {"weight": images.flatten(1).mean(0)}
        >>> received = Received(0, 0, {}, {"weight": 3 * image.flatten()})
        >>> found = reconstructed(received, simulate, torch.full_like(image, 0.5))
        >>> similarities(found, image) > 0.99
        tensor([True])

    References:
        Geiping et al., "Inverting Gradients - How easy is it to break privacy in federated
        learning?", NeurIPS 2020. For prompts and adapters of a CLIP: Zhou et al., "MIP: CLIP-based
        Image Reconstruction from PEFT Gradients" (arXiv:2403.07901), of which the abstract was
        read. MIP predicts labels and estimates inverse gradients. Both are left out here: labels
        are known, and gradients are exact.
    """
    check.instance("received", received, Received, MESSAGE)
    check.function("simulate", simulate)
    check.number_tensor("start", start, "be floating-point images", ndim=4)
    check.some("start", len(start), "have at least one image")
    check.finite("start", start)
    check.count("steps", steps)
    check.number("learning_rate", learning_rate, above=0)
    check.number("smoothness", smoothness, at_least=0)
    check.pair("bounds", bounds, "be the smallest and the largest value")
    for place, bound in enumerate(bounds):
        check.number(f"bounds[{place}]", bound)
    check.require(bounds[0] < bounds[1], "bounds", "be in ascending order", bounds)
    check.gradients_are_recorded("reconstructed")
    images = start.detach().clone().requires_grad_()
    adam = torch.optim.Adam([images], learning_rate)
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
    # Fused attention has no second derivative.
    with kept_streams(), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        for _ in range(steps):
            loss = _apart(received, simulate(images)) + smoothness * _variation(images)
            (images.grad,) = torch.autograd.grad(loss, images)
            adam.step()
            falling.step()
            with torch.no_grad():
                images.clamp_(*bounds)
    return images.detach()


def _apart(received: Received, simulated: Mapping[str, Tensor | Weighted]) -> Tensor:
    """Return one minus the cosine of a simulated change and the received one."""
    names = [name for name in simulated if name in received.payload]
    check.some("simulate", names, "return an entry of `received.payload`")
    products = []
    for name in names:
        own = value_of(simulated[name])
        change = change_of(received.payload[name], received.answer.get(name)).to(own)
        products.append(torch.stack([(own * change).sum(), own.square().sum(),
                                     change.square().sum()]))  # fmt: skip
    return 1 - cosine(*torch.stack(products).sum(0))


def _variation(images: Tensor) -> Tensor:
    """Return the mean absolute difference of neighboring pixels."""
    sums = [images.diff(dim=axis).abs().sum() for axis in (-1, -2)]
    return (sums[0] + sums[1]) / images.numel()


def similarities(
    found: Float[Tensor, "batch channels height width"],
    images: Float[Tensor, "images channels height width"],
) -> Float[Tensor, " images"]:
    """Score each image by its largest correlation with a reconstruction.

    As scores of an attack, they say which images were in the batch: compare the images of the batch
    with held-out images of the same classes.

    Args:
        found: Reconstructions.
        images: Candidates.

    Returns:
        Pearson correlation over pixels, in [-1, 1], in float64 on the CPU.

    Example:
        >>> images = torch.eye(9).reshape(9, 1, 3, 3)
        >>> similarities(images[2:3] * 0.5 + 0.1, images).round(decimals=3)[:4]
        tensor([-0.1250, -0.1250,  1.0000, -0.1250], dtype=torch.float64)
    """
    for name, given in {"found": found, "images": images}.items():
        check.number_tensor(name, given, "be floating-point images", ndim=4)
        check.some(name, len(given), "have at least one image")
        check.finite(name, given)
    check.shape("found", found, (len(found), *images.shape[1:]), "the shape of `images`,")
    own, other = (each.flatten(1).double().cpu() for each in (found, images))
    own, other = (each - each.mean(1, keepdim=True) for each in (own, other))
    own, other = (F.normalize(each, dim=1) for each in (own, other))
    return (other @ own.T).amax(1)
