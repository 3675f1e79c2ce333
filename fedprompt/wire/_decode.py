"""Decoding: from a blob of an untrusted sender to a message.

Every check precedes the allocation that it protects. Every refusal is a ValueError with a reason.
"""

from collections.abc import Mapping
from typing import Any, cast

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
    check.require(
        isinstance(blob, bytes), "blob", "be bytes", f"a {type(blob).__name__}", TypeError
    )
    return read_blob(blob, expect, expected, max_bytes)


def read_blob(
    blob: bytes, expect: Expected, expected: _Slots, max_bytes: int
) -> tuple[dict[str, Tensor | Weighted], Header]:
    """Read a blob for a receiver whose requirements were checked and laid out."""
    _check(len(blob) <= max_bytes, f"be at most {max_bytes} bytes long", len(blob))
    text, tensors = _split(blob, expected)
    entries = _parse(text)
    header, digest = _read_metadata(entries.get("__metadata__"))
    _check_origin(header, expect)
    claimed = _claimed_slots(entries, expected)
    _check_whole(text, digest, header, claimed, tensors)
    whole = np.frombuffer(tensors, np.uint8)
    starts = offsets(claimed).items()
    raw = {key: whole[start : start + claimed[key].num_bytes] for key, start in starts}
    most = expect.max_abs or torch.inf
    return {name: _read_entry(name, raw, claimed, most) for name in expect.message}, header


def _check(holds: object, rule: str, got: object) -> None:
    """Require a rule; show content in part, without characters that could alter a log."""
    if not holds:
        shown = "".join(char if char.isprintable() else repr(char)[1:-1] for char in str(got)[:120])
        raise check.wrong("blob", rule, shown)


def _split(blob: bytes, expected: _Slots) -> tuple[bytes, memoryview]:
    """Split a blob into the text of its header and the bytes of its tensors."""
    size = len(blob) - 8
    _check(size >= 0, "start with the length of its header in 8 bytes", f"{len(blob)} bytes")
    length, limit = int.from_bytes(blob[:8], "little"), _format.longest_header(expected)
    rule = f"hold the {length} bytes of header that it announces"
    _check(length <= size, rule, f"{size} bytes")
    _check(length <= limit, f"have a header of at most {limit} bytes", length)
    return blob[8 : 8 + length], memoryview(blob)[8 + length :]


def _parse(text: bytes) -> dict[str, Any]:
    """Parse the JSON of a header."""
    try:
        entries: Any = parsed(text.decode())
    except ValueError as error:  # wrong UTF-8 or JSON, too many levels or digits
        entries = error
    _check(not isinstance(entries, ValueError), "have a header of JSON", entries)
    _check(isinstance(entries, dict), "have a JSON object as header", type(entries).__name__)
    return cast(dict[str, Any], entries)


def _read_metadata(metadata: Any) -> tuple[Header, str]:
    """Read the :class:`Header` and the digest from the entry that is not a tensor."""
    fits = isinstance(metadata, dict) and all(isinstance(text, str) for text in metadata.values())
    _check(fits, "have an entry '__metadata__' of strings", metadata)
    given = metadata.get("format")
    _check(given == FORMAT, f"have the format {FORMAT!r}", repr(given))
    server_round = metadata.get("server_round", "")
    fits = server_round.isascii() and server_round.isdigit() and len(server_round) <= 18
    _check(fits, "have a count as 'server_round'", repr(server_round))
    for key in ("client_id", "sha256"):
        _check(key in metadata, f"have a {key!r}", "none")
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
    differ = [part for part in expected if sent.get(part) != expected[part]]
    wanted, got = ({part: side.get(part) for part in differ} for side in (expected, sent))
    _check(not differ, f"come from the same {', '.join(differ)}, {wanted}", got)
    now, client = header.server_round, header.client_id
    fits = expect.server_round in (None, now)
    _check(fits, f"be of round {expect.server_round}", f"one of round {now}")
    fits = expect.client_id in (None, client)
    _check(fits, f"have the client_id {expect.client_id!r}", repr(client))


def _claimed_slots(entries: Mapping[str, Any], expected: _Slots) -> dict[str, Slot]:
    """Compare the form of every tensor; only the number of value rows is free."""
    unknown = sorted(set(entries) - set(expected) - {"__metadata__"})
    _check(not unknown, "have no other tensors than expected", f"also {unknown[:5]}")
    missing = sorted(set(expected) - set(entries))
    _check(not missing, "have all tensors that are expected", f"none named {missing[:5]}")
    return {key: _claimed(key, entries[key], slot) for key, slot in expected.items()}


