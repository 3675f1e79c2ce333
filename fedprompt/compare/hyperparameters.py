"""Hyperparameters: trials from a method's own ranges, and the choice of the best one."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedprompt.compare import cells
from fedprompt.compare.cells import Cell
from fedprompt.compare.problems import Problem, Record
from fedprompt.compare.rows import HEAD_RATE, Row
from fedprompt.compare.trials import Machine
from fedprompt.methods.registry import Range

TUNING_SEED = 1_000  # of no reported run


def drawn(row: Row, count: int) -> list[dict[str, Any]]:
    """Return the hyperparameters of some trials, the first with those of the row.

    The others are drawn from the ranges of the method, the same in each call.
    """
    rng = np.random.default_rng([TUNING_SEED, *str(row.method).encode()])
    search = row.entry.search
    others = [{name: draw(search[name], rng) for name in search} for _ in range(count - 1)]
    return [dict(row.values), *({**row.values, **values} for values in others if values)]


def draw(values: Range, rng: np.random.Generator) -> Any:
    """Draw a number log-uniformly, or a choice."""
    if isinstance(values, list):
        return values[rng.integers(len(values))]
    low, high = values
    return float(f"{np.exp(rng.uniform(np.log(low), np.log(high))):.3g}")


def half_decades(low: float, high: float) -> list[float]:
    """Return the rates from low to high that are a power of ten, or three times one."""
    return [_rate(number) for number in range(_number(low), _number(high) + 1)]


def neighbor(best: dict[str, Any], tried: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return a trial half a decade from the best in one of its rates, or None if all were tried.

    A rate that all trials share is not tuned.
    """
    rates = HEAD_RATE, "learning_rate"
    names = [name for name in rates if len({values.get(name) for values in tried}) > 1]
    done = [[values[name] for name in names] for values in tried]
    for name in names:
        for step in (1, -1):
            near = {**best, name: _rate(_number(best[name]) + step)}
            if [near[name] for name in names] not in done:
                return near
    return None


def _rate(number: int) -> float:
    return float(f"{1 + number % 2 * 2}e{number // 2}")


def _number(rate: float) -> int:
    return round(2 * math.log10(rate))


def tuned(
    problem: Problem,
    partition: str,
    rows: Sequence[Row],
    run_all: Callable[[Sequence[Cell]], Sequence[Record]],
    path: Path,
    *,
    machine: Machine,
    neighbors: bool = True,
) -> list[Row]:
    """Return the rows with the values of their trials that are best on own mixes.

    Trials train on a part of the training images and test on the others. Of equal trials, the first
    counts. Values that diverge in a reported run are left out when the program starts again.

    Args:
        problem: Problem with trials.
        partition: Name of the partition.
        rows: Rows.
        run_all: Function that returns the records of cells.
        path: File of the records.
        machine: Where trials run.
        neighbors: Whether trials are added until both neighbors of the best one in each rate were
            tried.
    """
    assert problem.trials is not None
    where = problem.tuned_on or partition
    trials = {row.title: problem.trials(where, row) for row in rows}
    while True:
        tried = [
            Cell(problem, where, replace(row, values=values), TUNING_SEED, trial, machine)
            for row in rows
            for trial, values in enumerate(trials[row.title])
        ]
        left_out = cells.unstable(path, problem)
        found = list(run_all(tried))[::-1]  # of equal ones the first
        found.sort(key=lambda record: float(record["own"]))
        stable = [record for record in found if cells.chosen(record, problem) not in left_out]
        best = {record["row"]: record["values"] for record in stable}
        near = {row: neighbor(values, trials[row]) for row, values in best.items() if neighbors}
        more = {row: values for row, values in near.items() if values}
        if not more:
            return [replace(row, values=best.get(row.title, row.values)) for row in rows]
        for title, values in more.items():
            trials[title].append(values)
