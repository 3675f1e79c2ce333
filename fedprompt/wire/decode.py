"""What arrives, taken apart: every check comes before the memory that it protects, and every refusal is a ValueError with its reason."""

import json
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from fedprompt._checks import wrong_value
from fedprompt.interfaces import Message, Weighted
from fedprompt.wire.format import (
    DTYPES,
    FORMAT,
    MAX_TEXT,
    Expected,
    Header,
    Slot,
    digest_of,
    header_text,
    offsets,
    value_key,
    weight_key,
)

Raw = np.ndarray[Any, np.dtype[np.uint8]]


def refuse(rule: str, got: object) -> NoReturn:
    """Refuse the blob; what it holds is shown in part, as it may be long, and without characters that do things to a log."""
    raise wrong_value(
        "blob",
        rule,
        "".join(each if each.isprintable() else repr(each)[1:-1] for each in str(got)[:120]),
    )


def read_header(blob: bytes, expected: Mapping[str, Slot]) -> tuple[dict[str, Any], str]:
    """Split off the header: its entries and its text."""
    if len(blob) < 8:
        refuse("start with the length of its header in 8 bytes", f"{len(blob)} bytes")
    length = int.from_bytes(blob[:8], "little")
    if length > len(blob) - 8:
        refuse(f"hold the {length} bytes of header that it announces", f"{len(blob) - 8} bytes")
    limit = len(header_text(Header(), expected).encode()) + MAX_TEXT
    if length > limit:
        refuse(f"have a header of at most {limit} bytes", length)
    try:
        text = blob[8 : 8 + length].decode()
        entries = json.loads(text, object_pairs_hook=_without_duplicates, parse_int=_integer)
    except RecursionError:
        refuse("have a header of JSON that is three levels deep", "more")
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        refuse("have a header of JSON", error)
    if not isinstance(entries, dict):
        refuse("have a JSON object as header", type(entries).__name__)
    return entries, text


def parse_metadata(metadata: object) -> tuple[Header, str]:
    """Make a :class:`Header` of the entry that is no tensor; and the digest."""
    if not isinstance(metadata, dict) or not all(
        isinstance(text, str) for text in metadata.values()
    ):
        refuse("have an entry '__metadata__' of strings", metadata)
    if metadata.get("format") != FORMAT:
        refuse(f"have the format {FORMAT!r}", repr(metadata.get("format")))
    server_round = metadata.get("server_round", "")
    if not (server_round.isascii() and server_round.isdigit() and len(server_round) <= 18):
        refuse("have a count as 'server_round'", repr(server_round))
    for key in ("client_id", "sha256"):
        if key not in metadata:
            refuse(f"have a {key!r}", "none")
    groups: dict[str, dict[str, str]] = {"fingerprint": {}, "meta": {}}
    for key, text in metadata.items():
        group, colon, part = key.partition(":")
        if colon and group in groups:
            groups[group][part] = text
    return Header(
        groups["fingerprint"], int(server_round), metadata["client_id"], groups["meta"]
    ), metadata["sha256"]


def check_origin(header: Header, expect: Expected) -> None:
    """Require every part that is expected; further ones of the fingerprint are the sender's own."""
    sent, expected = header.fingerprint, expect.fingerprint
    if differ := [part for part in expected if sent.get(part) != expected[part]]:
        wanted, got = ({part: side.get(part) for part in differ} for side in (expected, sent))
        refuse(f"come from the same {', '.join(differ)}, {wanted}", got)
    for part in ("server_round", "client_id"):
        wanted, got = getattr(expect, part), getattr(header, part)
        if wanted is not None and got != wanted:
            refuse(f"have the {part} {wanted!r}", repr(got))


def claimed_slots(
    entries: Mapping[str, Any], expected: Mapping[str, Slot], message: Message
) -> dict[str, Slot]:
    """Compare the form of every tensor with what is expected; only the number of value rows is the sender's to say."""
    if unknown := sorted(set(entries) - set(expected) - {"__metadata__"}):
        refuse("hold nothing but what is expected", f"{unknown[:5]} more")
    if missing := sorted(set(expected) - set(entries)):
        refuse("hold all that is expected", f"it without {missing[:5]}")
    open_rows = {value_key(name) for name, entry in message.items() if isinstance(entry, Weighted)}
    return {
        key: _claimed(key, entries[key], slot, key in open_rows) for key, slot in expected.items()
    }


def check_whole(
    text: str, digest: str, header: Header, claimed: Mapping[str, Slot], tensors: memoryview
) -> None:
    """Require that this header could only have been written for these tensors, that nothing lacks or follows, and that no bit differs."""
    if text != header_text(header, claimed, digest):
        refuse(
            "have a header as `encode_payload` writes it: keys, order, offsets without gaps, no spaces",
            text,
        )
    if len(tensors) != (total := sum(slot.num_bytes for slot in claimed.values())):
        refuse(f"hold {total} bytes of tensors", len(tensors))
    if (own := digest_of(header, claimed, [tensors])) != digest:
        refuse(
            f"have the content whose SHA-256 its header names, {digest[:12]}",
            f"{own[:12]}, so it was damaged",
        )


