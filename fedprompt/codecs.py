"""Uploads in fewer bytes: half precision, eight bits, or only the largest numbers."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from fedprompt._checks import (
    check_finite,
    check_form,
    check_number,
    check_payload,
    checked_layout,
    kind,
    known_rows,
    per_row,
    wrong_type,
    wrong_value,
)
from fedprompt.interfaces import Message, Payload, Weighted

__all__ = ["Codec", "float16", "int8", "top_k"]

State = Mapping[str, Any]
_SPARSE = ("/indices", "/values", "/weight")


@runtime_checkable
class Codec(Protocol):
    """Writes uploads in fewer bytes; what it must remember between rounds is the state. Its laws stand in ``tests/laws/test_codecs.py``."""

    def init(self, payload: Payload, /) -> State:
        """Make the state before the first round."""

    def encode(
        self, payload: Payload, state: State, /
    ) -> tuple[dict[str, Tensor | Weighted], State]:
        """Return a message whose form depends on that of the payload alone, and the new state."""

    def decode(self, message: Message, /, *, like: Payload) -> dict[str, Weighted]:
        """Return a payload of the form of `like`, whose numbers are not read."""


def float16() -> Codec:
    r"""Send values in half precision.

    Each number is off by at most :math:`2^{-11}` of itself, or :math:`2^{-25}` below :math:`2^{-14}`; what half precision can hold
    comes back as it was. Weights keep their dtype.

    Returns:
        A :class:`Codec` without state. It refuses, by a ValueError, a number that float16 cannot hold (65,520 or more).

    Example:
        >>> codec, payload = float16(), {"head": Weighted(torch.tensor([0.1, 2.0]), torch.tensor(3.0))}
        >>> message, state = codec.encode(payload, codec.init(payload))
        >>> num_bytes(payload), num_bytes(message)
        (12, 8)
        >>> codec.decode(message, like=payload)["head"].value
        tensor([0.1000, 2.0000])
    """
    return _NameByName(("",), _to_half, _from_half)


def int8() -> Codec:
    r"""Send each row as whole numbers from -127 to 127 and one float32 scale.

    The scale is the largest magnitude in the row over 127, so each number is off by at most a 254th of that, and by one rounding to its
    dtype; rows whose largest magnitude over 127 is a subnormal of float32, below 1.2e-38, are off by more. Whole multiples of the scale
    come back as they were. A row is what the weight has an entry for: a parameter with one weight has one scale.

    Returns:
        A :class:`Codec` without state. Codes of unknown rows travel, too, as zeros.

    Example:
        >>> codec, payload = int8(), {"head": Weighted(torch.tensor([[1.27, 0.1], [-6.35, 5.0]]), torch.tensor([3.0, 1.0]))}
        >>> message, state = codec.encode(payload, codec.init(payload))
        >>> message["head/codes"]
        tensor([[ 127,   10],
                [-127,  100]], dtype=torch.int8)
        >>> codec.decode(message, like=payload)["head"].value
        tensor([[ 1.2700,  0.1000],
                [-6.3500,  5.0000]])
    """
    return _NameByName(("/codes", "/scale"), _to_codes, _from_codes)


def top_k(*, fraction: float) -> Codec:
    r"""Send the largest numbers of each name and remember the rest for the next round (error feedback).

    .. math:: e_{t+1} = (v_t + e_t) - \mathrm{top}_k(v_t + e_t)

    What is not sent is read as 0, so the payload must be a change since the broadcast, not a parameter. Of d numbers with k sent, at most
    1 - k / d of the squared length is missing; nothing is lost, only late: what was sent so far and the state add up to all that was to
    be sent, in float64, which the state keeps whatever the dtype of the payload. Numbers of unknown rows are not chosen, and their part
    of the state waits. An index takes 2 bytes in a tensor of up to 32,767 numbers, and 4 in one of up to 2,147,483,647.

    Args:
        fraction: Of the numbers of each name, above 0 and at most 1; rounded up to a whole k.

    Returns:
        A :class:`Codec` whose state belongs to one client, to be handed back in its next round.

    Raises:
        TypeError: If `fraction` is not a number.
        ValueError: If it is out of range.

    Example:
        >>> codec, payload = top_k(fraction=0.25), {"head": Weighted(torch.tensor([1.0, -3.0, 2.0, 0.5]), torch.tensor(1.0))}
        >>> message, state = codec.encode(payload, codec.init(payload))
        >>> codec.decode(message, like=payload)["head"].value
        tensor([ 0., -3.,  0.,  0.])
        >>> message, state = codec.encode(payload, state)
        >>> codec.decode(message, like=payload)["head"].value  # 2 and the 2 of the round before
        tensor([0., 0., 4., 0.])

    References:
        Stich et al., "Sparsified SGD with Memory", NeurIPS 2018.
    """
    check_number("fraction", fraction, above=0, at_most=1)
    return _TopK(fraction)


@dataclass(frozen=True)
class _NameByName:
    """A codec that remembers nothing: one upload becomes a few parts, named after it."""

    suffixes: tuple[str, ...]
    shrink: Callable[[str, Weighted], tuple[Tensor | Weighted, ...]]
    restore: Callable[[str, list[Any], Weighted], Weighted]

    def init(self, payload: Payload, /) -> State:
        check_form("payload", payload)
        return {}

    def encode(
        self, payload: Payload, state: State, /
    ) -> tuple[dict[str, Tensor | Weighted], State]:
        check_payload(payload)
        message: dict[str, Tensor | Weighted] = {}
        for name, upload in payload.items():
            message |= _named(name, self.suffixes, self.shrink(name, upload))
        return message, state

    def decode(self, message: Message, /, *, like: Payload) -> dict[str, Weighted]:
        parts = _parts(message, like, self.suffixes)
        return {name: self.restore(name, parts[name], form) for name, form in like.items()}


def _to_half(name: str, upload: Weighted) -> tuple[Weighted]:
    value = known_rows(upload).detach().half()
    check_finite(f"payload[{name!r}] in float16", value)
    return (Weighted(value, upload.weight.detach().clone()),)


def _from_half(name: str, parts: list[Any], like: Weighted) -> Weighted:
    (upload,) = parts
    _check_upload(f"message[{name!r}]", upload, torch.float16, like.value.shape, like.weight)
    return _restored(name, upload, like)


def _to_codes(name: str, upload: Weighted) -> tuple[Tensor, Weighted]:
    value, weight = known_rows(upload).detach().double(), upload.weight.detach()
    rows = value.flatten(weight.ndim) if value.ndim > weight.ndim else value[..., None]
    scale = (rows.abs().amax(-1) / 127 if rows.shape[-1] else torch.zeros_like(weight)).float()
    check_finite(f"payload[{name!r}] over 127, in float32", scale)
    too_large = (
        127 * scale.double() > torch.finfo(upload.value.dtype).max
    )  # rounded up, at the end of the range
    scale = torch.where(too_large, scale.nextafter(torch.zeros_like(scale)), scale)
    codes = value / per_row(torch.where(scale > 0, scale, 1.0).double(), value)
    return codes.round().clamp(-127, 127).to(torch.int8), Weighted(scale, weight.clone())


def _from_codes(name: str, parts: list[Any], like: Weighted) -> Weighted:
    codes, scale = parts
    _check_tensor(f"message['{name}/codes']", codes, torch.int8, like.value.shape)
    _check_upload(f"message['{name}/scale']", scale, torch.float32, like.weight.shape, like.weight)
    return _restored(
        name, Weighted(codes.double() * per_row(scale.value.double(), codes), scale.weight), like
    )


@dataclass(frozen=True)
class _TopK:
    fraction: float

    def init(self, payload: Payload, /) -> State:
        return {
            name: torch.zeros_like(upload.value, dtype=torch.float64)
            for name, upload in check_form("payload", payload).items()
        }

    def encode(
        self, payload: Payload, state: State, /
    ) -> tuple[dict[str, Tensor | Weighted], State]:
        check_payload(payload)
        if not isinstance(state, Mapping) or set(state) != set(payload):
            raise wrong_value(
                "state",
                f"come from `init` or the last `encode` of {sorted(payload)}",
                kind(state)[:120],
            )
        message: dict[str, Tensor | Weighted] = {}
        waiting = {}
        for name, upload in payload.items():
            _check_tensor(f"state[{name!r}]", state[name], torch.float64, upload.value.shape)
            wanted = (known_rows(upload).detach() + state[name]).flatten()
            known = per_row(upload.weight > 0, upload.value).expand_as(upload.value).flatten()
            largest = (
                torch.where(known, wanted.abs(), -1.0)
                .topk(self.count(upload.value))
                .indices.sort()
                .values
            )
            sent = torch.where(known, wanted, 0.0)[largest].to(upload.value.dtype)
            check_finite(f"payload[{name!r}] with its state", sent)
            message |= _named(
                name,
                _SPARSE,
                (largest.to(_index_dtype(known.numel())), sent, upload.weight.detach().clone()),
            )
            waiting[name] = wanted.index_add(0, largest, sent.double(), alpha=-1).reshape(
                upload.value.shape
            )
        return message, waiting

    def decode(self, message: Message, /, *, like: Payload) -> dict[str, Weighted]:
        return {
            name: self.restore(name, parts, like[name])
            for name, parts in _parts(message, like, _SPARSE).items()
        }

    def restore(self, name: str, parts: list[Any], like: Weighted) -> Weighted:
        indices, sent, weight = parts
        count, size = torch.Size([self.count(like.value)]), like.value.numel()
        _check_tensor(f"message['{name}/indices']", indices, _index_dtype(size), count)
        _check_tensor(f"message['{name}/values']", sent, like.value.dtype, count)
        _check_tensor(f"message['{name}/weight']", weight, like.weight.dtype, like.weight.shape)
        places = torch.cat([indices.new_tensor([-1]), indices, indices.new_tensor([size])]).long()
        if not bool((places[1:] > places[:-1]).all()):
            raise wrong_value(
                f"message['{name}/indices']",
                f"rise, from 0 or more to below {size}",
                indices[:5].tolist(),
            )
        value = sent.new_zeros(size).index_put((indices.long(),), sent).reshape(like.value.shape)
        return _restored(name, Weighted(value, weight), like)

    def count(self, value: Tensor) -> int:
        return math.ceil(
            self.fraction * value.numel() * (1 - 1e-12)
        )  # .07 of 100 is 7, not the 7.000000000000001 that floats make of it


def _index_dtype(size: int) -> torch.dtype:
    """The narrowest that counts to `size`."""
    return next(
        dtype for dtype in (torch.int16, torch.int32, torch.int64) if size <= torch.iinfo(dtype).max
    )


def _named(
    name: str, suffixes: tuple[str, ...], parts: tuple[Tensor | Weighted, ...]
) -> dict[str, Tensor | Weighted]:
    return {name + suffix: part for suffix, part in zip(suffixes, parts, strict=True)}


def _restored(name: str, upload: Weighted, like: Weighted) -> Weighted:
    value = known_rows(upload).to(like.value.dtype)
    check_finite(f"message[{name!r}] in {str(value.dtype).removeprefix('torch.')}", value)
    return Weighted(value, upload.weight.clone())


def _parts(message: object, like: Payload, suffixes: tuple[str, ...]) -> dict[str, list[Any]]:
    names = {name: [name + suffix for suffix in suffixes] for name in check_form("like", like)}
    if not isinstance(message, Mapping):
        raise wrong_type("message", "map names to tensors or Weighted", kind(message))
    if set(message) != (wanted := {part for parts in names.values() for part in parts}):
        raise wrong_value("message", f"have the names {sorted(wanted)}", sorted(map(str, message)))
    return {name: [message[part] for part in parts] for name, parts in names.items()}


def _check_upload(
    argument: str, upload: object, dtype: torch.dtype, shape: torch.Size, weight: Tensor
) -> None:
    sent = checked_layout(argument, upload)
    _check_tensor(f"{argument}.value", sent.value, dtype, shape)
    _check_tensor(f"{argument}.weight", sent.weight, weight.dtype, weight.shape)


def _check_tensor(argument: str, tensor: object, dtype: torch.dtype, shape: torch.Size) -> None:
    if not isinstance(tensor, Tensor) or tensor.dtype != dtype:
        raise wrong_type(argument, f"be a tensor of {dtype}", kind(tensor))
    if tensor.shape != shape:
        raise wrong_value(argument, f"have shape {tuple(shape)}", tuple(tensor.shape))
