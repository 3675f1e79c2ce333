"""Decoding: from a blob of an untrusted sender to a message.

Every check precedes the allocation that it protects. Every refusal is a ValueError with a reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

import fedprompt._refusals as check
from fedprompt._trees import parsed
from fedprompt.interfaces import Weighted
from fedprompt.wire import _format
from fedprompt.wire._format import DTYPES, FORMAT, Expected, Header, Slot, offsets

_Raw = np.ndarray[Any, np.dtype[np.uint8]]
_Slots = Mapping[str, Slot]


def decode_payload(
    blob: bytes, *, expect: Expected, max_bytes: int
) -> tuple[dict[str, Tensor | Weighted], Header]:
    """Read a blob completely, or refuse it.

    Only the output of :func:`encode_payload` for a message of the expected form is accepted. The
    encoding is canonical: decoding and encoding again gives the same bytes. Decoding runs no code
    of the sender. The SHA-256 digest detects accidental corruption. It does not authenticate the
    sender.

    Args:
        blob: Bytes that were received.
        expect: Form and fingerprint that the message must have; the round and the sender, where
            they are known.
        max_bytes: Maximum size in bytes of the blob, and of the message that it unfolds into. The
            tensors take at most twice that. Parsing the header takes at most 50 times its length,
            which is bounded by that of the header of `expect` plus 16 KiB.

    Returns:
        The message and its header. The tensors are on the CPU, in the order of names in `expect`;
        rows of weight 0 are zeros.

    Raises:
        TypeError: If `blob` is not ``bytes``. The content of `blob` never causes one.
        ValueError: If the blob is too long, truncated, damaged or malformed; if it holds NaN,
            infinity, a negative weight or a number beyond `expect.max_abs`; or if its form,
            fingerprint, round or sender is not as expected. The text names the part that differs.

    Example:
        >>> model = nn.Linear(4, 2)
        >>> header = Header({"backbone": "vit_tiny"}, server_round=3)
        >>> blob = encode_payload(collect(model, weight=30), header=header)
        >>> form = collect(model, weight=0)
        >>> expect = Expected(form, {"backbone": "vit_tiny"}, server_round=3)
        >>> message, header = decode_payload(blob, expect=expect, max_bytes=10_000)
        >>> torch.equal(message["bias"].value, model.bias), header.server_round
        (True, 3)
        >>> other = expect._replace(fingerprint={"backbone": "vit_small"})
        >>> decode_payload(blob, expect=other, max_bytes=10_000)
        Traceback (most recent call last):
        ValueError: `blob` must come from the same backbone, {'backbone': 'vit_small'}; got ...
    """
    expected = _format.check_expected(expect, max_bytes)
    if not isinstance(blob, bytes):
        raise check.wrong_type("blob", "be bytes", f"a {type(blob).__name__}")
    return read_blob(blob, expect, expected, max_bytes)


def read_blob(
    blob: bytes, expect: Expected, expected: _Slots, max_bytes: int
) -> tuple[dict[str, Tensor | Weighted], Header]:
    """Read a blob for a receiver whose requirements were checked and laid out."""
    if len(blob) > max_bytes:
        _refuse(f"be at most {max_bytes} bytes long", len(blob))
    text, tensors = _split(blob, expected)
    entries = _parse(text)
    header, digest = _read_metadata(entries.get("__metadata__"))
    _check_origin(header, expect)
    claimed = _claimed_slots(entries, expected)
    _check_whole(text, digest, header, claimed, tensors)
    whole = np.frombuffer(tensors, np.uint8)
    starts = offsets(claimed).items()
    raw = {key: whole[start : start + claimed[key].num_bytes] for key, start in starts}
    message = {name: _read_entry(name, raw, claimed, expect.max_abs) for name in expect.message}
    return message, header


def _refuse(rule: str, got: object) -> NoReturn:
    """Refuse the blob; show its content in part, without characters that could alter a log."""
    shown = "".join(char if char.isprintable() else repr(char)[1:-1] for char in str(got)[:120])
    raise check.wrong("blob", rule, shown)


def _split(blob: bytes, expected: _Slots) -> tuple[bytes, memoryview]:
    """Split a blob into the text of its header and the bytes of its tensors."""
    if len(blob) < 8:
        _refuse("start with the length of its header in 8 bytes", f"{len(blob)} bytes")
    length = int.from_bytes(blob[:8], "little")
    if length > len(blob) - 8:
        _refuse(f"hold the {length} bytes of header that it announces", f"{len(blob) - 8} bytes")
    if length > (limit := _format.longest_header(expected)):
        _refuse(f"have a header of at most {limit} bytes", length)
    return blob[8 : 8 + length], memoryview(blob)[8 + length :]


def _parse(text: bytes) -> dict[str, Any]:
    """Parse the JSON of a header."""
    try:
        entries = parsed(text.decode())
    except ValueError as error:  # wrong UTF-8 or JSON, too many levels or digits
        _refuse("have a header of JSON", error)
    if not isinstance(entries, dict):
        _refuse("have a JSON object as header", type(entries).__name__)
    return entries


def _read_metadata(metadata: object) -> tuple[Header, str]:
    """Read the :class:`Header` and the digest from the entry that is not a tensor."""
    if not isinstance(metadata, dict) or not all(
        isinstance(text, str) for text in metadata.values()
    ):
        _refuse("have an entry '__metadata__' of strings", metadata)
    if metadata.get("format") != FORMAT:
        _refuse(f"have the format {FORMAT!r}", repr(metadata.get("format")))
    server_round = metadata.get("server_round", "")
    if not (server_round.isascii() and server_round.isdigit() and len(server_round) <= 18):
        _refuse("have a count as 'server_round'", repr(server_round))
    for key in ("client_id", "sha256"):
        if key not in metadata:
            _refuse(f"have a {key!r}", "none")
    groups: dict[str, dict[str, str]] = {"fingerprint": {}, "meta": {}}
    for key, text in metadata.items():
        group, colon, part = key.partition(":")
        if colon and group in groups:
            groups[group][part] = text
    header = Header(groups["fingerprint"], int(server_round), metadata["client_id"], groups["meta"])
    return header, metadata["sha256"]


def _check_origin(header: Header, expect: Expected) -> None:
    """Require every expected part; further parts of the sender's fingerprint are ignored."""
    sent, expected = header.fingerprint, expect.fingerprint
    if differ := [part for part in expected if sent.get(part) != expected[part]]:
        wanted, got = ({part: side.get(part) for part in differ} for side in (expected, sent))
        _refuse(f"come from the same {', '.join(differ)}, {wanted}", got)
    if expect.server_round is not None and header.server_round != expect.server_round:
        _refuse(f"be of round {expect.server_round}", f"one of round {header.server_round}")
    if expect.client_id is not None and header.client_id != expect.client_id:
        _refuse(f"have the client_id {expect.client_id!r}", repr(header.client_id))


