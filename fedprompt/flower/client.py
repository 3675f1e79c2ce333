"""A client's round as a Flower app."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, RecordDict
from flwr.app import Message as Envelope
from flwr.clientapp import ClientApp

from fedprompt._checks import wrong_value
from fedprompt.exchange import Expected, Header, load_checkpoint, save_checkpoint
from fedprompt.flower.records import pack, remember, remembered, unpack
from fedprompt.interfaces import Message

CLIENT = "client"  # the question, and the key of the answer


def client_app(
    client: Callable[[int, int, Message, Any], tuple[Message, Any]],
    *,
    expect: Callable[[int], Expected],
    max_bytes: int,
    directory: str | os.PathLike[str] | None = None,
) -> ClientApp:
    """Turn a client's round into a ``ClientApp``, which also tells :func:`client_nodes` who it is.

    Args:
        client: Called with the client's id (its node's ``partition-id``), server_round, broadcast and state; returns the upload and the new
            state: a tree as of :func:`fedprompt.save_checkpoint`, ``{}`` at first. All that it remembers goes there, because Flower may
            start a process for every message.
        expect: From a client's id to the broadcast that it expects; uploads carry the same fingerprint.
        max_bytes: At most so many bytes for a broadcast.
        directory: None keeps the state in ``context.state``, which ends with the run. Otherwise it is a checkpoint in a folder for each
            client, and a later run begins where this one ended.

    Returns:
        The app. Whatever it refuses becomes an error reply, and its state stays as it was.

    Example:
        >>> def train(client, server_round, broadcast, state):
        ...     return {"head": Weighted(broadcast["head"] + client, torch.tensor(30.0))}, {"rounds": server_round + 1}
        >>> app = client_app(train, expect=lambda client: Expected({"head": torch.zeros(2)}), max_bytes=10_000)
    """

    def handle(message: Envelope, context: Context) -> Envelope:
        own = _partition(context)
        expected, folder = expect(own), None if directory is None else Path(directory, str(own))
        broadcast, header = unpack(message.content, expect=expected, max_bytes=max_bytes)
        state = remembered(context.state) if folder is None else load_checkpoint(folder, default={})
        upload, state = client(own, header.server_round, broadcast, state)
        reply = pack(upload, header=Header(expected.fingerprint, header.server_round, str(own)))
        if folder is None:
            remember(state, context.state)
        else:
            save_checkpoint(state, folder)
        return Envelope(reply, reply_to=message)

    def tell(message: Envelope, context: Context) -> Envelope:
        return Envelope(RecordDict({CLIENT: ConfigRecord({CLIENT: _partition(context)})}), reply_to=message)

    app = ClientApp()
    app.train()(handle)
    app.query(CLIENT)(tell)
    return app


def _partition(context: Context) -> int:
    own = context.node_config.get("partition-id")
    if type(own) is not int or own < 0:
        raise wrong_value("context.node_config", "hold a partition-id, an integer of at least 0", repr(own))
    return own
