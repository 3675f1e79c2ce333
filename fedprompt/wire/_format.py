"""The layout of a blob, and the one way to write its header.

Because there is one way, a decoder can compare a header with the one that must have been written.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fedprompt._nouns as nouns
import fedprompt._refusals as check
from fedprompt._signatures import short_types
from fedprompt.interfaces import Message, Weighted

FORMAT = "fedprompt-2"
_BLANK = "0" * 64  # in place of the digest, while the digest is computed
_MAX_TEXT = 2**14  # bytes of a header's own text: parsed JSON takes up to 50 times its length
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPE = f"have a dtype of {', '.join(DTYPES.values())}"


class Header(NamedTuple):
    """Round, sender, fingerprint and notes of a message.

    Attributes:
        fingerprint: Text by part, from :func:`fingerprint`: the backbone, the prompts and the
            classes that the tensors belong to.
        server_round: Round (0-based).
        client_id: Id of the sender as text. It is the sender's claim.
        meta: Further notes, text by name.
    """

    fingerprint: Mapping[str, str] = {}
    server_round: int = 0
    client_id: str = ""
    meta: Mapping[str, str] = {}


@short_types
class Expected(NamedTuple):
    """Requirements of a receiver, stated before a blob is read.

    Attributes:
        message: Message of the same form: names, shapes, dtypes, and which entries are
            :class:`Weighted`. Its numbers are never read. Take ``snapshot(model)`` for a broadcast
            and ``collect(model, weight=0)`` for a payload.
        fingerprint: Parts that must equal those of the sender, from :func:`fingerprint`. Parts that
            are absent here are not compared.
        server_round: Round that the blob must belong to. If None, the round is not checked.
        client_id: Id of the sender as text. If None, the sender is not checked.
        max_abs: Largest magnitude of a value, above 0. A blob with a larger one is refused. The
            bound holds for floating-point tensors and for the values of :class:`Weighted` as they
            are sent; with a codec, for the numbers of the codec. Weights have a separate bound,
            :func:`cap_weight`. If None, every finite number is accepted.
    """

    message: Mapping[str, Any]
    fingerprint: Mapping[str, str] = {}
    server_round: int | None = None
    client_id: str | None = None
    max_abs: float | None = None


class Slot(NamedTuple):
    """Form of one tensor in a blob. For value rows, `shape` counts the rows that are sent."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def check_message(argument: str, message: Message) -> None:
    """Require a message that a blob can hold; numbers are not read. Errors name it `argument`."""
    check.names(argument, message, "map names to tensors or Weighted")
    rule = "have no name '__metadata__', nor one that ends in ':value' or ':weight'"
    reserved = [n for n in message if n == "__metadata__" or n.endswith((":value", ":weight"))]
    check.nothing(list(map(repr, reserved)), argument, rule)
    for name, entry in message.items():
        if not name.isascii():
            _check_unicode(argument, name)
        place = f"{argument}[{name!r}]"
        if isinstance(entry, Weighted):
            parts: tuple[Tensor, ...] = nouns.layout(place, entry)
        else:
            check.instance(place, entry, Tensor, "be a tensor or a Weighted")
            parts = (entry,)
        for part in parts:
            if part.dtype not in DTYPES:
                raise check.wrong_type(place, _DTYPE, part.dtype)
    check.dense_message(argument, message)


def slots(argument: str, message: Message) -> dict[str, Slot]:
    """Lay out a message with all its rows, by the keys of the blob; errors name it `argument`."""
    check_message(argument, message)
    laid: dict[str, Slot] = {}
    for name, entry in message.items():
        if isinstance(entry, Weighted):
            value, weight = entry
            rows = (weight.numel(), *value.shape[weight.ndim :])
            laid[f"{name}:value"] = Slot(value.dtype, rows)
            laid[f"{name}:weight"] = Slot(weight.dtype, tuple(weight.shape))
        else:
            laid[name] = Slot(entry.dtype, tuple(entry.shape))
    return laid


