"""Flower client apps."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, RecordDict
from flwr.app import Message as Envelope
from flwr.clientapp import ClientApp

import fedprompt._refusals as check
from fedprompt._random_streams import kept_streams
from fedprompt.checkpoint import load_checkpoint, save_checkpoint
from fedprompt.flower._records import SEED, STATEFUL, blob_of, pack, remember, remembered, unpack
from fedprompt.flower._rounds import CLIENT, Fingerprint, check_options, unchecked
from fedprompt.interfaces import Method, Weighted
from fedprompt.interfaces._calls import Calls, seed_of
from fedprompt.interfaces.method import Clients, check_takes_part, run_of
from fedprompt.wire import Expected, Header

_INITIAL: dict[str, Any] = {"asked": "", "before": {}, "after": {}}


def client_app(
    method: Method,
    data: Clients | Callable[[int, int], Any],
    *,
    max_bytes: int,
    fingerprint: Fingerprint = unchecked,
    directory: str | os.PathLike[str] | None = None,
) -> ClientApp:
    """Make a ``ClientApp`` that runs the client function of a method.

    The app also replies to :func:`client_nodes` with its client id, the ``partition-id`` of its
    node. An answer of the server that is refused becomes an error reply, and the state is
    unchanged. The app accepts any round number, because a later run may count from 0 again.

    If the server crashes before saving and repeats a round, the client recomputes its payloads from
    the state it had before that round. So the resumed run is bitwise identical to an unbroken one.

    Args:
        method: Method with a `form`. An answer must have the names, shapes and dtypes of the first
            answer to this client, ``method.server.answer(client, method.server.state)``.
        data: Federation of the client of this node, or a function (client, server_round) -> data of
            the client, as for :func:`run_rounds`. It is called with this client alone. The setting
            of the method names all clients, so that networks are given to them as at the server.
        max_bytes: Maximum size of an answer in bytes.
        fingerprint: Function from a client id to its :func:`~fedprompt.fingerprint`, the same as
            at the server. If it is not given, backbones are not compared.
        directory: Directory with a checkpoint folder for each client. A later run then continues
            from these states. Only one process at a time may run a client. If None, the state is
            kept in ``context.state``, which ends with the run.

    Returns:
        The app.

    Example:
        >>> def train(data, answer, state):
        ...     payload = {"head": Weighted(answer["head"] + data, torch.tensor(30.0))}
        ...     return payload, {"rounds": state.get("rounds", 0) + 1}
        >>> def predict(data, answer, state):
        ...     return torch.nn.Identity()  # in place of your model
        >>> def form(client):
        ...     return {"head": Weighted(torch.zeros(2), torch.tensor(0.0))}
        >>> server = averaging_server({"head": torch.zeros(2)})
        >>> method = Method(train, server, predict, form=form)
        >>> app = client_app(method, lambda client, server_round: client, max_bytes=10_000)
    """
    check_options(method, max_bytes, fingerprint)
    own_data, *_ = run_of(method, data, (), alone=False)

    def handle(message: Envelope, context: Context) -> Envelope:
        client = _partition(context)
        record: Any = message.content.get(SEED, {})
        seed = int(record.get(SEED, seed_of(method)))
        with kept_streams():
            form = Calls(method, seed, -1).answer(client, method.server.state)
        expect = Expected(form, fingerprint(client))
        folder = None if directory is None else Path(directory, str(client))
        sent, header = unpack(message.content, expect=expect, max_bytes=max_bytes)
        answer = {name: _beside(entry, form[name]) for name, entry in sent.items()}
        server_round, later = divmod(header.server_round, method.exchanges)
        memory = _recalled(context, folder)
        if not later:
            memory = _begun(memory, message.content)
        calls = Calls(method, seed, server_round, later)
        with kept_streams():
            own = calls.data(own_data, client)
            check_takes_part(own, client, server_round)
            payload, after = calls.train(client, own, answer, memory["after"])
        up = Header(expect.fingerprint, header.server_round, str(client))
        reply = RecordDict() if payload is None else pack(payload, header=up)
        if after:
            reply[STATEFUL] = ConfigRecord()
        _keep({**memory, "after": after}, context, folder)
        return Envelope(reply, reply_to=message)

    def identify(message: Envelope, context: Context) -> Envelope:
        record = ConfigRecord({CLIENT: _partition(context)})
        return Envelope(RecordDict({CLIENT: record}), reply_to=message)

    app = ClientApp()
    app.train()(handle)
    app.query(CLIENT)(identify)
    return app


def _beside(entry: Any, other: Any) -> Any:
    """Move an entry, which arrives on the CPU, to the device of another one."""
    if isinstance(entry, Weighted):
        return Weighted(*(part.to(like.device) for part, like in zip(entry, other, strict=True)))
    return entry.to(other.device)


def _recalled(context: Context, folder: Path | None) -> dict[str, Any]:
    """Return what a client remembers: its last round, and its states before and after it."""
    memory = remembered(context.state) if folder is None else load_checkpoint(folder, default={})
    return memory or _INITIAL


def _begun(memory: dict[str, Any], request: RecordDict) -> dict[str, Any]:
    """Begin a round with the last state, or a repeated round with the state before it."""
    asked = hashlib.sha256(blob_of(request)).hexdigest()
    before = memory["before"] if memory["asked"] == asked else memory["after"]
    return {"asked": asked, "before": before, "after": before}


def _keep(memory: dict[str, Any], context: Context, folder: Path | None) -> None:
    if folder is None:
        remember(memory, context.state)
    else:
        save_checkpoint(memory, folder)


def _partition(context: Context) -> int:
    partition = context.node_config.get("partition-id")
    if type(partition) is not int or partition < 0:
        rule = "have a partition-id, an integer of at least 0"
        raise check.wrong("context.node_config", rule, repr(partition))
    return partition
