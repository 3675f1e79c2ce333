"""Rounds over Flower's grid: find the nodes of clients, send answers, check replies, and step."""

import logging
import time
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ConfigRecord, RecordDict
from flwr.app import Message as Envelope
from flwr.serverapp import Grid

import fedprompt._nouns as nouns
import fedprompt._refusals as check
from fedprompt._copies import copied
from fedprompt._random_streams import kept_streams
from fedprompt.flower._records import SEED, STATEFUL, blob_of, pack
from fedprompt.interfaces import Message, Method, State, Weighted
from fedprompt.interfaces._calls import Calls, seed_of
from fedprompt.messages.ledger import Direction, Ledger
from fedprompt.wire import Expected, Header, decode_payload

LOG = logging.getLogger("flwr.fedprompt")  # shown in Flower's log
CLIENT = "client"  # name of the query for the client id, and key of its reply
Fingerprint = Callable[[int], Mapping[str, str]]


def unchecked(client: int) -> Mapping[str, str]:
    """Return the fingerprint of a client whose backbone is not compared."""
    return {}


def check_options(method: Method, max_bytes: int, fingerprint: Fingerprint) -> None:
    """Require a method whose messages have a form, and limits of its messages."""
    nouns.method(method, needs_form=True)
    check.count("max_bytes", max_bytes)
    check.function("fingerprint", fingerprint)


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
    method: Method,
    state: State,
    cohort: Iterable[int],
    *,
    server_round: int,
    nodes: Mapping[int, int],
    max_bytes: int,
    fingerprint: Fingerprint = unchecked,
    max_abs: float | None = None,
    max_weight: float | None = None,
    timeout: float | None = None,
    ledger: Ledger | None = None,
) -> State:
    """Run one round of a method, with all its exchanges, and return the state of the server.

    A client without a node is left out. A reply is dropped if it is an error, corrupt, late, from
    an unknown client, or the second one of its client. The first reason of a node in a round is
    logged, and the other clients are unaffected.

    An adaptive rule refuses values that overflow its state, with a ValueError. Then the payloads
    that it also refuses alone are dropped, and the server steps with the others. If no payload is
    accepted, or if the server refuses the step again, the state does not change. The log has the
    reason, and the largest magnitude that each client sent.

    Args:
        grid: Grid of the run.
        method: Method with a `form`.
        state: State of the server before the round.
        cohort: Ids of the clients of the round.
        server_round: Number of the round (0-based).
        nodes: Nodes by client id, as of :func:`client_nodes`.
        max_bytes: Maximum size in bytes of a payload.
        fingerprint: Function from a client id to its :func:`~fedprompt.fingerprint`, the same as
            at the clients. If it is not given, backbones are not compared.
        max_abs: Largest magnitude of a value in a payload. If None, every finite number is
            accepted.
        max_weight: Largest weight of a row in a payload, such as the number of examples of the
            largest client. If None, every finite weight is accepted, and one client can dominate
            the mean.
        timeout: Maximum time to wait for an exchange in seconds. If None, Flower decides.
        ledger: Ledger that records the messages sent and accepted.

    Returns:
        State of the server after the round.
    """
    wire = Wire(method, max_bytes, fingerprint, max_abs, max_weight, ledger)
    clients = nouns.cohort(cohort, server_round)
    asked = {nodes[client]: client for client in clients if client in nodes}
    first = server_round * method.exchanges
    for exchange in range(first, first + method.exchanges):
        envelopes = wire.address(exchange, clients, state, nodes)
        replies = grid.send_and_receive(envelopes, timeout=timeout) if envelopes else []
        state = wire.step(exchange, wire.accept(exchange, replies, asked), state)
    return state


