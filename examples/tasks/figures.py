"""Accuracy, bytes and gradient passes of a method on a trial."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

import fedprompt as fp
from fedprompt.methods import counted_passes, evaluate
from tasks.core import Trial

OWN_STEPS = 10  # of a newcomer, after every method
EVERY = 5  # rounds between two points of a curve


def run(
    method: fp.Method,
    trial: Trial,
    *,
    shared: bool,
    last_rounds: int = 1,
    curve: bool = False,
    causes: Callable[..., Mapping[str, float]] | None = None,
    finished_round: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Run all rounds of a method, and measure the last predictions.

    Args:
        method: Method.
        trial: Trial.
        shared: Whether all clients predict with one model.
        last_rounds: Number of last rounds whose accuracies are averaged.
        curve: Whether to measure the accuracy on all test inputs every five rounds, too.
        causes: Function (trial, method, last round) -> further figures.
        finished_round: Called after each round.
    """
    setting, ledger, measured = trial.setting, fp.Ledger(), []
    common = {"domains": clients_by_domain(trial), "newcomers": (), "shared": shared}
    points: dict[str, list[float]] = {"rounds": [], "accuracy": []}
    passes: Counter[str] = Counter()
    rounds = fp.run_rounds(fp.counted(method, ledger), trial.federation.data, setting.cohorts())
    for number in range(1, setting.rounds + 1):
        with counted_passes() as own, torch.device(setting.device):
            now = next(rounds)
        passes += own
        finished_round()
        if number > setting.rounds - last_rounds:
            with counted_passes() as own:
                measured.append(measure(method, trial, now, **common))
            passes += own
        elif curve and number % EVERY == 0:
            points["rounds"].append(number)
            points["accuracy"].append(measure(method, trial, now, **common)["full"])
    turns = setting.rounds * setting.cohort_size
    figures = {name: float(np.mean([each[name] for each in measured])) for name in measured[0]}
    new = trial.newcomers
    figures |= measure(method, trial, now, clients=(), newcomers=new, steps=OWN_STEPS)
    for direction in ("up", "down"):
        figures[f"bytes_{direction}"] = ledger.total(direction=direction) / turns
    figures |= {"trained": measured[-1]["trained"], "backward": passes.total() / turns}
    if curve:
        points["rounds"].append(setting.rounds)
        points["accuracy"].append(figures["full"])
    return figures | (points if curve else {}) | dict(causes(trial, method, now) if causes else {})


def measure(method: fp.Method, trial: Trial, now: fp.Round, **options: Any) -> dict[str, float]:
    """Measure the accuracy of clients after a round."""
    return evaluate(
        method,
        trial.federation,
        now,
        trial.test,
        trial.test_cells % trial.setting.num_classes,
        mixes=dict(enumerate(trial.mixes)),
        cells=trial.test_cells,
        **options,
    )


def clients_by_domain(trial: Trial) -> dict[str, list[int]]:
    """Return the clients of each domain, in which they have most of their inputs."""
    names, found = trial.domain_names, {}
    for client in trial.setting.clients if len(names) > 1 else ():
        domain = int(trial.mixes[client].reshape(len(names), -1).sum(1).argmax())
        found.setdefault(names[domain], []).append(client)
    return found