def _claimed_slots(entries: Mapping[str, Any], expected: _Slots) -> dict[str, Slot]:
    """Compare the form of every tensor; only the number of value rows is free."""
    if unknown := sorted(set(entries) - set(expected) - {"__metadata__"}):
        _refuse("have no other tensors than expected", f"also {unknown[:5]}")
    if missing := sorted(set(expected) - set(entries)):
        _refuse("have all tensors that are expected", f"none named {missing[:5]}")
    return {key: _claimed(key, entries[key], slot) for key, slot in expected.items()}


def _claimed(key: str, entry: object, slot: Slot) -> Slot:
    if not isinstance(entry, dict):
        _refuse(f"describe {key!r} by an object", type(entry).__name__)
    if entry.get("dtype") != DTYPES[slot.dtype]:
        _refuse(f"hold {key!r} as {DTYPES[slot.dtype]}", repr(entry.get("dtype")))
    shape = entry.get("shape")
    if not isinstance(shape, list) or not all(type(size) is int for size in shape):  # no booleans
        _refuse(f"give {key!r} a shape of integers", shape)
    free = 1 if key.endswith(":value") else 0  # the rows, and only a Weighted has such a key
    fits = len(shape) == len(slot.shape) and tuple(shape[free:]) == slot.shape[free:]
    if not fits or (free and not 0 <= shape[0] <= slot.shape[0]):
        most = "with at most as many rows as in " if free else ""
        _refuse(f"hold {key!r} in the shape {most}{slot.shape}", tuple(shape))
    return Slot(slot.dtype, tuple(shape))


