"""Flower client apps."""

import copy
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, RecordDict
from flwr.app import Message as Envelope
from flwr.clientapp import ClientApp

from fedprompt._checks import wrong_value
from fedprompt.checkpoint import load_checkpoint, save_checkpoint
from fedprompt.flower.records import blob_of, pack, remember, remembered, unpack
from fedprompt.interfaces import Message
from fedprompt.wire import Expected, Header

CLIENT = "client"  # name of the query for the client id, and key of its reply
INITIAL: dict[str, Any] = {"asked": "", "before": {}, "after": {}}


def client_app(
    client: Callable[[int, int, Message, Any], tuple[Message, Any]],
    *,
    expect: Callable[[int], Expected],
    max_bytes: int,
    directory: str | os.PathLike[str] | None = None,
) -> ClientApp:
    """Make a ``ClientApp`` from a function that computes one round of one client.

    The app also replies to :func:`client_nodes` with its client id, the ``partition-id`` of its
    node. A broadcast that is refused becomes an error reply, and the state is unchanged. The app
    accepts any round number, because a later run counts from 0 again.

    If the server crashes before saving and repeats a broadcast, the client recomputes its message
    from the state it had before. The message is bitwise identical if `client` is a pure function.

    Args:
        client: Function of client id, server_round, broadcast and state. It returns the message to
            the server and the new state. The state is a tree as of :func:`save_checkpoint`, ``{}``
            at first. Keep everything there, because Flower may start a new process for each
            message.
        expect: Function from a client id to the broadcast that it expects. Messages to the server
            have the same fingerprint.
        max_bytes: Maximum size of a broadcast in bytes.
        directory: Directory with a checkpoint folder for each client. A later run then continues
            from these states. Only one process at a time may run a client. If None, the state is
            kept in ``context.state``, which ends with the run.

    Returns:
        The app.

    Example:
        >>> def train(client, server_round, broadcast, state):
        ...     payload = {"head": Weighted(broadcast["head"] + client, torch.tensor(30.0))}
        ...     return payload, {"rounds": server_round + 1}
        >>> expected = Expected({"head": torch.zeros(2)})
        >>> app = client_app(train, expect=lambda client: expected, max_bytes=10_000)
    """

    def handle(message: Envelope, context: Context) -> Envelope:
        own = _partition(context)
        expected = expect(own)
        folder = None if directory is None else Path(directory, str(own))
        broadcast, header = unpack(message.content, expect=expected, max_bytes=max_bytes)
        asked = hashlib.sha256(blob_of(message.content)).hexdigest()
        if folder is None:
            kept = remembered(context.state) or INITIAL
        else:
            kept = load_checkpoint(folder, default={}) or INITIAL
        before = kept["before"] if kept["asked"] == asked else kept["after"]
        message_up, after = client(own, header.server_round, broadcast, copy.deepcopy(before))
        reply = pack(message_up, header=Header(expected.fingerprint, header.server_round, str(own)))
        keep = {"asked": asked, "before": before, "after": after}
        if folder is None:
            remember(keep, context.state)
        else:
            save_checkpoint(keep, folder)
        return Envelope(reply, reply_to=message)

    def identify(message: Envelope, context: Context) -> Envelope:
        record = ConfigRecord({CLIENT: _partition(context)})
        return Envelope(RecordDict({CLIENT: record}), reply_to=message)

    app = ClientApp()
    app.train()(handle)
    app.query(CLIENT)(identify)
    return app


def _partition(context: Context) -> int:
    own = context.node_config.get("partition-id")
    if type(own) is not int or own < 0:
        rule = "have a partition-id, an integer of at least 0"
        raise wrong_value("context.node_config", rule, repr(own))
    return own
