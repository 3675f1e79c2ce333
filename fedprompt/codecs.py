"""Payloads in fewer bytes: half precision, eight bits, or the largest numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import fedprompt._nouns as nouns
import fedprompt._refusals as check
from fedprompt._conversions import widened
from fedprompt.interfaces import Codec, Message, Payload, State, Weighted
from fedprompt.interfaces.nouns import per_row

__all__ = ["float16", "int8", "top_k"]

_SPARSE = ("/indices", "/values", "/weight")


def float16() -> Codec:
    r"""Send values in half precision.

    The error of a number is at most :math:`2^{-11}` of its magnitude, or :math:`2^{-25}` for
    magnitudes below :math:`2^{-14}`. Numbers that half precision can represent are exact. Weights
    keep their dtype.

    Returns:
        A :class:`~fedprompt.interfaces.Codec` with an empty state. Encoding raises a ValueError for
        numbers that float16 cannot represent (65,520 or more).

    Example:
        >>> codec = float16()
        >>> payload = {"head": Weighted(torch.tensor([0.1, 2.0]), torch.tensor(3.0))}
        >>> message, state = codec.encode(payload, codec.init(payload))
        >>> num_bytes(payload), num_bytes(message)
        (12, 8)
        >>> codec.decode(message, like=payload)["head"].value
        tensor([0.1000, 2.0000])
    """
    return _NameByName("float16()", ("",), _to_half, _from_half)


def int8() -> Codec:
    r"""Send each row as integers from -127 to 127 and one float32 scale.

    The scale is the largest magnitude of the row, divided by 127. So the error of a number is at
    most a 254th of that magnitude, and one rounding to the dtype. The error is larger in rows whose
    scale is a subnormal number of float32 (below 1.2e-38). Integer multiples of the scale are
    exact. A row has one weight; a parameter with one weight has one scale.

    Returns:
        A :class:`~fedprompt.interfaces.Codec` with an empty state. Codes of unknown rows are sent
        as zeros.

    Example:
        >>> codec = int8()
        >>> value = torch.tensor([[1.27, 0.1], [-6.35, 5.0]])
        >>> payload = {"head": Weighted(value, torch.tensor([3.0, 1.0]))}
        >>> message, state = codec.encode(payload, codec.init(payload))
        >>> message["head/codes"]
        tensor([[ 127,   10],
                [-127,  100]], dtype=torch.int8)
        >>> codec.decode(message, like=payload)["head"].value
        tensor([[ 1.2700,  0.1000],
                [-6.3500,  5.0000]])
    """
    return _NameByName("int8()", ("/codes", "/scale"), _to_codes, _from_codes)


def top_k(*, fraction: float) -> Codec:
    r"""Send the largest numbers of each name, and the rest later (error feedback).

    .. math:: e_{t+1} = (v_t + e_t) - \mathrm{top}_k(v_t + e_t)

    Numbers that are not sent are decoded as 0. So the payload must be a change since the broadcast,
    not a parameter; :func:`fedprompt.rounds.coded` subtracts the answer. If k of d numbers are
    sent, at most 1 - k / d of the squared length is missing.

    The missing part is the state. It is kept in float64 and added in the next round: sent numbers
    and state always sum to everything that was to be sent. Numbers of unknown rows are not
    selected; their state waits. An index takes 2 bytes in tensors of up to 32,767 numbers, and 4
    bytes in tensors of up to 2,147,483,647.

    Args:
        fraction: Fraction of the numbers of each name, above 0 and at most 1. It is rounded up to a
            whole k.

    Returns:
        A :class:`~fedprompt.interfaces.Codec`. Its state belongs to one client; pass it back in the
        client's next round.

    Example:
        >>> codec = top_k(fraction=0.25)
        >>> change = torch.tensor([1.0, -3.0, 2.0, 0.5])
        >>> payload = {"head": Weighted(change, torch.tensor(1.0))}
        >>> message, state = codec.encode(payload, codec.init(payload))
        >>> codec.decode(message, like=payload)["head"].value
        tensor([ 0., -3.,  0.,  0.])
        >>> message, state = codec.encode(payload, state)
        >>> codec.decode(message, like=payload)["head"].value  # 2, and the 2 of the first round
        tensor([0., 0., 4., 0.])

    References:
        Stich et al., "Sparsified SGD with Memory", NeurIPS 2018.
    """
    check.number("fraction", fraction, above=0, at_most=1)
    shrink = partial(_to_few, fraction=fraction)
    restore = partial(_from_few, fraction=fraction)
    return _NameByName(f"top_k({fraction=:.6g})", _SPARSE, shrink, restore, needs_changes=True)


@dataclass(frozen=True, repr=False)
class _NameByName:
    """Codec of single entries: each becomes a few parts, named after it, and may leave a rest."""

    name: str
    suffixes: tuple[str, ...]
    shrink: Callable[[str, Weighted, Any], tuple[tuple[Tensor | Weighted, ...], Any]]
    restore: Callable[[str, list[Any], Weighted], Weighted]
    needs_changes: bool = False
    """Whether numbers are left out, so that a payload must be a change since the answer."""

    def __repr__(self) -> str:
        return self.name

    def init(self, payload: Payload, /) -> State:
        form = nouns.form("payload", payload)
        return {
            name: widened(entry.value.new_zeros(entry.value.shape))
            for name, entry in form.items()
            if self.needs_changes
        }

    def encode(
        self, payload: Payload, state: State, /
    ) -> tuple[dict[str, Tensor | Weighted], State]:
        nouns.payload(payload)
        names = set(payload) if self.needs_changes else set()
        rule = f"come from `init` or the last `encode` of {sorted(payload)}"
        fits = isinstance(state, Mapping) and set(state) == names
        check.require(fits, "state", rule, check.kind(state))
        message: dict[str, Tensor | Weighted] = {}
        rest = {}
        for name, entry in payload.items():
            parts, rest[name] = self.shrink(name, entry, state.get(name))
            message |= zip(_keys(name, self.suffixes), parts, strict=True)
        return message, rest if self.needs_changes else state

    def decode(self, message: Message, /, *, like: Payload) -> dict[str, Weighted]:
        parts = _parts(message, like, self.suffixes)
        return {name: self.restore(name, parts[name], form) for name, form in like.items()}


def _to_half(name: str, entry: Weighted, rest: None) -> tuple[tuple[Weighted], None]:
    value = entry.known.detach().half()
    check.finite(f"payload[{name!r}] in float16", value)
    return (Weighted(value, entry.weight.detach().clone()),), None


def _from_half(name: str, parts: list[Any], like: Weighted) -> Weighted:
    (entry,) = parts
    _check_entry(f"message[{name!r}]", entry, torch.float16, like.value.shape, like.weight)
    return _restored(name, entry, like)


def _to_codes(name: str, entry: Weighted, rest: None) -> tuple[tuple[Tensor, Weighted], None]:
    value = widened(entry.known.detach())
    weight = entry.weight.detach()
    rows = value.flatten(weight.ndim) if value.ndim > weight.ndim else value[..., None]
    scale = (rows.abs().amax(-1) / 127 if rows.shape[-1] else rows.new_zeros(weight.shape)).float()
    check.finite(f"payload[{name!r}] over 127, in float32", scale)
    # A scale that was rounded up could overflow at the end of the dtype's range.
    too_large = 127 * scale.double() > torch.finfo(entry.value.dtype).max
    scale = torch.where(too_large, scale.nextafter(torch.zeros_like(scale)), scale)
    codes = value / per_row(torch.where(scale > 0, scale, 1.0).double(), value)
    codes = codes.round().clamp(-127, 127).to(torch.int8).to(weight.device)
    return (codes, Weighted(scale.to(weight.device), weight.clone())), None


def _from_codes(name: str, parts: list[Any], like: Weighted) -> Weighted:
    codes, scale = parts
    check.tensor(f"message['{name}/codes']", codes, torch.int8, like.value.shape)
    _check_entry(f"message['{name}/scale']", scale, torch.float32, like.weight.shape, like.weight)
    wide = widened(codes) * per_row(widened(scale.value), codes)
    value = wide.to(like.value.dtype).to(codes.device)
    return _restored(name, Weighted(value, scale.weight), like)


def _to_few(
    name: str, entry: Weighted, rest: Tensor, *, fraction: float
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    value, weight = entry
    check.tensor(f"state[{name!r}]", rest, torch.float64, value.shape)
    wanted = (widened(entry.known.detach()) + rest).flatten()
    mask = per_row(weight > 0, value).expand_as(value).flatten().to(wanted.device)
    magnitude = torch.where(mask, wanted.abs(), -1.0)
    largest = magnitude.topk(_count(value, fraction)).indices.sort().values
    sent = torch.where(mask, wanted, 0.0)[largest].to(value.dtype)
    check.finite(f"payload[{name!r}] with its state", sent)
    waiting = wanted.index_add(0, largest, sent.double(), alpha=-1).reshape(value.shape)
    indices = largest.to(_index_dtype(value.numel())).to(value.device)
    return (indices, sent.to(value.device), weight.detach().clone()), waiting


def _from_few(name: str, parts: list[Any], like: Weighted, *, fraction: float) -> Weighted:
    indices, sent, weight = parts
    count = torch.Size([_count(like.value, fraction)])
    size = like.value.numel()
    check.tensor(f"message['{name}/indices']", indices, _index_dtype(size), count)
    check.tensor(f"message['{name}/values']", sent, like.value.dtype, count)
    check.tensor(f"message['{name}/weight']", weight, like.weight.dtype, like.weight.shape)
    places = torch.cat([indices.new_tensor([-1]), indices, indices.new_tensor([size])]).long()
    if not bool((places[1:] > places[:-1]).all()):
        rule = f"increase within [0, {size})"
        raise check.wrong(f"message['{name}/indices']", rule, indices[:5].tolist())
    value = sent.new_zeros(size).index_put((indices.long(),), sent).reshape(like.value.shape)
    return _restored(name, Weighted(value, weight), like)


def _count(value: Tensor, fraction: float) -> int:
    # 0.07 * 100 is 7.000000000000001 in floating point, and must give 7.
    return math.ceil(fraction * value.numel() * (1 - 1e-12))


def _index_dtype(size: int) -> torch.dtype:
    """Return the narrowest integer dtype that can represent `size`."""
    dtypes = (torch.int16, torch.int32, torch.int64)
    return next(dtype for dtype in dtypes if size <= torch.iinfo(dtype).max)


def _keys(name: str, suffixes: tuple[str, ...]) -> list[str]:
    return [name + suffix for suffix in suffixes]


def _restored(name: str, entry: Weighted, like: Weighted) -> Weighted:
    nouns.weights(f"message[{name!r}]", entry)
    value = entry.known.to(like.value.dtype)
    check.finite(f"message[{name!r}] in {str(value.dtype).removeprefix('torch.')}", value)
    return Weighted(value, entry.weight.clone())


def _parts(message: Any, like: Payload, suffixes: tuple[str, ...]) -> dict[str, list[Any]]:
    keys = {name: _keys(name, suffixes) for name in nouns.form("like", like)}
    check.instance("message", message, Mapping, "map names to tensors or Weighted")
    if set(message) != (wanted := {key for parts in keys.values() for key in parts}):
        raise check.wrong("message", f"have the names {sorted(wanted)}", sorted(map(str, message)))
    return {name: [message[key] for key in parts] for name, parts in keys.items()}


def _check_entry(
    argument: str, entry: object, dtype: torch.dtype, shape: torch.Size, weight: Tensor
) -> None:
    sent = nouns.layout(argument, entry)
    check.tensor(f"{argument}.value", sent.value, dtype, shape)
    check.tensor(f"{argument}.weight", sent.weight, weight.dtype, weight.shape)
