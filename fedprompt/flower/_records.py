"""Messages and client states in Flower's records."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from io import BytesIO
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

import fedprompt._refusals as check
from fedprompt._trees import from_blob, to_blob
from fedprompt.interfaces import Message, Weighted
from fedprompt.wire import Expected, Header, decode_payload, encode_payload

_MESSAGE = "fedprompt"
_STATE = "fedprompt-state"
EXAMPLES = "num-examples"
"""Key of a weight in Flower's metrics."""
_CODED = "safetensors, encoded by fedprompt: noise and clipping of Flower need plain=True"
"""Serialization of encoded messages. Flower prints it where a wrapper would change them."""
_ROUND = "server-round"  # in the config of Flower's strategies, counted from 1
_OF_NUMPY = (torch.float64, torch.float32, torch.float16)
_SENT = {"|i1", "|u1", "|b1", *(f"<{kind}{size}" for kind in "fiu" for size in (2, 4, 8))}
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
_ONE_WEIGHT = "have entries of one common weight; others are sent with plain=False"
_SAME_NAMES = "have the names of the answer; others are sent with plain=False"
STATEFUL = "stateful"
"""Record of a reply whose client has a state that is not empty."""
COUNTS = ("asked", "accepted", "bytes_down", "bytes_up", "clients", "images")
"""Metrics that the strategy adds to the means of the clients' metrics."""


class Accepted(NamedTuple):
    """Payload in a reply, or None without one, its number of bytes, and the client's metrics."""

    payload: Message | None
    size: int
    figures: dict[str, float]


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
    record: Any = records.get(_MESSAGE) if len(records) == 1 else None
    single = isinstance(record, ArrayRecord) and list(record) == ["blob"]
    rule = f"contain one blob under {_MESSAGE!r}, and nothing else"
    check.require(single and record["blob"].stype == _CODED, "records", rule, list(records))
    blob: bytes = record["blob"].data
    return blob


class Form(Protocol):
    """How messages stand in Flower's records."""

    def request(
        self, answer: Message, header: Header, config: Mapping[str, Any]
    ) -> tuple[RecordDict, bytes]:
        """Return the records of an answer, and bytes that tell it from other answers."""

    def received(
        self, records: RecordDict, expect: Expected, max_bytes: int, configured: bool
    ) -> tuple[Message, Header, str]:
        """Return the answer in records, its header, and a digest that tells it from others."""

    def reply(self, payload: Message | None, answer: Message, header: Header) -> RecordDict:
        """Return the records of a payload."""

    def accepted(self, records: RecordDict, expect: Expected, max_bytes: int) -> Accepted:
        """Return the payload in records."""


class Encoded:
    """Any message, encoded and checked, which wrappers and modifiers of Flower cannot change."""

    def request(
        self, answer: Message, header: Header, config: Mapping[str, Any]
    ) -> tuple[RecordDict, bytes]:
        """Encode an answer."""
        records = pack(answer, header=header)
        return records, blob_of(records)

    def received(
        self, records: RecordDict, expect: Expected, max_bytes: int, configured: bool
    ) -> tuple[Message, Header, str]:
        """Decode an answer."""
        answer, header = unpack(records, expect=expect, max_bytes=max_bytes)
        return answer, header, hashlib.sha256(blob_of(records)).hexdigest()

    def reply(self, payload: Message | None, answer: Message, header: Header) -> RecordDict:
        """Encode a payload."""
        return RecordDict() if payload is None else pack(payload, header=header)

    def accepted(self, records: RecordDict, expect: Expected, max_bytes: int) -> Accepted:
        """Decode a payload."""
        if not records:
            return Accepted(None, 0, {})
        payload, _ = unpack(records, expect=expect, max_bytes=max_bytes)
        return Accepted(payload, len(blob_of(records)), {})


