"""What is done to an upload on its way: bounds on its norm and its claims, and noise."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fedprompt._checks import (
    check_finite,
    check_number,
    check_payload,
    kind,
    known_rows,
    wrong_type,
    wrong_value,
)
from fedprompt.interfaces import Payload, Weighted
from fedprompt.privacy._lengths import clip_factors, scaled_down
from fedprompt.privacy.randomness import check_source, with_noise


def clip_norm(
    payload: Payload, *, max_norm: float, center: Mapping[str, Tensor] | None = None
) -> dict[str, Weighted]:
    r"""Shrink a payload until it is at most `max_norm` long, as one vector over all names.

    .. math:: v \mapsto c + (v - c) \cdot \min\bigl(1,\; C / \lVert v - c \rVert_2\bigr)

    With the broadcast as `center`, what is bounded is the change that a client asks for. A sum of weight times (value - center) then
    moves by at most C with one such payload, where no weight is above 1 (:func:`cap_weight`). Rows of weight 0 do not count, and become
    0, which may be far from `center`: sum them with their weight.
    The bound holds for what is returned, in its own precision: each number is rounded towards `center`, never away from it.

    Args:
        payload: From :func:`collect` or :func:`class_means`; on the client, or on a server that does not trust it.
        max_norm: C, above 0.
        center: From each name of the payload to a tensor of the shape, dtype and device of its value; None means 0.

    Returns:
        A new payload; unchanged in its known rows where it was short enough.

    Raises:
        TypeError: If an argument is of the wrong kind, or a dtype of `center` differs.
        ValueError: If `max_norm` is not above 0, `center` lacks a name or has another shape, a weight is negative, or a number is not
            finite.

    Example:
        A vector of length 5 over two names, shrunk to 1.

        >>> payload = {name: Weighted(torch.tensor([value]), torch.tensor(1.0)) for name, value in (("a", 3.0), ("b", -4.0))}
        >>> {name: round(upload.value.item(), 4) for name, upload in clip_norm(payload, max_norm=1.0).items()}
        {'a': 0.6, 'b': -0.8}

    References:
        McMahan et al., "Learning Differentially Private Recurrent Language Models", ICLR 2018, for clipped updates.
    """
    check_number("max_norm", max_norm, above=0)
    check_payload(payload)
    origin = {name: _origin(name, upload, center) for name, upload in payload.items()}
    halves = {name: _half_change(upload, origin[name]) for name, upload in payload.items()}
    rows = {name: half.reshape(1, -1) for name, half in halves.items()}
    scale, factor = clip_factors(list(rows.values()), max_norm=max_norm / 2)
    if bool(factor == scale):
        return {
            name: Weighted(known_rows(upload), upload.weight.clone())
            for name, upload in payload.items()
        }
    clipped = {}
    for name, upload in payload.items():
        change = (2 * factor * scaled_down(rows[name], scale)).reshape(upload.value.shape)
        moved = upload._replace(value=_towards(origin[name], change, upload.value))
        clipped[name] = Weighted(known_rows(moved), upload.weight.clone())
    return clipped


def cap_weight(payload: Payload, *, max_weight: float) -> dict[str, Weighted]:
    """Bound the evidence that a payload claims for any of its rows.

    A weight is the sender's claim: who claims a billion examples owns every mean. Cap it at what a client can have, on the server.

    Args:
        payload: As it arrived.
        max_weight: The largest weight of a row, above 0; rounded down to the dtype of the weights.

    Returns:
        A new payload with the same values.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If `max_weight` is not above 0, a weight is negative, or a number is not finite.

    Example:
        >>> payload = {"head": Weighted(torch.zeros(3), torch.tensor([2.0, 1e9, 0.0]))}
        >>> cap_weight(payload, max_weight=500)["head"].weight
        tensor([  2., 500.,   0.])
    """
    check_number("max_weight", max_weight, above=0)
    check_payload(payload)
    return {
        name: Weighted(value.clone(), _capped(weight, max_weight))
        for name, (value, weight) in payload.items()
    }


def gaussian_noise(
    payload: Payload,
    *,
    multiplier: float,
    sensitivity: float,
    generator: torch.Generator | None = None,
) -> dict[str, Weighted]:
    r"""Add independent Gaussian noise to every number of every known row.

    .. math:: v \mapsto v + \mathcal N(0, \sigma^2 I), \qquad \sigma = z \cdot \Delta

    The Gaussian mechanism. Clip the payload before, to norm C around a public `center`
    (:func:`clip_norm`). With weights of at most 1, it then adds at most :math:`\Delta = C` to a sum
    of weight times (value - center). With weights capped at W (:func:`cap_weight`), it adds at most
    W C. An accountant computes :math:`(\varepsilon, \delta)`. Weights are sent without noise, and
    so are the positions of the known rows.

    Noise is added in float64 and rounded once, to float32 at least. In half precision, noise of
    less than the spacing of the numbers would vanish in the rounding, and a sum over K clients
    would have less noise than :math:`\sigma \sqrt K`. For the same reason, encode the result
    without further rounding where only sums are seen.

    Args:
        payload: Clipped.
        multiplier: z, at least 0; 0 adds nothing.
        sensitivity: :math:`\Delta`, above 0.
        generator: Random source for tests and reproducible studies, on the CPU. If None, the
            operating system's entropy is used, as privacy requires.

    Returns:
        A new payload. Its values have the dtype of `payload`, or float32 in place of a half
        precision; its weights keep their dtype. Rows of weight 0 become 0.

    Raises:
        ValueError: If a number is out of range or not finite, a weight is negative, the noise is
            too large for the dtype or less than its spacing, or `generator` was never seeded.

    Example:
        >>> payload = {"head": Weighted(torch.zeros(100_000), torch.tensor(1.0))}
        >>> noisy = gaussian_noise(payload, multiplier=1.5, sensitivity=2.0)
        >>> round(noisy["head"].value.std().item(), 1)
        3.0

    References:
        Dwork and Roth, "The Algorithmic Foundations of Differential Privacy", 2014, Appendix A.
    """
    check_number("multiplier", multiplier, at_least=0)
    check_number("sensitivity", sensitivity, above=0)
    check_source(generator)
    check_payload(payload)
    sigma, noisy = multiplier * sensitivity, {}
    for name, upload in payload.items():
        argument, value = f"payload[{name!r}]", known_rows(upload)
        dtype = torch.promote_types(value.dtype, torch.float32)
        _check_spacing(argument, value, dtype, sigma)
        sent = with_noise(value, sigma=sigma, generator=generator).to(dtype)
        noisy[name] = Weighted(known_rows(upload._replace(value=sent)), upload.weight.clone())
        check_finite(f"{argument} with its noise", noisy[name].value)
    return noisy


def _check_spacing(argument: str, value: Tensor, dtype: torch.dtype, sigma: float) -> None:
    """Require noise as wide as the spacing of the numbers: rounding then only adds variance.

    See Widrow and Kollár, "Quantization Noise", 2008, on when rounding acts as independent noise.
    """
    largest = float(value.detach().abs().max()) if value.numel() else 0.0
    if 0 < sigma < (spacing := largest * torch.finfo(dtype).eps):
        rule = f"be at most {sigma / torch.finfo(dtype).eps:.3g} for noise of deviation {sigma:.3g}"
        raise wrong_value(
            f"{argument}.value",
            f"{rule} in {dtype}",
            f"{largest:.3g}, where numbers are {spacing:.3g} apart",
        )


def _origin(name: str, upload: Weighted, center: Mapping[str, Tensor] | None) -> Tensor:
    if center is None:
        return torch.zeros_like(upload.value, dtype=torch.float64)
    if name not in center:
        raise wrong_value("center", f"have the name {name!r}", sorted(center))
    tensor, argument = center[name], f"center[{name!r}]"
    if not isinstance(tensor, Tensor) or tensor.dtype != upload.value.dtype:
        raise wrong_type(
            argument, f"be a tensor of {upload.value.dtype}, as in the payload", kind(tensor)
        )
    if tensor.shape != upload.value.shape:
        raise wrong_value(
            argument,
            f"have the shape of the payload's value {tuple(upload.value.shape)}",
            tuple(tensor.shape),
        )
    check_finite(argument, tensor)
    return tensor.double()


def _half_change(upload: Weighted, origin: Tensor) -> Tensor:
    """Half of value less origin in the known rows: the whole may be too large for float64."""
    return known_rows(upload._replace(value=upload.value.double() / 2 - origin / 2))


def _towards(origin: Tensor, change: Tensor, like: Tensor) -> Tensor:
    """Round origin + change to the dtype of `like`, and where that lies further from the origin, to the neighbour on its side."""
    rounded = (origin + change).to(like.dtype)
    too_far = (rounded.double() - origin).abs() > change.abs()
    return torch.where(too_far, _neighbour(rounded, origin), rounded)


def _neighbour(tensor: Tensor, towards: Tensor) -> Tensor:
    """The next number of the dtype on the way to another one: as integers, the bits of floats of one sign count up from zero."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
    bits, up = tensor.view(integers), towards > tensor
    stepped = torch.where((tensor > 0) == up, bits + 1, bits - 1)
    smallest = torch.where(up, 1, torch.iinfo(integers).min + 1).to(integers)
    return torch.where(tensor == 0, smallest, stepped).view(tensor.dtype)


def _capped(weight: Tensor, max_weight: float) -> Tensor:
    limit = torch.tensor(min(max_weight, torch.finfo(weight.dtype).max), dtype=torch.float64).to(
        weight
    )
    return weight.clamp(
        max=limit if limit.item() <= max_weight else _neighbour(limit, torch.zeros_like(limit))
    )
