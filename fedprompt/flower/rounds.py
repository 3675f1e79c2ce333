"""One round over Flower's grid: find the nodes of clients, send answers, validate replies."""

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

LOG = logging.getLogger("flwr.fedprompt")  # shown in Flower's log


def client_nodes(
    grid: Grid,
    clients: Iterable[int],
    *,
    known: Mapping[int, int] | None = None,
    timeout: float = 60.0,
) -> dict[int, int]:
    """Query the connected nodes for their client ids, until all of `clients` are found.

    If all of them are known and connected, no node is queried. Otherwise each unknown node is
    queried once, and the call returns as soon as all clients are found. A node that does not reply
    is only waited for while a client is missing.

    Args:
        grid: Grid of the run.
        clients: Ids of the clients to find.
        known: Result of an earlier call. Nodes that are still connected are not queried again.
        timeout: Maximum time to wait in seconds. With 0, replies are read once. A node may start a
            process for its reply, which takes some time.

    Returns:
        Dict from client id to node, for all connected clients that have replied so far. Ids are
        self-reported. If two nodes report the same id, the first reply counts, and of two replies
        at once that of the lower node.
    """
    wanted = set(clients)
    nodes = dict(known or {})
    asked = set[int]()
    questions = set[str]()
    deadline = time.monotonic() + timeout
    while True:
        connected = set(grid.get_node_ids())
        nodes = {client: node for client, node in nodes.items() if node in connected}
        if not wanted <= nodes.keys():
            if unknown := sorted(connected - set(nodes.values()) - asked):
                asked.update(unknown)
                queries = [Envelope(RecordDict(), node, f"query.{CLIENT}") for node in unknown]
                # Flower returns None for a message that it could not send.
                questions.update(filter(None, grid.push_messages(queries)))
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
    """Send each client its answer, and return the messages that the clients send back.

    A client without a node is left out. A reply is dropped if it is an error, corrupt, late, from
    an unknown client, or the second one of its client. The reason is logged, and the other clients
    are unaffected.

    Args:
        grid: Grid of the run.
        answers: Answers by client id, for the clients of the cohort.
        nodes: Nodes by client id, as of :func:`client_nodes`.
        server_round: Number of the round (0-based).
        expect: Function from a client id to the message that it should send. Answers have the same
            fingerprint.
        max_bytes: Maximum size in bytes of a client's message.
        timeout: Maximum time to wait in seconds. If None, Flower decides.
        ledger: Ledger that records the messages sent and accepted.

    Returns:
        Messages in the order of client ids. The dict is empty if no reply was accepted.
    """
    wire = Wire(expect, max_bytes, ledger)
    envelopes = wire.address(answers, nodes, server_round)
    replies = grid.send_and_receive(envelopes, timeout=timeout) if envelopes else []
    asked = {nodes[client]: client for client in answers if client in nodes}
    return wire.accept(replies, asked, server_round)


class Wire(NamedTuple):
    """Encoding and decoding of one round, as two steps, because Flower's strategies have two."""

    expect: Callable[[int], Expected]
    max_bytes: int
    ledger: Ledger | None

    def address(
        self, answers: Answers, nodes: Mapping[int, int], server_round: int
    ) -> list[Envelope]:
        """List one envelope for each client. Equal answers share their content, sent once."""
        # Each object is packed once. After a checkpoint, equal answers may be several objects.
        packed: dict[tuple[int, frozenset[tuple[str, str]]], RecordDict] = {}
        contents: dict[bytes, RecordDict] = {}
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
        """Decode the replies and return messages by client id; `clients` has client ids by node."""
        messages: dict[int, Message] = {}
        for reply in replies:
            node = reply.metadata.src_node_id
            try:
                if node not in clients or clients[node] in messages:
                    raise wrong_value("reply", "come from a node that was asked, once", "another")
                blob = blob_of(_content(reply))
                messages[clients[node]] = self._decoded(blob, clients[node], server_round)
            except ValueError as error:
                text = "round %d: a reply of node %d is left out: %.300s"
                LOG.warning(text, server_round, node, error)
        return dict(sorted(messages.items()))

    def _decoded(self, blob: bytes, client: int, server_round: int) -> Message:
        expect = self.expect(client)._replace(server_round=server_round, client_id=str(client))
        message, _ = decode_payload(blob, expect=expect, max_bytes=self.max_bytes)
        self._record(message, "up", client, server_round, blob)
        return message

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
    """Add the client ids in the replies to the nodes by client id."""
    for reply in sorted(replies, key=lambda reply: reply.metadata.src_node_id):
        node = reply.metadata.src_node_id
        try:
            client = _client_of(reply)
            if client in nodes or node in nodes.values() or node not in asked:
                raise wrong_value("partition-id", "be that of one node", f"{client} a second time")
            nodes[client] = node
        except ValueError as error:
            LOG.warning("node %d is left out: %.300s", node, error)


def _content(reply: Envelope) -> RecordDict:
    if reply.has_error():
        error = f"error {reply.error.code}, {reply.error.reason!r}"
        raise wrong_value("reply", "have content", error)
    return reply.content


def _client_of(reply: Envelope) -> int:
    record = _content(reply).get(CLIENT)
    client = record.get(CLIENT) if isinstance(record, ConfigRecord) else None
    if type(client) is not int or client < 0:
        raise wrong_value("partition-id", "be an integer of at least 0", repr(client))
    return client
