"""The text in front of a blob: written in one way only, so that what arrives can be compared with what must have been written."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedprompt._checks import check_count, checked_layout, kind, wrong_type, wrong_value
from fedprompt.interfaces import Message, Weighted

FORMAT = "fedprompt-2"
BLANK = "0" * 64  # where the digest will stand
MAX_TEXT = 2**14  # of a header's own text: parsed JSON takes up to 50 times its length
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
_VALUE, _WEIGHT = ":value", ":weight"


class Header(NamedTuple):
    """What travels beside the tensors of a message.

    Attributes:
        fingerprint: What the tensors were made for, part by part; from :func:`fingerprint`.
        server_round: 0-based.
        client_id: Of the sender; a claim, as everything that arrives.
        meta: Anything else, as text.
    """

    fingerprint: Mapping[str, str] = {}
    server_round: int = 0
    client_id: str = ""
    meta: Mapping[str, str] = {}


class Expected(NamedTuple):
    """What a receiver knows of a blob before it arrives.

    Attributes:
        message: A message of the same form: names, shapes, dtypes, and where a :class:`Weighted` stands. Its numbers are never read; take
            ``snapshot(model)`` for a broadcast and ``collect(model, weight=0)`` for an upload.
        fingerprint: Parts that must be those of the sender; from :func:`fingerprint`. Parts that are not named here are not compared.
        server_round: The round that the blob must belong to, so that what comes late is refused; None compares nothing.
        client_id: The name under which it must come; None compares nothing.
        max_abs: Largest magnitude of a value, above 0; a blob with a larger one is refused. It
            bounds floating-point tensors and the values of :class:`Weighted` as they are sent: with
            a codec, the numbers of the codec. Weights are counts of another scale; a server bounds
            them by :func:`cap_weight`. If None, every finite number is accepted.
    """

    message: Message
    fingerprint: Mapping[str, str] = {}
    server_round: int | None = None
    client_id: str | None = None
    max_abs: float | None = None


class Slot(NamedTuple):
    """The place of one tensor in a blob. Of value rows, `shape` counts those that travel."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def value_key(name: str) -> str:
    """Under which key the value rows of a :class:`Weighted` travel; a plain tensor travels under its name."""
    return name + _VALUE


def weight_key(name: str) -> str:
    """Under which key the weights travel."""
    return name + _WEIGHT


def slots(argument: str, message: Message) -> dict[str, Slot]:
    """Lay out a message with every row in it, by the keys of the blob; a malformed one is refused by the name `argument`."""
    if not isinstance(message, Mapping):
        raise wrong_type(argument, "map names to tensors or Weighted", kind(message))
    if not message:
        raise wrong_value(argument, "hold at least one name", "none")
    laid: dict[str, Slot] = {}
    for name, entry in message.items():
        _check_name(argument, name)
        if isinstance(entry, Weighted):
            value, weight = checked_layout(f"{argument}[{name!r}]", entry)
            laid[value_key(name)] = Slot(value.dtype, (weight.numel(), *value.shape[weight.ndim :]))
            laid[weight_key(name)] = Slot(weight.dtype, tuple(weight.shape))
        elif isinstance(entry, Tensor):
            laid[name] = Slot(entry.dtype, tuple(entry.shape))
        else:
            raise wrong_type(f"{argument}[{name!r}]", "be a tensor or a Weighted", kind(entry))
    if foreign := sorted(key for key, slot in laid.items() if slot.dtype not in DTYPES):
        raise wrong_type(
            f"{argument}[{foreign[0]!r}]",
            f"have a dtype of {', '.join(DTYPES.values())}",
            laid[foreign[0]].dtype,
        )
    return laid


def offsets(laid: Mapping[str, Slot]) -> dict[str, int]:
    """Where each tensor starts behind the header: wide dtypes first, so that all are aligned, then by key."""
    starts, start = {}, 0
    for key in sorted(laid, key=lambda key: (-laid[key].dtype.itemsize, key)):
        starts[key] = start
        start += laid[key].num_bytes
    return starts


def header_text(header: Header, laid: Mapping[str, Slot], digest: str = BLANK) -> str:
    """Write the one text that describes these tensors; safetensors' layout, padded to a multiple of 8 bytes."""
    entries: dict[str, Any] = {"__metadata__": _metadata(header, digest)}
    for key, start in offsets(laid).items():
        dtype, shape = laid[key]
        entries[key] = {
            "dtype": DTYPES[dtype],
            "shape": list(shape),
            "data_offsets": [start, start + laid[key].num_bytes],
        }
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":"))
    return text + " " * (-len(text.encode("utf-8", "surrogatepass")) % 8)


def digest_of(
    header: Header, laid: Mapping[str, Slot], tensors: Iterable[bytes | memoryview]
) -> str:
    """Hash the header, its digest left blank, and what follows it."""
    total = hashlib.sha256(header_text(header, laid).encode())
    for raw in tensors:
        total.update(raw)
    return total.hexdigest()


def check_header(header: Header) -> None:
    """Require a header that can be written."""
    if not isinstance(header, Header):
        raise wrong_type("header", "be a Header", kind(header))
    check_count("header.server_round", header.server_round, at_least=0)
    if header.server_round >= 10**18:
        raise wrong_value("header.server_round", "be below 10^18", header.server_round)
    for name in ("fingerprint", "meta"):
        check_texts(f"header.{name}", getattr(header, name))
    if not isinstance(header.client_id, str):
        raise wrong_type("header.client_id", "be a string", kind(header.client_id))
    text = json.dumps(_metadata(header, BLANK), ensure_ascii=False)
    _check_unicode("header", text)
    if len(text.encode()) > MAX_TEXT:
        raise wrong_value("header", f"be at most {MAX_TEXT} bytes long as text", len(text.encode()))


def check_texts(argument: str, texts: object) -> None:
    """Require a mapping of strings."""
    if not isinstance(texts, Mapping) or not all(
        isinstance(part, str) for pair in texts.items() for part in pair
    ):
        raise wrong_type(argument, "map strings to strings", kind(texts))


def _metadata(header: Header, digest: str) -> dict[str, str]:
    metadata = {
        "format": FORMAT,
        "server_round": str(header.server_round),
        "client_id": header.client_id,
        "sha256": digest,
    }
    metadata |= {f"fingerprint:{part}": text for part, text in header.fingerprint.items()}
    metadata |= {f"meta:{part}": text for part, text in header.meta.items()}
    return dict(sorted(metadata.items()))


def _check_name(argument: str, name: object) -> None:
    if not isinstance(name, str):
        raise wrong_type(argument, "have strings as names", kind(name))
    if name == "__metadata__" or name.endswith((_VALUE, _WEIGHT)):
        raise wrong_value(
            argument,
            "have no name '__metadata__', nor one that ends in ':value' or ':weight'",
            repr(name),
        )
    _check_unicode(argument, name)


def _check_unicode(argument: str, text: str) -> None:
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise wrong_value(argument, "be text that UTF-8 can hold", repr(text)[:80])
