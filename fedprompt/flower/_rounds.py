"""Rounds over Flower's grid: find the nodes of clients, send answers, check replies, and step."""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Message as Envelope
from flwr.app import RecordDict
from flwr.serverapp import Grid

import fedprompt._nouns as nouns
import fedprompt._refusals as check
from fedprompt._own_copies import copied
from fedprompt._random_streams import kept_streams
from fedprompt.flower._records import STATEFUL, Accepted, Encoded, Form, Plain
from fedprompt.flower._tests import checked_figures, weighted_means
from fedprompt.interfaces import Message, Method, State, Weighted
from fedprompt.interfaces.calls import Calls, seed_of
from fedprompt.messages.ledger import Direction, Ledger
from fedprompt.wire import Expected, Header

LOG = logging.getLogger("flwr.fedprompt")  # shown in Flower's log
FACTOR = 1000
"""Limit of a value or weight without `max_abs` or `max_weight`: so many times what is usual."""
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
    fingerprint: Fingerprint | None = None,
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
        max_abs: Largest magnitude of a value in a payload. If None, a client is dropped that sends
            more than 1,000 times the largest of 1, its answer, and the median of the others.
        max_weight: Largest weight of a row in a payload, such as the number of examples of the
            largest client. If None, a client is dropped that sends more than 1,000 times the larger
            of 1 and the median of the others. A client without others has no limit.
        timeout: Maximum time to wait for an exchange in seconds. If None, Flower decides.
        ledger: Ledger that records the messages sent and accepted.

    Returns:
        State of the server after the round.
    """
    fingerprint = unchecked if fingerprint is None else fingerprint
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
    plain: bool = False
    stateful: set[str] = field(default_factory=set)
    traffic: Counter[str] = field(default_factory=Counter)
    """Bytes of all messages, by "bytes_down" and "bytes_up"."""
    figures: dict[str, float] = field(default_factory=dict)
    """Means of the other metrics in accepted replies."""
    logged: dict[int, int] = field(default_factory=dict)
    """Last round in which a reply of a node was logged, by node."""
    answered: dict[int, float] = field(default_factory=dict)
    """Largest magnitude in the last answer to each client."""
    seed: int = field(init=False)

    def __post_init__(self) -> None:
        check_options(self.method, self.max_bytes, self.fingerprint)
        for name in ("max_abs", "max_weight"):
            check.optional(check.number, name, getattr(self, name), above=0)
        check.instance("ledger", self.ledger, Ledger | None, "be a Ledger or None")
        object.__setattr__(self, "seed", seed_of(self.method))

    @property
    def form(self) -> Form:
        """How messages stand in Flower's records."""
        return Plain() if self.plain else Encoded()

    @kept_streams()
    def address(
        self,
        exchange: int,
        clients: Iterable[int],
        state: State,
        nodes: Mapping[int, int],
        config: Mapping[str, Any] = {},
        kind: str = "train",
    ) -> list[Envelope]:
        """List one envelope for each client. Equal answers share their content, sent once."""
        contents: dict[bytes, RecordDict] = {}
        envelopes, server_round = [], self._round(exchange)
        training = kind == "train"
        place = exchange % self.method.exchanges if training else 0
        calls = Calls(self.method, self.seed, server_round, place)
        for client in clients:
            if client not in nodes:
                LOG.warning("round %d: client %d is left out: it has no node", server_round, client)
                continue
            answer = calls.answer(client, state)
            header = Header(self.fingerprint(client), exchange, "", {"seed": str(self.seed)})
            records, blob = self.form.request(answer, header, config)
            content = contents.setdefault(blob, records)
            if training:
                self.answered[client] = _largest(answer)
                self._record(answer, "down", client, exchange, len(blob))
            envelopes.append(Envelope(content, nodes[client], kind, group_id=str(exchange)))
        return envelopes

    def accept(
        self, exchange: int, replies: Iterable[Envelope], clients: Mapping[int, int]
    ) -> dict[int, Message]:
        """Decode the replies and return payloads by client id; `clients` has client ids by node."""

        def read(content: RecordDict, client: int) -> Accepted:
            state = content.pop(STATEFUL, None)
            check.require(not state, f"records[{STATEFUL!r}]", "be empty", state)
            if state is not None:
                self.stateful.add(str(client))
            return self._decoded(content, client, exchange)

        read_all = self._read(exchange, replies, clients, read)
        found = {c: each for c, each in read_all.items() if each.payload is not None}
        payloads = {client: each.payload for client, each in found.items()}
        self._drop_large(payloads, self._round(exchange))
        for client, payload in payloads.items():
            self._record(payload, "up", client, exchange, found[client].size)
        figures = {client: found[client].figures for client in payloads}
        weights = {client: _heaviest(payload) for client, payload in payloads.items()}
        self.figures.clear()
        self.figures.update(weighted_means(figures, weights))
        return payloads

    def tested(
        self, exchange: int, replies: Iterable[Envelope], clients: Mapping[int, int]
    ) -> dict[int, dict[str, float]]:
        """Return the figures in replies by client id; `clients` has client ids by node."""
        return self._read(exchange, replies, clients, lambda content, _: checked_figures(content))

    def _read(
        self,
        exchange: int,
        replies: Iterable[Envelope],
        clients: Mapping[int, int],
        read: Callable[[RecordDict, int], Any],
    ) -> dict[int, Any]:
        """Read the first reply of each client, in the order of ids, and log why one is left out."""
        found: dict[int, Any] = {}
        silent = set(clients)
        for reply in replies:
            node = reply.metadata.src_node_id
            silent.discard(node)
            try:
                if node not in clients or clients[node] in found:
                    raise check.wrong("reply", "come from a node that was asked, once", "another")
                found[clients[node]] = read(_content(reply), clients[node])
            except ValueError as error:
                now = self._round(exchange)
                if self.logged.get(node) != now:  # of many replies, one line
                    text = "round %d: a reply of node %d is left out: %.300s"
                    LOG.warning(text, now, node, error)
                self.logged[node] = now
        if silent:
            text = "round %d: no reply came from clients %s"
            LOG.warning(text, self._round(exchange), sorted(clients[node] for node in silent))
        return dict(sorted(found.items()))

    def step(self, exchange: int, payloads: Mapping[int, Message], state: State) -> State:
        """Step the server; drop payloads that it refuses alone, or keep its state without any."""
        now, place = divmod(exchange, self.method.exchanges)
        calls = Calls(self.method, self.seed, now, place)
        if not payloads and not self.method.server.empty:
            return state
        refused: dict[int, ValueError] = {}
        with kept_streams():
            try:
                after: State = copied(calls.step(copied(payloads), state))
                return after
            except ValueError as error:
                for client, payload in payloads.items():
                    try:
                        calls.step(copied({client: payload}), state)
                    except ValueError as alone:
                        refused[client] = alone
                sizes = [f"{client}: {_largest(sent):.3g}" for client, sent in payloads.items()]
                kept = {client: sent for client, sent in payloads.items() if client not in refused}
                what = f"clients {sorted(refused)} are" if refused and kept else "round is"
                text = "round %d: %s dropped: %.300s Largest magnitude of each client: %s"
                LOG.warning(text, now, what, error, ", ".join(sizes))
        return self.step(exchange, kept, state) if refused and kept else state

    def _round(self, exchange: int) -> int:
        return exchange // self.method.exchanges

    def _decoded(self, content: RecordDict, client: int, exchange: int) -> Accepted:
        form: Any = self.method.form
        fingerprint = self.fingerprint(client)
        expect = Expected(form(client), fingerprint, exchange, str(client), self.max_abs)
        found = self.form.accepted(content, expect, self.max_bytes)
        for name, entry in (found.payload or {}).items():
            if self.max_weight is None or not isinstance(entry, Weighted):
                continue
            if entry.weight.numel() and (own := entry.weight.max().item()) > self.max_weight:
                rule = f"be at most {self.max_weight:g}"
                raise check.wrong(f"payload[{name!r}].weight", rule, f"{own:g}")
        return found

    def _drop_large(self, found: dict[int, Message], server_round: int) -> None:
        """Drop payloads with values or weights far above the usual ones, without given limits."""
        if self.max_abs is None:
            values = {client: _largest(payload) for client, payload in found.items()}
            self._drop("value", "max_abs", values, self.answered, found, server_round)
        if self.max_weight is None and len(found) > 1:  # a client alone takes nobody's weight
            weights = {client: _heaviest(payload) for client, payload in found.items()}
            self._drop("weight", "max_weight", weights, {}, found, server_round)

    def _drop(
        self,
        what: str,
        limit: str,
        sizes: Mapping[int, float],
        known: Mapping[int, float],
        found: dict[int, Any],
        server_round: int,
    ) -> None:
        in_order = sorted(sizes.values())
        for client, size in sizes.items():
            bound = FACTOR * max(1.0, known.get(client, 0.0), _median_of_others(in_order, size))
            if size > bound:
                text = (
                    "round %d: client %d is dropped: its largest %s is %.3g, more than %.3g, which "
                    "is 1,000 times what is usual; if this is right, set `%s`"
                )
                LOG.warning(text, server_round, client, what, size, bound, limit)
                del found[client]

    def _record(
        self, message: Message, direction: Direction, client: int, exchange: int, size: int
    ) -> None:
        self.traffic[f"bytes_{direction}"] += size
        if self.ledger is not None and message:
            where = {"client": client, "server_round": self._round(exchange)}
            self.ledger.record(message, direction=direction, framed=size, **where)


def _median_of_others(in_order: list[float], own: float) -> float:
    """Return the lower median of sorted numbers without one of them, or 0 if there is no other."""
    if len(in_order) < 2:
        return 0.0
    middle = (len(in_order) - 2) // 2
    return in_order[middle + (bisect_left(in_order, own) <= middle)]


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
    content = _content(reply)
    alone = len(content) == len(content.config_records) == 1
    record = dict(content.config_records.get(CLIENT, {})) if alone else {}
    client = record.get(CLIENT) if len(record) == 1 else None
    if type(client) is not int or client < 0:
        raise check.wrong("partition-id", "be an integer of at least 0", repr(client))
    return client


def _largest(message: Message) -> float:
    """Return the largest magnitude of the floating-point values of a message, or 0 without any."""
    values = [each.known if isinstance(each, Weighted) else each for each in message.values()]
    floating = [value for value in values if value.is_floating_point() and value.numel()]
    return max((value.abs().max().item() for value in floating), default=0.0)


def _heaviest(message: Message) -> float:
    """Return the largest weight of a message, or 0 without any."""
    weights = [entry.weight for entry in message.values() if isinstance(entry, Weighted)]
    return max((weight.max().item() for weight in weights if weight.numel()), default=0.0)
