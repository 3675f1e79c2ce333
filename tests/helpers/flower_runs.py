"""Methods over a Flower grid in this process."""

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, Error, RecordDict
from flwr.app import Message as Envelope

import fedprompt as fp
from fedprompt import flower
from fedprompt.flower._records import remembered
from flower_grid import Fault, InProcessGrid
from same import assert_same
from small_method import COHORTS, Data, method

MAX_BYTES = 100_000
CLIENTS = range(6)

assert_equal = partial(assert_same, ordered=False)


def grid_of(
    made: fp.Method,
    *,
    data: Callable[[int, int], Any] = Data,
    clients: Iterable[int] = CLIENTS,
    **options: Any,
) -> InProcessGrid:
    app = flower.client_app(made, data, max_bytes=MAX_BYTES)
    return InProcessGrid(app, clients, **options)


def strategy_of(
    made: fp.Method, cohorts: Iterable[Iterable[int]] = COHORTS, **options: Any
) -> flower.ServerStrategy:
    return flower.ServerStrategy(
        made, cohorts, **{"max_bytes": MAX_BYTES, "patience": 0.0} | options
    )


def over_grid(
    made: fp.Method,
    cohorts: Iterable[Iterable[int]] = COHORTS,
    *,
    data: Callable[[int, int], Any] = Data,
    fault: Fault = lambda reply: [reply],
    **options: Any,
) -> tuple[fp.Round, InProcessGrid]:
    """Run Flower's loop over a grid that serializes every message."""
    cohorts = [list(cohort) for cohort in cohorts]
    grid = grid_of(made, data=data, fault=fault)
    strategy = strategy_of(made, cohorts, **options)
    strategy.start(grid, ArrayRecord(), num_rounds=len(cohorts) * made.exchanges)
    return strategy.now._replace(clients=states_of(grid)), grid


def states_of(grid: InProcessGrid) -> dict[str, Any]:
    """Return the states of the clients that trained, as in a round."""
    states = {
        str(grid.context(node).node_config["partition-id"]): remembered(grid.context(node).state)
        for node in grid.contexts
    }
    return {client: state["after"] for client, state in states.items() if state}


VALUES = {"w": torch.zeros(1000), "b": torch.zeros(3)}


def plain_method(**options: Any) -> fp.Method:
    """Clients 0 and 1 move each value by their id + 1, and have the weights 2 and 3."""

    def train(data: int, answer: Any, state: Any) -> Any:
        weight = torch.tensor(2.0 + data)
        return {n: fp.Weighted(v + 1 + data, weight) for n, v in answer.items()}, state

    def form(client: int) -> Any:
        return {n: fp.Weighted(v, torch.zeros(())) for n, v in VALUES.items()}

    server = fp.averaging_server(VALUES, **options)
    return fp.Method(train, server, lambda *all: torch.nn.Identity(), form=form)


def in_process(
    made: fp.Method,
    cohorts: Iterable[Iterable[int]] = COHORTS,
    *,
    data: Callable[[int, int], Any] = Data,
) -> fp.Round:
    *_, now = fp.run_rounds(made, data, cohorts)
    return now


def blob_record(blob: bytes, stype: str = "", key: str = "blob") -> ArrayRecord:
    """Return an encoded message as it stands in Flower's records."""
    packed = flower.pack({}, header=fp.wire.Header())["fedprompt"]
    return ArrayRecord({key: Array("uint8", (len(blob),), stype or packed["blob"].stype, blob)})


def again(reply: Envelope, content: RecordDict | Error) -> Envelope:
    which = {"content": content} if isinstance(content, RecordDict) else {"error": content}
    return Envelope(**which, metadata=deepcopy(reply.metadata))


def without(client: int, server_round: int) -> fp.Method:
    """Drop the payload of one client in one round, after the client has trained."""
    made = method(exchanges=1)

    def step(now: int, payloads: Mapping[int, Any], state: Any) -> Any:
        kept = {
            each: payload
            for each, payload in payloads.items()
            if (each, now) != (client, server_round)
        }
        return made.server.step(now, kept, state) if kept else state

    return made._replace(server=made.server._replace(step=step))
