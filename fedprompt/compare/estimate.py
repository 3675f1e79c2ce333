"""Estimates of time, memory and disk before anything runs."""

import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

import fedprompt as fp
from fedprompt.compare.rows import Row
from fedprompt.compare.runs import Run, Runner, duration
from fedprompt.methods import HeldOut, evaluate

BATCH = 64
"""Number of test images that are predicted to measure the time of one."""


def estimate(runner: Runner, listed: Sequence[Row], seeds: int, tune: int) -> dict[str, str]:
    """Estimate the time of each row and of all, the memory of a process, and the disk.

    A client of each method trains a few steps here and predicts a few images, so that other
    clients and other machines differ.
    """
    partitions = list(runner.problem.partitions)
    spent = {row.title: seconds_of(runner.of(partitions[0], row, 0)) for row in listed}
    count = len(partitions) * (seeds + (tune / 2 if tune > 1 else 0))
    total = sum(spent.values()) * count / runner.workers
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    memory = peak * (1 if sys.platform == "darwin" else 1024) * runner.workers
    found = {title: f"{duration(seconds)} for each seed" for title, seconds in spent.items()}
    found["all rows"] = f"{duration(total)} with {runner.workers} processes"
    found["memory"] = f"{memory / 1e9:.1f} GB"
    found["disk"] = f"{runner.problem.cache / 1e9:.1f} GB of decoded images and tokens"
    return found


def seconds_of(one: Run) -> float:
    """Estimate the seconds of a run: of its steps, and of its tests."""
    trial = one.made()
    setting, client = trial.setting, trial.tested[0]
    method, spent = one.method(trial), {}
    data = trial.federation.data(setting, client, 0)
    for steps in (1, 4):
        few: dict[str, Any] = {"rounds": 1, "steps": steps, "cohort_size": 1}
        few |= {"epochs": None, "drop_last": False}
        short = one.method(trial._replace(setting=replace(setting, **few)))
        began = time.monotonic()
        (now,) = fp.run_rounds(short, trial.federation, [[client]])
        spent[steps] = time.monotonic() - began
    chosen = torch.arange(min(BATCH, len(trial.places)))
    held_out = HeldOut(trial.tests.inputs[chosen], trial.tests.labels[chosen])
    began = time.monotonic()
    evaluate(method, trial.federation, now, held_out, clients=[client], newcomers=())
    tested = (time.monotonic() - began) / len(chosen)
    models = len(trial.tested) if one.row.personalized else 1
    clients = setting.cohort_size or len(setting.clients)
    step = max(spent[4] - spent[1], 0) / 3
    training = setting.rounds * clients * (spent[1] + step * (data.steps - 1))
    return training + models * len(trial.places) * tested
