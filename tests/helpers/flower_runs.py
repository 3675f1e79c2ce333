"""Federations over a Flower grid in this process."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from itertools import count
from typing import Any

from flwr.app import ArrayRecord, Error, RecordDict
from flwr.app import Message as Envelope

import fedprompt as fp
from federations import Answers, Federation, Outcome
from fedprompt import flower
from fedprompt.flower.records import remembered
from flower_grid import Fault, InProcessGrid

MAX_BYTES = 100_000


def downward(federation: Federation) -> Callable[[int], fp.wire.Expected]:
    return lambda client: fp.wire.Expected(
        federation.broadcast_form(client), federation.fingerprint
    )


def upward(federation: Federation) -> Callable[[int], fp.wire.Expected]:
    return lambda client: fp.wire.Expected(federation.payload_form(client), federation.fingerprint)


def grid_of(federation: Federation, **options: Any) -> InProcessGrid:
    app = flower.client_app(federation.client, expect=downward(federation), max_bytes=MAX_BYTES)
    return InProcessGrid(app, range(federation.num_clients), **options)


def strategy_of(federation: Federation, **options: Any) -> flower.ServerStrategy:
    wire = {
        "cohort": federation.cohort,
        "expect": upward(federation),
        "max_bytes": MAX_BYTES,
        "patience": 0.0,
    }
    return flower.ServerStrategy(federation.server, **wire | options)


def flower_grid(
    federation: Federation, *, fault: Fault = lambda reply: [reply], **options: Any
) -> tuple[Outcome, InProcessGrid]:
    """Run Flower's loop over a grid that serializes every message."""
    grid, strategy = grid_of(federation, fault=fault), strategy_of(federation, **options)
    strategy.start(grid, ArrayRecord(), num_rounds=federation.rounds)
    states = {
        client: remembered(grid.context(node).state)["after"]
        for client, node in strategy.nodes.items()
    }
    return Outcome(strategy.answers, strategy.state, states), grid


def again(reply: Envelope, content: RecordDict | Error) -> Envelope:
    which = {"content": content} if isinstance(content, RecordDict) else {"error": content}
    return Envelope(**which, metadata=deepcopy(reply.metadata))


def without(federation: Federation, client: int, server_round: int) -> Federation:
    """Drop the message of one client in one round, after the client has trained."""
    rounds = count()

    def step(payloads: Mapping[int, fp.interfaces.Message], state: Any) -> tuple[Answers, Any]:
        now = next(rounds)
        return federation.server.step(
            {
                each: payload
                for each, payload in payloads.items()
                if (each, now) != (client, server_round)
            },
            state,
        )

    return federation._replace(server=federation.server._replace(step=step))


def cohort_member(federation: Federation) -> int:
    return federation.cohort(0)[0]
