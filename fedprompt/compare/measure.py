"""Accuracy, bytes and gradient passes of a method on a trial."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import fedprompt as fp
from fedprompt.compare import ranks
from fedprompt.compare.problems import Causes, Record
from fedprompt.compare.trials import Trial
from fedprompt.interfaces import Method, Round
from fedprompt.methods import Figures, HeldOut, counted_passes, evaluate

OWN_STEPS = 10  # of a newcomer, after every method


def run(
    method: Method,
    trial: Trial,
    *,
    shared: bool,
    last_rounds: int = 1,
    rise: bool = False,
    causes: Causes | None = None,
    progress: Callable[[float], object] = lambda share: None,
    finished: Callable[[Trial, Method, Round], object] = lambda trial, method, now: None,
) -> Record:
    """Run all rounds of a method, and measure the last predictions.

    Args:
        method: Method.
        trial: Trial.
        shared: Whether all clients predict with one model.
        last_rounds: Number of last rounds whose accuracies are averaged.
        rise: Whether to measure the negative effect, the largest rise of a client's training loss
            over its lowest value before, in nats. Not measured on ranks.
        causes: Function (trial, method, last round) -> further figures.
        progress: Function that is called with each further share of the run.
        finished: Function that each rank calls after the last round.
    """
    setting, ledger, measured = trial.setting, fp.Ledger(), []
    losses: list[Tensor] = []
    passes: Counter[str] = Counter()  # of this rank's clients, and of all calls
    counted = fp.rounds.counted(with_passes(method, passes), ledger)
    group = dist.group.WORLD if dist.is_initialized() else None
    common = {"clients": trial.tested, "newcomers": (), "shared": shared, "group": group}
    domains = clients_by_domain(trial)
    data, cohorts = trial.federation.data, setting.cohorts()
    rounds = fp.run_rounds(counted, data, cohorts, group=group, share=True)
    for number in range(1, setting.rounds + 1):
        with counted_passes() as counts, torch.device(setting.device):
            now = next(rounds)
        passes["all"] += counts.total()
        if rise and group is None:
            losses.append(training_losses(method, trial, now))
        if number > setting.rounds - last_rounds:
            with counted_passes() as counts:
                measured.append(measure(method, trial, now, domains=domains, **common))
            passes += Counter(clients=counts.total(), all=counts.total())
        progress(1 / setting.rounds)
    figures = last_figures(method, trial, now, measured, common)
    finished(trial, method, now)
    figures |= costs(ledger, passes, setting.rounds * (setting.cohort_size or len(setting.clients)))
    figures["trained"] = measured[-1]["trained"]
    if losses:
        figures["rise"] = fp.metrics.negative_effect(torch.stack(losses)).average
    return figures | dict(causes(trial, method, now) if causes and ranks.rank() == 0 else {})


def last_figures(
    method: Method, trial: Trial, now: Round, measured: Sequence[Figures], common: Mapping[str, Any]
) -> Record:
    """Average the figures of the last rounds, and measure new clients and further tests."""
    figures: Record = {
        name: float(np.mean([values[name] for values in measured])) for name in measured[0]
    }
    new = [c for c in trial.newcomers if trial.own is None or len(trial.own[c])]
    options = {"clients": (), "newcomers": new, "steps": OWN_STEPS, "group": common["group"]}
    found = measure(method, trial, now, **options)
    figures |= found | further(method, trial, now, figures["full"], common)
    if trial.names:
        figures["clients"] = by_name(trial.names, measured[-1].clients | found.clients)
    return figures


def further(
    method: Method, trial: Trial, now: Round, base: float, common: Mapping[str, Any]
) -> dict[str, float]:
    """Measure all clients on further tests; "new" with the harmonic mean of base and new ones."""
    found = {}
    for name, (inputs, labels, class_names) in trial.further.items():
        tests = HeldOut(inputs, labels)
        figures = evaluate(method, trial.federation, now, tests, class_names=class_names, **common)
        found[name] = figures["full"]
    return found | ({"h": fp.metrics.harmonic_mean(base, found["new"])} if "new" in found else {})


def by_name(names: Sequence[str], clients: Mapping[int, Mapping[str, float]]) -> dict[str, Record]:
    """Return the accuracies of each client under its name."""
    kept = ("full", "own", "received", "after")
    return {
        names[client]: {name: figures[name] for name in kept if name in figures}
        for client, figures in clients.items()
    }


def costs(ledger: fp.Ledger, passes: Counter[str], turns: int) -> dict[str, float]:
    """Return the bytes and the backward passes of one client in one round."""
    sent = {f"bytes_{name}": ledger.total(direction=name) for name in ("up", "down")}
    total = ranks.summed(sent | {"backward": passes["clients"]})
    total["backward"] += passes["all"] - passes["clients"]  # each rank runs the server
    return {name: count / turns for name, count in total.items()}


def training_losses(method: Method, trial: Trial, now: Round) -> Tensor:
    """Compute the cross-entropy of each client on all its training images, (clients,)."""
    found = []
    for client in trial.setting.clients:
        data = trial.federation.data(client, now.server_round)
        images, labels = data.own()
        model = now.model(method, data).eval()
        with torch.no_grad():  # a prediction may train
            found.append(F.cross_entropy(model(images), labels))
        model.train()
    return torch.stack(found)


def with_passes(method: Method, passes: Counter[str]) -> Method:
    """Count the backward passes of the clients of a method."""

    def client(data: Any, answer: Any, state: Any) -> Any:
        with counted_passes() as counts:
            result = method.client(data, answer, state)
        passes["clients"] += counts.total()
        return result

    return method._replace(client=client)


def measure(method: Method, trial: Trial, now: Round, **options: Any) -> Figures:
    """Measure the accuracy of clients after a round; each rank measures its own."""
    classes = trial.test_cells % trial.setting.num_classes
    if trial.own is None:
        tests: dict[str, Any] = {"mixes": dict(enumerate(trial.mixes)), "cells": trial.test_cells}
    else:
        tests = {"own": {client: part for client, part in enumerate(trial.own) if len(part)}}
    held_out = HeldOut(trial.test, classes, **tests)
    return evaluate(method, trial.federation, now, held_out, **options)


def clients_by_domain(trial: Trial) -> dict[str, list[int]]:
    """Return the clients of each domain, in which they have most of their inputs."""
    names, found = trial.domain_names, dict[str, list[int]]()
    for client in trial.tested if len(names) > 1 else ():
        domain = int(trial.mixes[client].reshape(len(names), -1).sum(1).argmax())
        found.setdefault(names[domain], []).append(client)
    return found