class Plain:
    """Values of one weight as Flower's own arrays, as its wrappers and modifiers expect them."""

    def request(
        self, answer: Message, header: Header, config: Mapping[str, Any]
    ) -> tuple[RecordDict, bytes]:
        """Return the arrays of an answer, with the config of the round."""
        place = {"fingerprint": dict(header.fingerprint), "meta": dict(header.meta)}
        own: dict[str, Any] = {_ROUND: header.server_round + 1, _MESSAGE: json.dumps(place)}
        arrays = arrays_of(answer)
        records = RecordDict({"arrays": arrays, "config": ConfigRecord({**config, **own})})
        return records, _bytes_of(arrays) + json.dumps(place).encode()

    def received(
        self, records: RecordDict, expect: Expected, max_bytes: int, configured: bool
    ) -> tuple[Message, Header, str]:
        """Read an answer."""
        kinds = [len(records.array_records), len(records.config_records), len(records)]
        check.require(kinds == [1, 1, 2], "records", "have arrays and a config", list(records))
        (arrays,), (config,) = records.array_records.values(), records.config_records.values()
        others = sorted(key for key in config if key not in (_ROUND, _MESSAGE))
        rule = "be empty, because a method reads its setting; for a modifier, pass it as `mods`"
        check.require(configured or not others, "config", rule, others)
        place: Any = {"fingerprint": {}, "meta": {}}
        place |= json.loads(str(config.get(_MESSAGE, "{}")))
        number: Any = config.get(_ROUND)  # strategies of Flower send nothing else
        check.count(f"config[{_ROUND!r}]", number)
        header = Header(place["fingerprint"], number - 1, "", place["meta"])
        same = all(header.fingerprint.get(k) == v for k, v in expect.fingerprint.items())
        check.require(same, "fingerprint", "be of the same backbone", dict(header.fingerprint))
        answer = tensors_of(arrays, expect.message, max_bytes)
        digest = hashlib.sha256(_bytes_of(arrays) + str(header).encode()).hexdigest()
        return answer, header, digest

    def reply(self, payload: Message | None, answer: Message, header: Header) -> RecordDict:
        """Return the arrays of a payload, with its weight as the number of examples."""
        values, weight = (answer, 0.0) if payload is None else plain_of(payload)
        check.require(values.keys() == answer.keys(), "payload", _SAME_NAMES, list(values))
        in_order = {name: values[name] for name in answer}
        metrics = MetricRecord({EXAMPLES: weight})
        return RecordDict({"arrays": arrays_of(in_order), "metrics": metrics})

    def accepted(self, records: RecordDict, expect: Expected, max_bytes: int) -> Accepted:
        """Read a payload."""
        kinds = [len(records.array_records), len(records.metric_records), len(records)]
        check.require(kinds == [1, 1, 2], "records", "have arrays and metrics", list(records))
        (arrays,), (metrics,) = records.array_records.values(), records.metric_records.values()
        figures = figures_of(metrics)
        entries: Any = expect.message
        weight: Any = metrics.get(EXAMPLES, math.nan)
        own = {n: torch.tensor(weight, dtype=each.weight.dtype) for n, each in entries.items()}
        valid = all(0 <= each < math.inf for each in own.values())
        rule = f"have {EXAMPLES!r}, a finite number of at least 0"
        check.require(valid, "metrics", rule, weight)
        values = tensors_of(arrays, {n: each.value for n, each in entries.items()}, max_bytes)
        for name, value in values.items():
            bound = math.inf if expect.max_abs is None else expect.max_abs
            within = not value.numel() or value.abs().max().item() <= bound
            got = "a larger one"
            check.require(within, f"payload[{name!r}]", f"be of magnitude {bound:g} or less", got)
        payload = {n: Weighted(value, own[n]) for n, value in values.items()} if weight else None
        return Accepted(payload, len(_bytes_of(arrays)), figures)