def _claimed(key: str, entry: Any, slot: Slot) -> Slot:
    _check(isinstance(entry, dict), f"describe {key!r} by an object", type(entry).__name__)
    dtype, shape = entry.get("dtype"), entry.get("shape")
    _check(dtype == DTYPES[slot.dtype], f"hold {key!r} as {DTYPES[slot.dtype]}", repr(dtype))
    fits = isinstance(shape, list) and all(type(size) is int for size in shape)  # no booleans
    _check(fits, f"give {key!r} a shape of integers", shape)
    free = 1 if key.endswith(":value") else 0  # the rows, and only a Weighted has such a key
    fits = len(shape) == len(slot.shape) and tuple(shape[free:]) == slot.shape[free:]
    fits = fits and not (free and not 0 <= shape[0] <= slot.shape[0])
    most = "with at most as many rows as in " if free else ""
    _check(fits, f"hold {key!r} in the shape {most}{slot.shape}", tuple(shape))
    return Slot(slot.dtype, tuple(shape))


def _check_whole(
    text: bytes, digest: str, header: Header, claimed: _Slots, tensors: memoryview
) -> None:
    """Require the one header that describes these tensors, all of their bytes, and the digest."""
    fits = text == _format.header_text(header, claimed, digest).encode("utf-8", "surrogatepass")
    _check(fits, "have a header as `encode_payload` writes it", text.decode())
    total = sum(slot.num_bytes for slot in claimed.values())
    _check(len(tensors) == total, f"hold {total} bytes of tensors", len(tensors))
    found = _format.digest_of(header, claimed, [tensors])
    rule = f"have the SHA-256 {digest[:12]} of its header"
    _check(found == digest, rule, f"{found[:12]} (damaged content)")


def _read_entry(
    name: str, raw: Mapping[str, _Raw], claimed: _Slots, max_abs: float
) -> Tensor | Weighted:
    """Copy one tensor or :class:`Weighted` out of the blob into new memory."""
    if name in raw:  # a tensor, because a Weighted has two other keys
        return _tensor(name, raw[name].copy(), claimed[name], max_abs=max_abs)
    key = f"{name}:weight"
    weight = _tensor(key, raw[key].copy(), claimed[key], at_least=0.0)
    key = f"{name}:value"
    positive = (weight > 0).flatten().numpy()
    dtype, (count, *event) = claimed[key]
    rule = f"hold the {positive.sum()} value rows of {name!r} whose weight is above 0"
    _check(count == positive.sum(), rule, count)
    row_bytes = torch.Size(event).numel() * dtype.itemsize
    value = np.zeros(len(positive) * row_bytes, np.uint8)
    if row_bytes:  # as one opaque item for each row
        value.view(f"V{row_bytes}")[positive] = raw[key].view(f"V{row_bytes}")
    rows = _tensor(key, value, Slot(dtype, (*weight.shape, *event)), max_abs=max_abs)
    return Weighted(rows, weight)


def _tensor(
    key: str, raw: _Raw, slot: Slot, *, at_least: float = -torch.inf, max_abs: float = torch.inf
) -> Tensor:
    """Return a tensor of finite numbers within the bounds; integers, which may be codes, have none.

    Minimum and maximum need no further memory, and both are NaN where a number is.
    """
    if not raw.size:
        return torch.empty(slot.shape, dtype=slot.dtype)
    if slot.dtype == torch.bool:
        _check(raw.max() <= 1, "hold booleans as 0 or 1", raw.max())
    tensor = torch.from_numpy(raw).view(slot.dtype).reshape(slot.shape)
    if tensor.is_floating_point():
        low, high = (bound.item() for bound in tensor.aminmax())
        got = f"numbers from {low:g} to {high:g}"
        bound = "" if at_least < 0 else " of at least 0"
        fits = at_least <= low and -torch.inf < low and high < torch.inf
        _check(fits, f"hold finite numbers{bound} in {key!r}", got)
        rule = f"hold numbers of magnitude {max_abs:g} or less in {key!r}"
        _check(max(-low, high) <= max_abs, rule, got)
    return tensor