@dataclass(frozen=True)
class Wire:
    """Parts of one exchange, because Flower's strategies have two steps.

    Exchanges are counted over all rounds, and each message has the number of its exchange.
    """

    method: Method
    max_bytes: int
    fingerprint: Fingerprint
    max_abs: float | None
    max_weight: float | None
    ledger: Ledger | None
    stateful: set[str] = field(default_factory=set)
    seed: int = field(init=False)
    logged: dict[int, int] = field(default_factory=dict)
    """Last round in which a reply of a node was logged, by node."""

    def __post_init__(self) -> None:
        check_options(self.method, self.max_bytes, self.fingerprint)
        object.__setattr__(self, "seed", seed_of(self.method))
        for name in ("max_abs", "max_weight"):
            check.optional(check.number, name, getattr(self, name), above=0)
        check.instance("ledger", self.ledger, Ledger | None, "be a Ledger or None")

    def address(
        self, exchange: int, cohort: Iterable[int], state: State, nodes: Mapping[int, int]
    ) -> list[Envelope]:
        """List one envelope for each client. Equal answers share their content, sent once."""
        contents: dict[bytes, RecordDict] = {}
        seed = ConfigRecord({SEED: str(self.seed)})
        envelopes = []
        for client in cohort:
            if client not in nodes:
                text = "round %d: client %d is left out: it has no node"
                LOG.warning(text, self._round(exchange), client)
                continue
            with kept_streams():
                answer = self._calls(exchange).answer(client, state)
            records = pack(answer, header=Header(self.fingerprint(client), exchange))
            blob = blob_of(records)
            content = contents.setdefault(blob, records)
            content[SEED] = seed
            self._record(answer, "down", client, exchange, blob)
            envelopes.append(Envelope(content, nodes[client], "train", group_id=str(exchange)))
        return envelopes

    def accept(
        self, exchange: int, replies: Iterable[Envelope], clients: Mapping[int, int]
    ) -> dict[int, Message]:
        """Decode the replies and return payloads by client id; `clients` has client ids by node."""
        payloads: dict[int, Message | None] = {}
        for reply in replies:
            node = reply.metadata.src_node_id
            try:
                if node not in clients or clients[node] in payloads:
                    raise check.wrong("reply", "come from a node that was asked, once", "another")
                client = clients[node]
                content = _content(reply)
                if content.pop(STATEFUL, None) is not None:
                    self.stateful.add(str(client))
                # A client replies without records if it has no payload.
                payloads[client] = self._decoded(content, client, exchange) if content else None
            except ValueError as error:
                now = self._round(exchange)
                if self.logged.get(node) != now:  # of many replies, one line
                    text = "round %d: a reply of node %d is left out: %.300s"
                    LOG.warning(text, now, node, error)
                self.logged[node] = now
        sent = sorted(payloads.items())
        return {client: payload for client, payload in sent if payload is not None}

    def step(self, exchange: int, payloads: Mapping[int, Message], state: State) -> State:
        """Step the server; drop payloads that it refuses alone, or keep its state without any."""
        now, refused = self._round(exchange), dict[int, ValueError]()
        if not payloads and not self.method.server.empty:
            return state
        try:
            return self._stepped(exchange, payloads, state)
        except ValueError as error:
            for client, payload in payloads.items():
                try:
                    self._stepped(exchange, {client: payload}, state)
                except ValueError as alone:
                    refused[client] = alone
            largest = [f"{client}: {_largest(payload):.3g}" for client, payload in payloads.items()]
            kept = {client: sent for client, sent in payloads.items() if client not in refused}
            what = f"clients {sorted(refused)} are" if refused and kept else "round is"
            text = "round %d: %s dropped: %.300s Largest magnitude of each client: %s"
            LOG.warning(text, now, what, error, ", ".join(largest))
        return self.step(exchange, kept, state) if refused else state

    def _stepped(self, exchange: int, payloads: Mapping[int, Message], state: State) -> State:
        with kept_streams():
            after: State = copied(self._calls(exchange).step(copied(payloads), state))
        return after

    def _calls(self, exchange: int) -> Calls:
        return Calls(self.method, self.seed, *divmod(exchange, self.method.exchanges))

    def _round(self, exchange: int) -> int:
        return exchange // self.method.exchanges

    def _decoded(self, content: RecordDict, client: int, exchange: int) -> Message:
        form: Any = self.method.form
        fingerprint = self.fingerprint(client)
        expect = Expected(form(client), fingerprint, exchange, str(client), self.max_abs)
        blob = blob_of(content)
        payload, _ = decode_payload(blob, expect=expect, max_bytes=self.max_bytes)
        self._check_weights(payload)
        self._record(payload, "up", client, exchange, blob)
        return payload

    def _check_weights(self, payload: Message) -> None:
        for name, entry in payload.items():
            if self.max_weight is None or not isinstance(entry, Weighted):
                continue
            if entry.weight.numel() and (found := entry.weight.max().item()) > self.max_weight:
                rule = f"be at most {self.max_weight:g}"
                raise check.wrong(f"payload[{name!r}].weight", rule, f"{found:g}")

    def _record(
        self, message: Message, direction: Direction, client: int, exchange: int, blob: bytes
    ) -> None:
        if self.ledger is not None and message:
            where = {"client": client, "server_round": self._round(exchange)}
            self.ledger.record(message, direction=direction, framed=len(blob), **where)


def _enter(nodes: dict[int, int], replies: Iterable[Envelope], asked: Container[int]) -> None:
    """Add the client ids in the replies to the nodes by client id."""
    for reply in sorted(replies, key=lambda reply: reply.metadata.src_node_id):
        node = reply.metadata.src_node_id
        try:
            client = _client_of(reply)
            if client in nodes or node in nodes.values() or node not in asked:
                raise check.wrong("partition-id", "be that of one node", f"{client} a second time")
            nodes[client] = node
        except ValueError as error:
            LOG.warning("node %d is left out: %.300s", node, error)


def _content(reply: Envelope) -> RecordDict:
    if reply.has_error():
        error = f"error {reply.error.code}, {reply.error.reason!r}"
        raise check.wrong("reply", "have content", error)
    return reply.content


def _client_of(reply: Envelope) -> int:
    record = _content(reply).get(CLIENT)
    client = record.get(CLIENT) if isinstance(record, ConfigRecord) else None
    if type(client) is not int or client < 0:
        raise check.wrong("partition-id", "be an integer of at least 0", repr(client))
    return client


def _largest(message: Message) -> float:
    """Return the largest magnitude of the floating-point values of a message, or 0 without any."""
    values = [entry.value if isinstance(entry, Weighted) else entry for entry in message.values()]
    floating = [value for value in values if value.is_floating_point() and value.numel()]
    return max((value.abs().max().item() for value in floating), default=0.0)