def offsets(laid: Mapping[str, Slot]) -> dict[str, int]:
    """Return the first byte of each tensor after the header, in the order of the blob.

    Wide dtypes come first, so that all tensors are aligned. Tensors of equal width are sorted by
    key.
    """
    keys = sorted(laid, key=lambda key: (-laid[key].dtype.itemsize, key))
    ends = accumulate(laid[key].num_bytes for key in keys)
    return {key: end - laid[key].num_bytes for key, end in zip(keys, ends, strict=True)}


def header_text(header: Header, laid: Mapping[str, Slot], digest: str = _BLANK) -> str:
    """Write the header: safetensors' JSON, padded with spaces to a multiple of 8 bytes."""
    entries: dict[str, Any] = {"__metadata__": _metadata(header, digest)}
    for key, start in offsets(laid).items():
        dtype, shape = laid[key]
        ends = [start, start + laid[key].num_bytes]
        entries[key] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": ends}
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":"))
    return text + " " * (-len(text.encode("utf-8", "surrogatepass")) % 8)


def longest_header(laid: Mapping[str, Slot]) -> int:
    """Return the largest length in bytes of a header that describes these tensors."""
    return len(header_text(Header(), laid).encode()) + _MAX_TEXT


def digest_of(
    header: Header, laid: Mapping[str, Slot], tensors: Iterable[bytes | memoryview]
) -> str:
    """Compute the SHA-256 of the header with a blank digest, followed by the tensors."""
    total = hashlib.sha256(header_text(header, laid).encode())
    for raw in tensors:
        total.update(raw)
    return total.hexdigest()


def check_expected(expect: Any, max_bytes: int) -> dict[str, Slot]:
    """Check the requirements of a receiver, and lay out the message that it expects."""
    check.instance("expect", expect, Expected, "be Expected(message, ...)")
    _check_texts("expect.fingerprint", expect.fingerprint)
    check.optional(check.count, "expect.server_round", expect.server_round, at_least=0)
    check.instance("expect.client_id", expect.client_id, str | None, "be a string or None")
    check.optional(check.number, "expect.max_abs", expect.max_abs, above=0)
    check.count("max_bytes", max_bytes)
    expected = slots("expect.message", expect.message)
    if (needed := sum(slot.num_bytes for slot in expected.values())) > max_bytes:
        rule = f"be at least {needed}, the size of `expect.message`"
        raise check.wrong("max_bytes", rule, max_bytes)
    return expected


def check_header(header: Header) -> None:
    """Require a header that can be written."""
    check.instance("header", header, Header, "be a Header")
    check.count("header.server_round", header.server_round, at_least=0)
    now = header.server_round
    check.require(now < 10**18, "header.server_round", "be below 10^18", now)
    for name in ("fingerprint", "meta"):
        _check_texts(f"header.{name}", getattr(header, name))
    check.text("header.client_id", header.client_id)
    text = json.dumps(_metadata(header, _BLANK), ensure_ascii=False)
    _check_unicode("header", text)
    if (length := len(text.encode())) > _MAX_TEXT:
        raise check.wrong("header", f"be at most {_MAX_TEXT} bytes long as text", length)


def _metadata(header: Header, digest: str) -> dict[str, str]:
    metadata = {"format": FORMAT, "client_id": header.client_id, "sha256": digest}
    metadata["server_round"] = str(header.server_round)
    metadata |= {f"fingerprint:{part}": text for part, text in header.fingerprint.items()}
    metadata |= {f"meta:{part}": text for part, text in header.meta.items()}
    return dict(sorted(metadata.items()))


def _check_texts(argument: str, texts: object) -> None:
    fits = isinstance(texts, Mapping) and all(isinstance(x, str) for x in chain(*texts.items()))
    check.typed(fits, argument, "map strings to strings", texts)


def _check_unicode(argument: str, text: str) -> None:
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise check.wrong(argument, "be text that UTF-8 can represent", repr(text)[:80])
