"""Clipping, capped weights and Gaussian noise for the payloads of clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

import fedprompt._nouns as nouns
import fedprompt._refusals as check
from fedprompt._conversions import widened
from fedprompt._names import STATISTICS
from fedprompt.interfaces import Payload, Weighted
from fedprompt.privacy._randomness import check_source, deviation, with_noise

_NO_STATISTICS = (
    "have no running statistics, whose variances noise would make negative; keep them in the state "
    "of each client: snapshot(module, buffers=True)"
)


def clip_norm(
    payload: Payload, *, max_norm: float, center: Mapping[str, Tensor] | None = None
) -> dict[str, Weighted]:
    r"""Clip a payload to at most norm `max_norm`, as one vector over all names.

    .. math:: v \mapsto c + (v - c) \cdot \min\bigl(1,\; C / \lVert v - c \rVert_2\bigr)

    With the broadcast as `center`, the change of a client is clipped. If weights are at most 1
    (:func:`cap_weight`), one payload then moves a sum of weight times (value - center) by at most
    C. The bound also holds after rounding to the dtype of the payload.

    Rows of weight 0 are ignored and become 0. That may be far from `center`, so a sum must multiply
    rows by their weights.

    Args:
        payload: Payload of :func:`collect` or :func:`class_means`. Clip it on the client, or on a
            server that does not trust the client.
        max_norm: Bound C (above 0).
        center: Tensor for each name of the payload (same shape, dtype and device as the value). If
            None, the center is 0.

    Returns:
        A new payload. If the norm was within the bound, its known rows are unchanged.

    Raises:
        ValueError: If `center` lacks a name, a weight is negative, or a number is not finite.

    Example:
        A vector of norm 5 over two names is scaled to norm 1.

        >>> one = torch.tensor(1.0)
        >>> payload = {"a": Weighted(3 * one, one), "b": Weighted(-4 * one, one)}
        >>> clipped = clip_norm(payload, max_norm=1.0)
        >>> {name: round(entry.value.item(), 4) for name, entry in clipped.items()}
        {'a': 0.6, 'b': -0.8}

    References:
        McMahan et al., "Learning Differentially Private Recurrent Language Models", ICLR 2018.
    """
    check.number("max_norm", max_norm, above=0)
    nouns.payload(payload)
    check.optional(check.tensors, "center", center)
    origin = {
        name: widened(torch.zeros_like(entry.value))
        if center is None
        else widened(nouns.value_of("center", center, name, entry))
        for name, entry in payload.items()
    }
    rows = {}
    for name, entry in payload.items():  # half of the change, because it may overflow float64
        half = widened(entry.value) / 2 - origin[name] / 2
        rows[name] = Weighted(half, entry.weight.to(half.device)).known.reshape(1, -1)
    scale, factor = clip_factors(list(rows.values()), max_norm=max_norm / 2)
    too_long = bool(factor != scale)
    clipped = {}
    for name, entry in payload.items():
        if too_long:
            change = (2 * factor * scaled_down(rows[name], scale)).reshape(entry.value.shape)
            nearest = _rounded(origin[name], change, entry.value.dtype)
            entry = entry._replace(value=nearest.to(entry.value.device))
        clipped[name] = Weighted(entry.known, entry.weight.clone())
    return clipped


def cap_weight(payload: Payload, *, max_weight: float) -> dict[str, Weighted]:
    """Cap the weight of each row of a payload.

    Weights are self-reported. A client that reports a billion examples dominates every mean. Cap
    weights on the server, at the largest number of examples that a client can plausibly have.

    Args:
        payload: Payload as received from a client.
        max_weight: Largest weight of a row (above 0). Rounded down in the dtype of the weights.

    Returns:
        A new payload with the same values.

    Raises:
        ValueError: If a weight is negative, or a number is not finite.

    Example:
        >>> payload = {"head": Weighted(torch.zeros(3), torch.tensor([2.0, 1e9, 0.0]))}
        >>> cap_weight(payload, max_weight=500)["head"].weight
        tensor([  2., 500.,   0.])
    """
    check.number("max_weight", max_weight, above=0)
    nouns.payload(payload)
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
    r"""Add independent Gaussian noise to all known rows of a payload (the Gaussian mechanism).

    .. math:: v \mapsto v + \mathcal N(0, \sigma^2 I), \qquad \sigma = z \cdot \Delta

    Clip the payload first, to norm C around a public `center` (:func:`clip_norm`). With weights of
    at most 1, the payload adds at most :math:`\Delta = C` to a sum of weight times (value -
    center). With weights capped at W (:func:`cap_weight`), it adds at most :math:`\Delta = W C`. An
    accountant computes :math:`(\varepsilon, \delta)`. The weights and the positions of the known
    rows receive no noise.

    Noise is added in float64. The result is rounded once, to float32 or float64. In half precision,
    noise below the spacing of the numbers would disappear, and a sum over K clients would have less
    noise than :math:`\sigma \sqrt K`. If the server sees only sums, do not round the result again.

    Args:
        payload: Clipped payload.
        multiplier: Noise multiplier z (at least 0).
        sensitivity: Sensitivity :math:`\Delta` (above 0).
        generator: Random generator for tests and reproducible studies (seeded, on the CPU). If
            None, the operating system's entropy is used, as privacy requires.

    Returns:
        A new payload with the dtypes of `payload`, except that half-precision values become
        float32. Rows of weight 0 become 0.

    Raises:
        ValueError: If a number is not finite, a weight is negative, `generator` was never seeded,
            or the noise overflows or underflows the dtype, or is below the spacing of the numbers.
            Or if the payload has running statistics, because noise makes variances negative.

    Example:
        >>> payload = {"head": Weighted(torch.zeros(100_000), torch.tensor(1.0))}
        >>> noisy = gaussian_noise(payload, multiplier=1.5, sensitivity=2.0)
        >>> round(noisy["head"].value.std().item(), 1)
        3.0

    References:
        Dwork and Roth, "The Algorithmic Foundations of Differential Privacy", 2014, Appendix A.
    """
    check.number("multiplier", multiplier, at_least=0)
    check.number("sensitivity", sensitivity, above=0)
    check_source(generator)
    nouns.payload(payload)
    statistics = [name for name in payload if name.rpartition(".")[2] in STATISTICS]
    check.nothing(statistics, "payload", _NO_STATISTICS)
    dtypes = [torch.promote_types(entry.value.dtype, torch.float32) for entry in payload.values()]
    sigma = deviation(multiplier, sensitivity, dtypes=dtypes)
    noisy = {}
    for (name, entry), dtype in zip(payload.items(), dtypes, strict=True):
        argument = f"payload[{name!r}]"
        value = entry.known
        _check_spacing(argument, value, dtype, sigma)
        sent = with_noise(value, sigma=sigma, generator=generator).to(dtype).to(value.device)
        noisy[name] = Weighted(entry._replace(value=sent).known, entry.weight.clone())
        check.finite(f"{argument} with its noise", noisy[name].value)
    return noisy


def _check_spacing(argument: str, value: Tensor, dtype: torch.dtype, sigma: float) -> None:
    """Require noise at least as wide as the spacing of the numbers.

    Rounding then only adds variance: see Widrow and Kollár, "Quantization Noise", 2008.
    """
    largest = float(value.detach().abs().max()) if value.numel() else 0.0
    if 0 < sigma < (spacing := largest * torch.finfo(dtype).eps):
        bound = f"{sigma / torch.finfo(dtype).eps:.3g}"
        rule = f"be at most {bound} for noise of deviation {sigma:.3g} in {dtype}"
        got = f"{largest:.3g}, where numbers are {spacing:.3g} apart"
        raise check.wrong(f"{argument}.value", rule, got)


def clip_factors(
    rows: Sequence[Float[Tensor, "batch _"]], *, max_norm: float
) -> tuple[Float[Tensor, " batch"], Float[Tensor, " batch"]]:
    """Compute `scale` and `factor` for which ``row / scale * factor`` has at most norm `max_norm`.

    The entries of one vector are spread over all `rows`. A vector within the bound has
    ``factor == scale``. Each scale is a power of two near the largest entry of its vector. Division
    by it is exact, and no square overflows or underflows.
    """
    peak = torch.zeros(len(rows[0]), dtype=torch.float64, device=rows[0].device)
    for row in rows:
        if row.shape[1]:
            peak = torch.maximum(peak, row.detach().abs().amax(1).to(peak))
    exponents = peak.view(torch.int64) & (0x7FF << 52)
    scale = exponents.view(torch.float64).clamp(min=torch.finfo(torch.float64).tiny)
    parts = [torch.linalg.vector_norm(scaled_down(row.detach(), scale), dim=1) for row in rows]
    norm = torch.stack([part.to(peak.device) for part in parts]).norm(dim=0)
    margin = 1 - 2**-40  # covers the rounding errors of the norm
    return scale, torch.where(norm > max_norm / scale, max_norm / norm * margin, scale)


def scaled_down(row: Float[Tensor, "batch _"], scale: Float[Tensor, " batch"]) -> Tensor:
    """Divide each vector by its scale, in float64."""
    return row / scale[:, None]  # the division promotes, so `row` is never copied in float64


def _rounded(origin: Tensor, change: Tensor, dtype: torch.dtype) -> Tensor:
    """Round origin + change to a dtype, so that it is never further from the origin than `change`.

    Where rounding moves a number away from the origin, it is moved back by one or two units in the
    last place, and at most to the origin.
    """
    rounded = (origin + change).to(dtype).double()
    unit = _unit_in_the_last_place(rounded, dtype)
    back = torch.where((rounded - origin).abs() > unit, rounded - change.sign() * unit, origin)
    too_far = (rounded - origin).abs() > change.abs()
    return torch.where(too_far, back, rounded).to(dtype)


def _capped(weight: Tensor, max_weight: float) -> Tensor:
    """Cap weights at `max_weight`, or a unit or two in the last place below it."""
    limit = torch.tensor(max_weight, dtype=torch.float64, device="cpu").to(weight.dtype).double()
    limit = limit.clamp(max=torch.finfo(weight.dtype).max)
    if limit.item() > max_weight:
        limit = limit - _unit_in_the_last_place(limit, weight.dtype)
    return weight.clamp(max=limit.to(weight))


def _unit_in_the_last_place(number: Tensor, dtype: torch.dtype) -> Tensor:
    """Bound the spacing of a dtype near a number from above, by less than twice the spacing."""
    info = torch.finfo(dtype)
    return number.abs().clamp(min=info.smallest_normal) * info.eps
