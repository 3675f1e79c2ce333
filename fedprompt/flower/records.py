"""Our blobs in Flower's records, and what a client remembers."""

import json
from typing import Any

import safetensors.torch
from flwr.app import Array, ArrayRecord, RecordDict
from torch import Tensor

from fedprompt._checks import wrong_value
from fedprompt._trees import packed, unpacked
from fedprompt.interfaces import Message, Weighted
from fedprompt.wire import Expected, Header, decode_payload, encode_payload

_MESSAGE, _STATE = "fedprompt", "fedprompt-state"


def pack(message: Message, *, header: Header) -> RecordDict:
    """Put a message into Flower's records: one blob of :func:`fedprompt.encode_payload`, whatever its names, dtypes and shapes.

    The blob is the content of one ``Array``, because Flower sends arrays in chunks of 5 MiB, and a ``ConfigRecord`` as a whole. Flower's
    own strategies refuse to average it.

    Args:
        message: Tensors or :class:`~fedprompt.Weighted` by name.
        header: What travels beside them.

    Returns:
        Content for a ``flwr.app.Message``.

    Raises:
        TypeError: As :func:`fedprompt.encode_payload`.
        ValueError: The same.

    Example:
        >>> records = pack({"scale": torch.tensor(4.5)}, header=Header(server_round=2))
        >>> unpack(records, expect=Expected({"scale": torch.tensor(0.0)}), max_bytes=1000)[0]
        {'scale': tensor(4.5000)}
    """
    return RecordDict({_MESSAGE: _record(encode_payload(message, header=header))})


def unpack(
    records: RecordDict, *, expect: Expected, max_bytes: int
) -> tuple[dict[str, Tensor | Weighted], Header]:
    """Read a message out of Flower's records, all of it or nothing; see :func:`fedprompt.decode_payload`.

    Args:
        records: Content of a ``flwr.app.Message``. Flower holds it in memory by now: `max_bytes` bounds what comes of it.
        expect: What should be in it.
        max_bytes: At most so many bytes for the blob, and for the message.

    Returns:
        The message and its header.

    Raises:
        TypeError: If an argument is of the wrong kind; never for what `records` holds.
        ValueError: If `records` is not what :func:`pack` makes of a message of the expected form and fingerprint.

    Example:
        >>> unpack(RecordDict(), expect=Expected({"scale": torch.tensor(0.0)}), max_bytes=1000)
        Traceback (most recent call last):
        ValueError: `records` must hold one blob under 'fedprompt', and nothing else; got [].
    """
    return decode_payload(blob_of(records), expect=expect, max_bytes=max_bytes)


def blob_of(records: RecordDict) -> bytes:
    """Return the bytes that :func:`pack` put there, or refuse."""
    record = records.get(_MESSAGE) if len(records) == 1 else None
    if (
        not isinstance(record, ArrayRecord)
        or list(record) != ["blob"]
        or record["blob"].stype != "safetensors"
    ):
        raise wrong_value(
            "records", f"hold one blob under {_MESSAGE!r}, and nothing else", list(records)
        )
    blob: bytes = record["blob"].data
    return blob


def remember(state: Any, records: RecordDict) -> None:
    """Keep a tree, as of :func:`fedprompt.save_checkpoint`, in a context's records."""
    tensors: dict[str, Tensor] = {}
    tree = json.dumps(packed(state, "state", tensors))
    records[_STATE] = _record(safetensors.torch.save(tensors, {"state": tree}))


def remembered(records: RecordDict) -> Any:
    """Return what was kept last, or ``{}``."""
    if _STATE not in records:
        return {}
    blob = records.array_records[_STATE]["blob"].data  # this client's own: it never travelled
    header = json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")])
    return unpacked(json.loads(header["__metadata__"]["state"]), safetensors.torch.load(blob))


def _record(blob: bytes) -> ArrayRecord:
    return ArrayRecord({"blob": Array("uint8", (len(blob),), "safetensors", blob)})