def pieces(tensors: memoryview, claimed: Mapping[str, Slot]) -> dict[str, Raw]:
    """Cut what follows the header into the bytes of each tensor; nothing is copied."""
    whole = np.frombuffer(tensors, np.uint8)
    return {
        key: whole[start : start + claimed[key].num_bytes]
        for key, start in offsets(claimed).items()
    }


def read_entry(
    raw: Mapping[str, Raw],
    name: str,
    entry: Tensor | Weighted,
    *,
    claimed: Mapping[str, Slot],
    max_abs: float | None,
) -> Tensor | Weighted:
    """Copy one tensor or :class:`Weighted` out of its bytes, as new memory of its own."""
    if not isinstance(entry, Weighted):
        return _bounded(name, _checked(name, _tensor(raw[name].copy(), claimed[name])), max_abs)
    weight = _checked(
        weight_key(name),
        _tensor(raw[weight_key(name)].copy(), claimed[weight_key(name)]),
        at_least=0.0,
    )
    known = (weight > 0).flatten().numpy()
    dtype, (count, *event) = claimed[value_key(name)]
    if count != (sent := int(known.sum())):
        refuse(f"hold the {sent} value rows of {name!r} whose weight is above 0", count)
    row_bytes = torch.Size(event).numel() * dtype.itemsize
    value = np.zeros(len(known) * row_bytes, np.uint8)
    if row_bytes:  # one item for a row, whatever its bytes mean
        value.view(f"V{row_bytes}")[known] = raw[value_key(name)].view(f"V{row_bytes}")
    rows = _checked(value_key(name), _tensor(value, Slot(dtype, (*weight.shape, *event))))
    return Weighted(_bounded(value_key(name), rows, max_abs), weight)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for key, entry in pairs:
        if key in entries:
            refuse("name every key once", f"two of {key!r}")
        entries[key] = entry
    return entries


def _integer(digits: str) -> int:
    if len(digits) > 20:
        refuse("write numbers in at most 20 digits", f"{len(digits)} of them")
    return int(digits)


def _claimed(key: str, entry: object, slot: Slot, open_rows: bool) -> Slot:
    if not isinstance(entry, dict):
        refuse(f"describe {key!r} by an object", type(entry).__name__)
    if entry.get("dtype") != DTYPES[slot.dtype]:
        refuse(f"hold {key!r} as {DTYPES[slot.dtype]}", repr(entry.get("dtype")))
    shape = entry.get("shape")
    if not isinstance(shape, list) or not all(
        type(size) is int for size in shape
    ):  # True is an int, too
        refuse(f"give {key!r} a shape of integers", shape)
    free = 1 if open_rows else 0
    fits = len(shape) == len(slot.shape) and tuple(shape[free:]) == slot.shape[free:]
    if not fits or (open_rows and not 0 <= shape[0] <= slot.shape[0]):
        most = "with at most as many rows as in " if open_rows else ""
        refuse(f"hold {key!r} in the shape {most}{slot.shape}", tuple(shape))
    return Slot(slot.dtype, tuple(shape))


def _tensor(raw: Raw, slot: Slot) -> Tensor:
    if slot.dtype == torch.bool and raw.size and raw.max() > 1:
        refuse("hold booleans as 0 or 1", int(raw.max()))
    flat = torch.from_numpy(raw).view(slot.dtype) if raw.size else torch.empty(0, dtype=slot.dtype)
    return flat.reshape(slot.shape)


def _checked(key: str, tensor: Tensor, *, at_least: float = -torch.inf) -> Tensor:
    """Require finite numbers; minimum and maximum need no memory, and carry NaN."""
    if tensor.is_floating_point() and tensor.numel():
        low, high = (bound.item() for bound in tensor.aminmax())
        if not (at_least <= low and -torch.inf < low and high < torch.inf):
            bound = "" if at_least < 0 else " of at least 0"
            refuse(f"hold finite numbers{bound} in {key!r}", f"numbers from {low} to {high}")
    return tensor


def _bounded(key: str, tensor: Tensor, max_abs: float | None) -> Tensor:
    """Require magnitudes within a bound; integers are codes or indices, and have none."""
    if max_abs is not None and tensor.is_floating_point() and tensor.numel():
        low, high = (bound.item() for bound in tensor.aminmax())
        if max(-low, high) > max_abs:
            refuse(
                f"hold numbers of magnitude {max_abs:g} or less in {key!r}",
                f"numbers from {low:g} to {high:g}",
            )
    return tensor