def figures_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a reply beside its number of examples. All of them are averaged."""
    numbers = all(isinstance(value, int | float) for value in metrics.values())
    check.require(numbers, "metrics", "have numbers, which are averaged", dict(metrics))
    rule = f"have other names than {', '.join(COUNTS)}, which the strategy counts"
    check.require(metrics.keys().isdisjoint(COUNTS), "metrics", rule, list(metrics))
    return {name: float(value) for name, value in metrics.items() if name != EXAMPLES}


def plain_of(payload: Message) -> tuple[dict[str, Tensor], float]:
    """Return the values of a payload and their common weight."""
    parts: Any = payload
    weighted = all(isinstance(e, Weighted) and e.weight.ndim == 0 for e in parts.values())
    check.require(weighted and parts, "payload", _ONE_WEIGHT, list(parts))
    weights = {each.weight.item() for each in parts.values()}
    check.require(len(weights) == 1, "payload", _ONE_WEIGHT, sorted(weights))
    return {name: each.value for name, each in parts.items()}, float(weights.pop())


def arrays_of(tensors: Mapping[str, Any]) -> ArrayRecord:
    """Return tensors as Flower's arrays; those of dtypes that NumPy lacks become float32."""
    made = {}
    for name, tensor in tensors.items():
        own = tensor.detach().cpu()
        half = own.is_floating_point() and own.dtype not in _OF_NUMPY
        made[name] = Array((own.float() if half else own).numpy())
    return ArrayRecord(made)


def tensors_of(
    arrays: ArrayRecord, like: Mapping[str, Any], max_bytes: int | None = None
) -> dict[str, Tensor]:
    """Return arrays as finite tensors of the names, shapes and dtypes of other tensors."""
    rule = f"have the names {list(like)}"
    check.require(set(arrays) == set(like), "arrays", rule, list(arrays))
    size = sum(len(array.data) for array in arrays.values())
    if max_bytes is not None:
        check.require(size <= max_bytes, "arrays", f"be at most {max_bytes} bytes long", size)
    tensors = {}
    for name, other in like.items():
        found = _tensor_of(f"arrays[{name!r}]", arrays[name], tuple(other.shape))
        tensors[name] = found.to(other.dtype)
        check.finite(f"arrays[{name!r}]", tensors[name])
    return tensors


def _tensor_of(argument: str, array: Array, shape: tuple[int, ...]) -> Tensor:
    """Read an array of this shape. Its header may claim anything, and allocates nothing."""
    file = BytesIO(array.data)
    try:
        header = _HEADERS[np.lib.format.read_magic(file)]
        claimed, in_columns, dtype = header(file)
    except (KeyError, ValueError) as error:
        raise check.wrong(argument, "be an array of NumPy", error) from error
    check.require(claimed == shape, argument, f"have shape {shape}", claimed)
    check.require(dtype.str in _SENT, argument, "have a dtype of PyTorch", dtype)
    content = file.read()
    size = dtype.itemsize * math.prod(shape)
    check.require(len(content) == size, argument, f"have {size} bytes", len(content))
    order: Any = "F" if in_columns else "C"
    numbers = np.frombuffer(content, dtype).reshape(shape, order=order)
    return torch.from_numpy(numbers.copy(order="C"))


def all_tensors(tree: Any, name: str = "") -> dict[str, Tensor]:
    """Return the tensors of a tree by their path, such as ``values.head``."""
    if isinstance(tree, Tensor):
        return {name: tree}
    if hasattr(tree, "_asdict"):
        tree = tree._asdict()
    if not isinstance(tree, Mapping | list | tuple):
        return {}
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
    found: dict[str, Tensor] = {}
    for key, part in items:
        found |= all_tensors(part, f"{name}.{key}" if name else str(key))
    return found


def encoded_state(state: Any) -> ArrayRecord:
    """Return a state as one array, which is no array of NumPy."""
    return _record(to_blob(state, "state"))


def _bytes_of(arrays: ArrayRecord) -> bytes:
    return b"".join(array.data for _, array in sorted(arrays.items()))


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
    return ArrayRecord({"blob": Array("uint8", (len(blob),), _CODED, blob)})
