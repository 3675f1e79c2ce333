"""A small method with everything that an engine must carry, in one process and on two ranks.

Spawned processes import this module by name.
"""

import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import fedprompt as fp
from fedprompt.methods import Federation, HeldOut, evaluate
from tiny_federations import vit_federation

COHORTS = [[4, 1, 0], [2, 3], [], [1, 4], [5], [3, 0, 2]]
"""Client 5 never sends anything, so the server keeps its state in rounds 2 and 4."""

GUESTS = [[4, 2, 0], [1, 3], [0, 4], [], [3, 5, 1], [2, 4, 0]]
"""Of two ranks that share, one is full in five rounds, so client 3, 4 or 5 is a guest."""


class Data(NamedTuple):
    """Data of a client: its id, and a random number in each round."""

    id: int
    server_round: int

    @property
    def number(self) -> torch.Tensor:
        draw = fp.stream_generator(0, server_round=self.server_round, client=self.id)
        return torch.randn(3, generator=draw)


class Value(torch.nn.Module):
    """Model that is a value."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.value: torch.Tensor
        self.register_buffer("value", value)


def method(exchanges: int = 2) -> fp.Method:
    """Average with momentum, remember who sent, and keep a private sum at each client."""
    momentum = fp.aggregation.fedopt(partial(torch.optim.SGD, lr=1.0, momentum=0.9))
    average = fp.averaging_server({"x": torch.zeros(3)}, momentum)

    def train(data, answer, state):
        own = state.get("own", torch.zeros(3)) + answer["x"] / 3 + data.number
        if data.id == 5:
            return None, {"own": own}
        rows = torch.tensor([data.id, 1.0, 0.0])
        return {"x": fp.Weighted(answer["x"] / 7 + own, rows)}, {"own": own}

    def answer(client, state):
        return {"x": state["values"]["x"] + state["sent"].get(str(client), 0)}

    def step(server_round, payloads, state):
        sent = {str(client): server_round + 1 + place for place, client in enumerate(payloads)}
        return average.step(server_round, payloads, state) | {"sent": state["sent"] | sent}

    def predict(data, answer, state):
        return Value(answer["x"] + state.get("own", 0))

    def form(client):
        return {"x": fp.Weighted(torch.zeros(3), torch.zeros(3))}

    server = fp.Server(average.state | {"sent": {}}, answer, step, empty=False)
    return fp.Method(train, server, predict, exchanges, form)


def resume(folder: str, states: str | None = None) -> None:
    """Run all rounds, and save after each; if a checkpoint exists, continue from it."""
    start = fp.load_checkpoint(folder, default=None)
    for now in fp.run_rounds(method(), Data, COHORTS * 20, start=start, states=states):
        fp.save_checkpoint(now, folder)
        print(now.server_round, flush=True)


def broken(rank: int) -> fp.Method:
    """Return the method with an error of client 3."""
    whole = method()

    def train(data, answer, state):
        if data.id == 3:
            raise ZeroDivisionError("no batches")
        return whole.client(data, answer, state)

    return whole._replace(client=train)


def drifting(rank: int, first: bool = False) -> fp.Method:
    """Return the method with a server that differs between ranks."""
    whole, shift = method(), torch.tensor(float(rank))

    def step(server_round, payloads, state):
        new = whole.server.step(server_round, payloads, state)
        return new | {"shift": shift} if server_round == 1 else new

    state = whole.server.state | ({"shift": shift} if first else {})
    return whole._replace(server=whole.server._replace(state=state, step=step))


def failing_step(rank: int) -> fp.Method:
    """Return the method with a step that fails on rank 1 in round 3."""
    whole = method()

    def step(server_round, payloads, state):
        if rank == 1 and server_round == 3:
            raise ArithmeticError("out of numbers")
        return whole.server.step(server_round, payloads, state)

    return whole._replace(server=whole.server._replace(step=step))


def last(rank: int, made: fp.Method, cohorts: Any = COHORTS, **options: Any) -> fp.Round:
    """Run all rounds on this rank."""
    *_, now = fp.run_rounds(made, Data, cohorts, group=dist.group.WORLD, **options)
    return now


def on_disk(rank: int, share: bool) -> fp.Round:
    """Run with states on disk, from a checkpoint of each rank after two rounds."""
    cohorts, options = GUESTS if share else COHORTS, {"share": share}
    with tempfile.TemporaryDirectory() as folder:
        now = last(rank, method(), cohorts[:2], states=f"{folder}/states", **options)
        fp.save_checkpoint(now, f"{folder}/checkpoint")
        start = fp.load_checkpoint(f"{folder}/checkpoint")
        now = last(rank, method(), cohorts, start=start, states=f"{folder}/others", **options)
        assert [path.name for path in Path(folder, "others").iterdir()] == [f"rank-{rank}"]
        return now._replace(clients=dict(now.clients))


def counted_bytes(rank: int) -> int:
    """Count the messages of this rank."""
    ledger = fp.Ledger()
    last(rank, fp.rounds.counted(method(), ledger), GUESTS, share=True)
    return ledger.total()


def from_round(rank: int) -> fp.Round:
    """Start rank 1 one round later than rank 0."""
    starts = list(fp.run_rounds(method(), Data, COHORTS))
    return last(rank, method(), start=starts[rank])


def saved(rank: int, world: int) -> fp.Round:
    """Run two rounds, save the states of the first ranks in one folder, and load it on all."""
    *_, now = fp.run_rounds(method(), Data, COHORTS[:2], group=dist.group.WORLD)
    trees = fp.wire.gather_trees(now.clients, server_round=1)[:world]
    now = now._replace(clients={client: state for tree in trees for client, state in tree.items()})
    with tempfile.TemporaryDirectory() as folder:
        fp.save_checkpoint(now, folder)
        return fp.load_checkpoint(folder)


def gone(rank: int) -> Any:
    """Run on rank 0 alone, after the process of rank 1 left the group."""
    return last(rank, method()) if rank == 0 else dist.destroy_process_group()


def trained_newcomer(rank: int) -> dict[str, float]:
    """Test a client that trained on rank 1 as a newcomer."""
    made = vit_federation()
    now = fp.Round(0, {"values": {}}, {"1": {}} if rank == 1 else {})
    federation = Federation(made.inputs, made.labels, made.shards)
    parts = method()._replace(setting=made), federation, now
    tests = HeldOut(made.inputs[:2], made.labels[:2], mixes="classes")
    return evaluate(*parts, tests, clients=[], newcomers=[1], group=dist.group.WORLD)


def listed(rank: int) -> Any:
    """Yield the cohorts, whose list rank 1 cannot read after the first."""
    for number, cohort in enumerate(COHORTS):
        if rank == number == 1:
            raise OSError("no list")
        yield cohort


STEPS = {
    "all rounds": lambda rank: last(rank, method()),
    "resumed": lambda rank: last(
        rank,
        method(),
        start=list(fp.run_rounds(method(), Data, COHORTS[:2], group=dist.group.WORLD))[-1],
    ),
    "resumed from one folder": lambda rank: last(rank, method(), start=saved(rank, world=2)),
    "one rank saved": lambda rank: last(rank, method(), start=saved(rank, world=1)),
    "shared": lambda rank: last(rank, method(), GUESTS, share=True),
    "shared, from one process": lambda rank: last(
        rank,
        method(),
        GUESTS,
        start=list(fp.run_rounds(method(), Data, GUESTS[:2]))[-1],
        share=True,
    ),
    "on disk": lambda rank: on_disk(rank, share=False),
    "on disk, shared": lambda rank: on_disk(rank, share=True),
    "bytes": counted_bytes,
    "one rank shares": lambda rank: last(rank, method(), share=rank == 0),
    "client 3 fails": lambda rank: last(rank, broken(rank), GUESTS, share=True),
    "servers drift": lambda rank: last(rank, drifting(rank)),
    "servers differ at first": lambda rank: last(rank, drifting(rank, first=True)),
    "a step fails": lambda rank: last(rank, failing_step(rank)),
    "a newcomer trained": trained_newcomer,
    "cohorts differ": lambda rank: last(rank, method(), [[0, 1], [rank, 2]]),
    "rounds differ": from_round,
    "rank 1 ends early": lambda rank: last(rank, method(), COHORTS[: 3 - rank]),
    "cohorts fail": lambda rank: last(rank, method(), listed(rank)),
    "all rounds, after all errors": lambda rank: last(rank, method()),
    "rank 1 is gone": gone,
}


def run_steps(rank: int, folder: Path) -> None:
    """Run every step, and save its result or its error with its seconds."""
    results = {}
    for name, step in STEPS.items():
        began = time.monotonic()
        try:
            result = step(rank)
        except Exception as error:
            notes = getattr(error, "__notes__", [])
            result = "; ".join([f"{type(error).__name__}: {error}", *notes])
        results[name] = result, time.monotonic() - began
    torch.save(results, folder / f"{rank}.pt")
