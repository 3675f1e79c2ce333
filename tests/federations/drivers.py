"""Engines that send messages in different ways, with bitwise identical results."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist

import fedprompt as fp
from federations.parts import Answers, Federation, State
from same import assert_same

MAX_BYTES = 2**20

assert_bitwise_identical = partial(assert_same, ordered=False)


class Outcome(NamedTuple):
    """Result of a run: the last answers, the server's state, and the state of every client."""

    answers: Answers
    server: Any
    clients: dict[int, State]


def in_process(federation: Federation) -> Outcome:
    """Run in one process, without encoding messages."""
    answers, server_state = federation.server.init()
    states: dict[int, State] = {client: {} for client in range(federation.num_clients)}
    for server_round in range(federation.rounds):
        payloads = {}
        for client in federation.cohort(server_round):
            payloads[client], states[client] = federation.client(
                client, server_round, answers[client], states[client]
            )
        answers, server_state = federation.server.step(payloads, server_state)
    return Outcome(answers, server_state, states)


def through_bytes(
    federation: Federation,
    *,
    wire: Callable[[bytes], bytes] = bytes,
    ledger: fp.Ledger | None = None,
) -> Outcome:
    """Send every message as a blob through `wire`, a function from bytes to bytes."""
    ledger = fp.Ledger() if ledger is None else ledger

    def carried(
        message: fp.interfaces.Message,
        form: fp.interfaces.Message,
        direction: str,
        client: int,
        server_round: int,
    ) -> fp.interfaces.Message:
        blob = fp.wire.encode_payload(
            message, header=fp.wire.Header(federation.fingerprint, server_round, str(client))
        )
        ledger.record(
            message, direction=direction, client=client, server_round=server_round, framed=len(blob)
        )
        return fp.wire.decode_payload(
            wire(blob), expect=fp.wire.Expected(form, federation.fingerprint), max_bytes=MAX_BYTES
        )[0]

    def remote(
        client: int, server_round: int, broadcast: fp.interfaces.Message, state: State
    ) -> tuple[fp.interfaces.Message, State]:
        broadcast = carried(
            broadcast, federation.broadcast_form(client), "down", client, server_round
        )
        payload, state = federation.client(client, server_round, broadcast, state)
        return carried(payload, federation.payload_form(client), "up", client, server_round), state

    return in_process(federation._replace(client=remote))


def distributed(federation: Federation) -> Outcome:
    """Run one rank of a process group. Client k runs on rank k modulo the number of ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    answers, server_state = federation.server.init()
    states: dict[int, State] = {client: {} for client in range(rank, federation.num_clients, world)}
    for server_round in range(federation.rounds):
        cohort, payloads = federation.cohort(server_round), {}
        for first in range(0, federation.num_clients, world):
            payload, own = None, first + rank
            if own in cohort:
                payload, states[own] = federation.client(
                    own, server_round, answers[own], states[own]
                )
            clients = range(first, first + world)
            forms = [
                fp.wire.Expected(federation.payload_form(k), federation.fingerprint)
                if k in cohort
                else None
                for k in clients
            ]
            header = fp.wire.Header(federation.fingerprint, server_round, str(own))
            gathered = fp.wire.gather_messages(
                payload, expect=forms, max_bytes=MAX_BYTES, header=header
            )
            payloads |= {
                client: message
                for client, message in zip(clients, gathered, strict=True)
                if message is not None
            }
        answers, server_state = federation.server.step(payloads, server_state)
    return Outcome(answers, server_state, states)
