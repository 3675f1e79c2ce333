"""Runs of the methods of the gallery on tiny federations, in one process and on two ranks.

Spawned processes import this module by name.
"""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

import fedprompt as fp
from fedprompt.methods import METHODS, Federation, HeldOut, evaluate
from fedprompt.wire.gather import rank_of
from tiny_federations import RANDOM, federation_of

RUNS = [(name, family) for name, entry in METHODS.items() for family in entry.families]
GIVEN = {"server_steps": 2, "sizes": {1: 1}}
MAKERS = {
    name: partial(entry.make, **{key: GIVEN[key] for key in GIVEN.keys() & entry.defaults})
    for name, entry in METHODS.items()
}
"""Makers of the methods, with few steps of a server that trains, and a smaller client."""
CHANGES = {"rounds": 2, "cohort_size": 2, "clients": [0, 1, 2], **RANDOM}
WAYS = ("at home", "shared", "shared, from one process")
"""How two ranks run: clients at home, or with guests, also from a round of one process."""
WITH_DATA = (0, 1, 2, 5)
"""Clients with data. One that is not in the last round predicts, and the newcomer does."""


class Outcome(NamedTuple):
    """State after the last round, the logits of clients, and a function to their figures."""

    now: fp.Round
    logits: dict[int, Tensor]
    figures: Callable[[], dict[int, dict[str, float]]]


def predicted(method: fp.Method, federation: Any, now: fp.Round, client: int) -> Tensor:
    """Classify the inputs of a client with its model."""
    model = now.model(method, federation.data(client, now.server_round)).eval()
    with torch.no_grad():
        logits: Tensor = model(federation.inputs[federation.shards[client]]).clone()
    return logits


def run(
    make: Callable[..., fp.Method], name: str, family: str, way: str = WAYS[0], group: Any = None
) -> Outcome:
    """Run all rounds. On ranks that do not share, only the clients of this rank have data."""
    torch.set_default_dtype(torch.float64)  # which no code has by chance
    federation = federation_of(METHODS[name], family, **CHANGES)
    (rank, world), method = rank_of(group), make(federation)
    here = [client for client in WITH_DATA if client % world == rank]

    def data(client: int, server_round: int) -> Any:
        assert client in here or share
        return federation.data(client, server_round)

    share, start = way != WAYS[0], None
    cohorts = [[2, 0], [0, 2]] if share else federation.cohorts()  # client 2 is a guest
    if way == WAYS[2]:
        start = next(fp.run_rounds(make(federation), data, cohorts))
    *_, now = fp.run_rounds(method, data, cohorts, start=start, group=group, share=share)
    logits = {client: predicted(method, federation, now, client) for client in here if client > 1}

    def figures() -> dict[int, dict[str, float]]:
        parts = federation.inputs, federation.labels
        tests = HeldOut(*parts, mixes="classes")
        tested = {"clients": [0, 2], "newcomers": (), "group": group}  # client 2 is a guest
        whole = Federation(*parts, federation.shards)
        return evaluate(method, whole, now, tests, **tested).clients

    return Outcome(now, logits, figures)


FEW = [(name, family) for name, family in RUNS if name in ("fedprox", "scaffold", "cocoop")]
"""Methods that every run of the tests runs on ranks."""


def run_few(rank: int, folder: Path) -> None:
    """Run a few methods on this rank in all ways, and save what came out."""
    _run_on_rank(rank, folder, FEW)


def run_all(rank: int, folder: Path) -> None:
    """Run all methods on this rank in all ways, and save what came out."""
    _run_on_rank(rank, folder, RUNS)


def _run_on_rank(rank: int, folder: Path, runs: list[tuple[str, str]]) -> None:
    ways = [(*each, way) for each in runs for way in WAYS]
    found = {each: run(MAKERS[each[0]], *each, group=dist.group.WORLD) for each in ways}
    for each, outcome in found.items():
        found[each] = outcome._replace(figures=outcome.figures())
    torch.save(found, folder / f"{rank}.pt")


class Joined(nn.Module):
    """Models whose logits are stacked."""

    def __init__(self, models: list[Any]) -> None:
        super().__init__()
        self.models = models

    def forward(self, inputs: Tensor) -> Tensor:
        for model in self.models:
            model.eval()
        return torch.stack([model(inputs) for model in self.models])


def together(names: list[str], *, newcomers: bool = False) -> Callable[[Any], fp.Method]:
    """Return a maker of one method that runs several, whose entries begin with their names.

    With `newcomers`, a client also predicts as if it had no state.
    """

    def part(message: fp.interfaces.Message, name: str) -> dict[str, Any]:
        start = f"{name}."
        return {key[len(start) :]: message[key] for key in message if key.startswith(start)}

    def joined(messages: dict[str, Any]) -> dict[str, Any]:
        parts = [fp.named(name, message) for name, message in messages.items()]
        return {key: entry for each in parts for key, entry in each.items()}

    def make(setting: Any) -> fp.Method:
        methods = {name: MAKERS[name](setting) for name in names}

        def client(data: Any, answer: Any, state: Any) -> tuple[Any, Any]:
            found = {
                name: method.client(data, part(answer, name), state.get(name, {}))
                for name, method in methods.items()
            }
            states = {name: state for name, (_, state) in found.items()}
            return joined({name: payload for name, (payload, _) in found.items()}), states

        def predict(data: Any, answer: Any, state: Any) -> nn.Module:
            found = []
            for name, method in methods.items():
                own = state.get(name, {})
                for each in [own, {}] if own and newcomers else [own]:
                    model = method.predict(data, part(answer, name), each)
                    found.append(deepcopy(model))
            return Joined(found)

        def answer(client: int, state: Any) -> dict[str, Any]:
            servers = {name: method.server for name, method in methods.items()}
            return joined(
                {name: each.answer(client, state[name]) for name, each in servers.items()}
            )

        def step(server_round: int, payloads: Any, state: Any) -> dict[str, Any]:
            found = {}
            for name, method in methods.items():
                own = {client: part(payload, name) for client, payload in payloads.items()}
                found[name] = method.server.step(server_round, own, state[name])
            return found

        state = {name: method.server.state for name, method in methods.items()}
        (exchanges,) = {method.exchanges for method in methods.values()}
        return fp.Method(client, fp.Server(state, answer, step), predict, exchanges)

    return make
