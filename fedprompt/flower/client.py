"""A client's round as a Flower app."""

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

CLIENT = "client"  # the question, and the key of the answer
NOTHING: dict[str, Any] = {
    "asked": "",
    "before": {},
    "after": {},
}  # what a client keeps before it was asked for the first time


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
            client, under ``after``, and a later run begins where this one ended. One process at a time may answer for a client.

    Returns:
        The app. Whatever it refuses becomes an error reply, and its state stays as it was. Asked the same again, with the same broadcast
        in the same round, as by a server that was killed before it saved, it answers from the state before: with the same bits, if
        `client` is a pure function. It answers a round of any number, because a later run counts from 0 again.

    Example:
        >>> def train(client, server_round, broadcast, state):
        ...     return {"head": Weighted(broadcast["head"] + client, torch.tensor(30.0))}, {"rounds": server_round + 1}
        >>> app = client_app(train, expect=lambda client: Expected({"head": torch.zeros(2)}), max_bytes=10_000)
    """

    def handle(message: Envelope, context: Context) -> Envelope:
        own = _partition(context)
        expected, folder = expect(own), None if directory is None else Path(directory, str(own))
        broadcast, header = unpack(message.content, expect=expected, max_bytes=max_bytes)
        asked = hashlib.sha256(blob_of(message.content)).hexdigest()
        kept = (
            remembered(context.state) if folder is None else load_checkpoint(folder, default={})
        ) or NOTHING
        before = kept["before"] if kept["asked"] == asked else kept["after"]
        upload, after = client(own, header.server_round, broadcast, copy.deepcopy(before))
        reply = pack(upload, header=Header(expected.fingerprint, header.server_round, str(own)))
        keep = {"asked": asked, "before": before, "after": after}
        if folder is None:
            remember(keep, context.state)
        else:
            save_checkpoint(keep, folder)
        return Envelope(reply, reply_to=message)

    def tell(message: Envelope, context: Context) -> Envelope:
        return Envelope(
            RecordDict({CLIENT: ConfigRecord({CLIENT: _partition(context)})}), reply_to=message
        )

    app = ClientApp()
    app.train()(handle)
    app.query(CLIENT)(tell)
    return app


def _partition(context: Context) -> int:
    own = context.node_config.get("partition-id")
    if type(own) is not int or own < 0:
        raise wrong_value(
            "context.node_config", "hold a partition-id, an integer of at least 0", repr(own)
        )
    return own
