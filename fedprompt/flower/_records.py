"""Messages and client states in Flower's records."""

from typing import Any

from flwr.app import Array, ArrayRecord, RecordDict
from torch import Tensor

import fedprompt._refusals as check
from fedprompt._trees import from_blob, to_blob
from fedprompt.interfaces import Message, Weighted
from fedprompt.wire import Expected, Header, decode_payload, encode_payload

_MESSAGE = "fedprompt"
_STATE = "fedprompt-state"
SEED = "fedprompt-seed"
"""Record of a request, and its key, with the seed of the run."""

STATEFUL = "stateful"
"""Record of a reply whose client has a state that is not empty."""


def pack(message: Message, *, header: Header) -> RecordDict:
    """Encode a message (:func:`fedprompt.wire.encode_payload`) and put it into Flower's records.

    The encoded message is the content of one ``Array``. Flower sends arrays in chunks of 5 MiB, but
    a ``ConfigRecord`` in one piece. The strategies of Flower refuse to average such an array.

    Args:
        message: Tensors or entries by name.
        header: Header of the encoded message.

    Returns:
        Content for a ``flwr.app.Message``.

    Example:
        >>> records = pack({"scale": torch.tensor(4.5)}, header=Header(server_round=2))
        >>> unpack(records, expect=Expected({"scale": torch.tensor(0.0)}), max_bytes=1000)[0]
        {'scale': tensor(4.5000)}
    """
    return RecordDict({_MESSAGE: _record(encode_payload(message, header=header))})


def unpack(
    records: RecordDict, *, expect: Expected, max_bytes: int
) -> tuple[dict[str, Tensor | Weighted], Header]:
    """Decode a message from Flower's records (:func:`fedprompt.wire.decode_payload`).

    Args:
        records: Content of a ``flwr.app.Message``, which Flower has already read into memory.
        expect: Form and fingerprint of the expected message.
        max_bytes: Maximum size in bytes of the encoded and of the decoded message.

    Returns:
        The message and its header.

    Raises:
        ValueError: If `records` do not contain one message of the expected form and fingerprint.

    Example:
        >>> unpack(RecordDict(), expect=Expected({"scale": torch.tensor(0.0)}), max_bytes=1000)
        Traceback (most recent call last):
        ValueError: `records` must contain one blob under 'fedprompt', and nothing else; got [].
    """
    return decode_payload(blob_of(records), expect=expect, max_bytes=max_bytes)


def blob_of(records: RecordDict) -> bytes:
    """Return the encoded message in records that :func:`pack` made."""
    record: Any = records.get(_MESSAGE) if {*records} <= {_MESSAGE, SEED} else None
    single = isinstance(record, ArrayRecord) and list(record) == ["blob"]
    rule = f"contain one blob under {_MESSAGE!r}, and nothing else"
    check.require(single and record["blob"].stype == "safetensors", "records", rule, list(records))
    blob: bytes = record["blob"].data
    return blob


def remember(state: Any, records: RecordDict) -> None:
    """Store a state, a tree as of :func:`save_checkpoint`, in the records of a context."""
    records[_STATE] = _record(to_blob(state, "state"))


def remembered(records: RecordDict) -> Any:
    """Return the stored state, or ``{}``."""
    if _STATE not in records:
        return {}
    # It was written by this client, so it is not validated.
    return from_blob(records.array_records[_STATE]["blob"].data)


def _record(blob: bytes) -> ArrayRecord:
    return ArrayRecord({"blob": Array("uint8", (len(blob),), "safetensors", blob)})