def _check_whole(
    text: bytes, digest: str, header: Header, claimed: _Slots, tensors: memoryview
) -> None:
    """Require the one header that describes these tensors, all of their bytes, and the digest."""
    if text != _format.header_text(header, claimed, digest).encode("utf-8", "surrogatepass"):
        _refuse("have a header as `encode_payload` writes it", text.decode())
    if len(tensors) != (total := sum(slot.num_bytes for slot in claimed.values())):
        _refuse(f"hold {total} bytes of tensors", len(tensors))
    if (found := _format.digest_of(header, claimed, [tensors])) != digest:
        _refuse(f"have the SHA-256 {digest[:12]} of its header", f"{found[:12]} (damaged content)")


def _read_entry(
    name: str, raw: Mapping[str, _Raw], claimed: _Slots, max_abs: float | None
) -> Tensor | Weighted:
    """Copy one tensor or :class:`Weighted` out of the blob into new memory."""
    if name in raw:  # a tensor, because a Weighted has two other keys
        plain = _tensor(raw[name].copy(), claimed[name])
        _check_numbers(name, plain, max_abs=max_abs)
        return plain
    key = f"{name}:weight"
    weight = _tensor(raw[key].copy(), claimed[key])
    _check_numbers(key, weight, at_least=0.0)
    key = f"{name}:value"
    positive = (weight > 0).flatten().numpy()
    dtype, (count, *event) = claimed[key]
    if count != (sent := int(positive.sum())):
        _refuse(f"hold the {sent} value rows of {name!r} whose weight is above 0", count)
    row_bytes = torch.Size(event).numel() * dtype.itemsize
    value = np.zeros(len(positive) * row_bytes, np.uint8)
    if row_bytes:  # as one opaque item for each row
        value.view(f"V{row_bytes}")[positive] = raw[key].view(f"V{row_bytes}")
    rows = _tensor(value, Slot(dtype, (*weight.shape, *event)))
    _check_numbers(key, rows, max_abs=max_abs)
    return Weighted(rows, weight)


def _tensor(raw: _Raw, slot: Slot) -> Tensor:
    if slot.dtype == torch.bool and raw.size and raw.max() > 1:
        _refuse("hold booleans as 0 or 1", int(raw.max()))
    flat = torch.from_numpy(raw).view(slot.dtype) if raw.size else torch.empty(0, dtype=slot.dtype)
    return flat.reshape(slot.shape)


def _check_numbers(
    key: str, tensor: Tensor, *, at_least: float = -torch.inf, max_abs: float | None = None
) -> None:
    """Require finite numbers within the bounds; integers, which may be codes, have none.

    Minimum and maximum need no further memory, and both are NaN where a number is.
    """
    if not (tensor.is_floating_point() and tensor.numel()):
        return
    low, high = (bound.item() for bound in tensor.aminmax())
    got = f"numbers from {low:g} to {high:g}"
    if not (at_least <= low and -torch.inf < low and high < torch.inf):
        bound = "" if at_least < 0 else " of at least 0"
        _refuse(f"hold finite numbers{bound} in {key!r}", got)
    if max_abs is not None and max(-low, high) > max_abs:
        _refuse(f"hold numbers of magnitude {max_abs:g} or less in {key!r}", got)
