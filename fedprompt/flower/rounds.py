"""One round over Flower's grid: who is where, what each gets, and which of the replies count."""

import logging
import time
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Literal, NamedTuple

from flwr.app import ConfigRecord, RecordDict
from flwr.app import Message as Envelope
from flwr.serverapp import Grid

from fedprompt._checks import wrong_value
from fedprompt.flower.client import CLIENT
from fedprompt.flower.records import blob_of, pack
from fedprompt.interfaces import Answers, Message
from fedprompt.messages import Ledger
from fedprompt.wire import Expected, Header, decode_payload

LOG = logging.getLogger("flwr.fedprompt")  # shown among Flower's own lines


def client_nodes(
    grid: Grid,
    clients: Iterable[int],
    *,
    known: Mapping[int, int] | None = None,
    timeout: float = 60.0,
) -> dict[int, int]:
    """Ask the nodes which clients they are, until those that are wanted are known.

    Where they are all known and connected, nobody is asked and nobody waited for. Otherwise every node that is not known is asked, once
    in a call, and the first moment at which nobody is missing ends the wait: a node that never answers costs time only where it might be
    the missing one.

    Args:
        grid: Of the run.
        clients: Ids to wait for.
        known: From an earlier call; whoever is still connected is not asked again.
        timeout: Seconds after which this returns with the clients that are there; 0 takes one look. A node starts a process for its
            answer, which takes it a while.

    Returns:
        Node by client id, of those connected clients that are known by then, wanted or not. An id is the node's claim; of two that claim
        the same, the first one keeps it, and of two at once the lower node.
    """
    wanted, nodes, asked, deadline = (
        set(clients),
        dict(known or {}),
        set[int](),
        time.monotonic() + timeout,
    )
    questions = set[str]()
    while True:
        connected = set(grid.get_node_ids())
        nodes = {client: node for client, node in nodes.items() if node in connected}
        if not wanted <= nodes.keys():
            strangers = sorted(connected - set(nodes.values()) - asked)
            asked.update(strangers)
            pushed = (
                grid.push_messages(
                    [Envelope(RecordDict(), node, f"query.{CLIENT}") for node in strangers]
                )
                if strangers
                else []
            )
            questions.update(filter(None, pushed))  # Flower says None of what it could not push
            replies = list(grid.pull_messages(questions)) if questions else []
            questions -= {reply.metadata.reply_to_message_id for reply in replies}
            _enter(nodes, replies, asked)
        if wanted <= nodes.keys() or time.monotonic() >= deadline:
            return dict(sorted(nodes.items()))
        time.sleep(1)


def run_round(
    grid: Grid,
    answers: Answers,
    *,
    nodes: Mapping[int, int],
    server_round: int,
    expect: Callable[[int], Expected],
    max_bytes: int,
    timeout: float | None = None,
    ledger: Ledger | None = None,
) -> dict[int, Message]:
    """Send each client its answer and gather what they upload: one round over Flower's wire.

    Clients without a node are left out, and so are error replies and uploads that are corrupt, late, foreign, or a second one of their
    client, each with a logged reason. The others stay.

    Args:
        grid: Of the run.
        answers: By client id, of the clients of the cohort.
        nodes: Node by client id, from :func:`client_nodes`.
        server_round: 0-based.
        expect: From a client's id to the upload that is expected; answers carry the same fingerprint.
        max_bytes: At most so many bytes for an upload.
        timeout: Seconds to wait for the last upload; None waits as long as Flower does.
        ledger: Records what is sent and what is accepted.

    Returns:
        Uploads by client id, in its order; none if nobody answered.
    """
    wire = Wire(expect, max_bytes, ledger)
    envelopes = wire.address(answers, nodes, server_round)
    replies = grid.send_and_receive(envelopes, timeout=timeout) if envelopes else []
    return wire.accept(
        replies, {nodes[client]: client for client in answers if client in nodes}, server_round
    )


class Wire(NamedTuple):
    """The two halves of an exchange, which Flower's strategies have apart."""

    expect: Callable[[int], Expected]
    max_bytes: int
    ledger: Ledger | None

    def address(
        self, answers: Answers, nodes: Mapping[int, int], server_round: int
    ) -> list[Envelope]:
        """One envelope for each client; a list, because Flower reads it twice. Equal answers share one content, which travels once."""
        packed: dict[tuple[int, frozenset[tuple[str, str]]], RecordDict] = {}  # each object once
        contents: dict[
            bytes, RecordDict
        ] = {}  # and one for those that are equal, as after a checkpoint
        envelopes = []
        for client, answer in answers.items():
            if client not in nodes:
                LOG.warning("round %d: client %d is left out: it has no node", server_round, client)
                continue
            fingerprint = self.expect(client).fingerprint
            key = id(answer), frozenset(fingerprint.items())
            if key not in packed:
                records = pack(answer, header=Header(fingerprint, server_round))
                packed[key] = contents.setdefault(blob_of(records), records)
            self._record(answer, "down", client, server_round, blob_of(packed[key]))
            envelopes.append(
                Envelope(packed[key], nodes[client], "train", group_id=str(server_round))
            )
        return envelopes

    def accept(
        self, replies: Iterable[Envelope], clients: Mapping[int, int], server_round: int
    ) -> dict[int, Message]:
        """Uploads by client id; `clients` are those who were asked, by node."""
        uploads: dict[int, Message] = {}
        for reply in replies:
            node = reply.metadata.src_node_id
            try:
                if node not in clients or clients[node] in uploads:
                    raise wrong_value("reply", "come from a node that was asked, once", "another")
                blob = blob_of(_content(reply))
                uploads[clients[node]] = self._upload(blob, clients[node], server_round)
            except ValueError as error:
                LOG.warning(
                    "round %d: a reply of node %d is left out: %.300s", server_round, node, error
                )
        return dict(sorted(uploads.items()))

    def _upload(self, blob: bytes, client: int, server_round: int) -> Message:
        expect = self.expect(client)._replace(server_round=server_round, client_id=str(client))
        upload, _ = decode_payload(blob, expect=expect, max_bytes=self.max_bytes)
        self._record(upload, "up", client, server_round, blob)
        return upload

    def _record(
        self,
        message: Message,
        direction: Literal["up", "down"],
        client: int,
        server_round: int,
        blob: bytes,
    ) -> None:
        if self.ledger is not None:
            self.ledger.record(
                message,
                direction=direction,
                client=client,
                server_round=server_round,
                framed=len(blob),
            )


def _enter(nodes: dict[int, int], replies: Iterable[Envelope], asked: Container[int]) -> None:
    """Add what the replies claim to the nodes by client id."""
    for reply in sorted(replies, key=lambda reply: reply.metadata.src_node_id):
        node = reply.metadata.src_node_id
        try:
            client = _claim(reply)
            if client in nodes or node in nodes.values() or node not in asked:
                raise wrong_value("partition-id", "be that of one node", f"{client} a second time")
            nodes[client] = node
        except ValueError as error:
            LOG.warning("node %d is left out: %.300s", node, error)


def _content(reply: Envelope) -> RecordDict:
    if reply.has_error():
        raise wrong_value(
            "reply", "hold content", f"error {reply.error.code}, {reply.error.reason!r}"
        )
    return reply.content


def _claim(reply: Envelope) -> int:
    record = _content(reply).get(CLIENT)
    client = record.get(CLIENT) if isinstance(record, ConfigRecord) else None
    if type(client) is not int or client < 0:
        raise wrong_value("partition-id", "be an integer of at least 0", repr(client))
    return client
