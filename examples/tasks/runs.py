"""Cells of a table, each with a line in a JSON-lines file, and the processes that run them."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import tasks
from tasks import figures, ranks, records
from tasks.core import Machine, Row, TaskError

DIVERGED = {"own": 0.0, "diverged": 1.0}
"""Figures of a run that sends NaN or infinity, as with too high a learning rate."""


@dataclass(frozen=True)
class Cell:
    """One run of a row.

    Attributes:
        task: Name of the task.
        partition: Name of the partition.
        row: Row, with all its hyperparameters.
        seed: Seed of the run.
        trial: Number of the tuning trial, or None if the run is reported.
        machine: Where it runs.
        files: Files of methods that are not in the gallery.
    """

    task: str
    partition: str
    row: Row
    seed: int
    trial: int | None
    machine: Machine
    files: Sequence[Path] = ()

    def key(self) -> str:
        """Return what tells this cell from the others of a file."""
        return key(self.named())

    def named(self) -> records.Record:
        """Return the fields that a cell and its record have in common."""
        where = self.task, self.partition, self.row.title, self.seed, self.trial
        named = dict(zip(records.NAMED, (*where, dict(self.row.values)), strict=True))
        named |= tasks.TASKS[self.task].inputs(self.partition, self.machine)
        return named | ({} if self.machine.shrink == 1 else {"shrink": self.machine.shrink})


def key(record: Mapping[str, Any]) -> str:
    """Return the fields that identify a cell."""
    fields = [record[name] for name in records.NAMED[:-1]] + [_changed(record)]
    return json.dumps([*fields, record.get("shrink", 1), record.get("inputs")], sort_keys=True)


def chosen(record: Mapping[str, Any]) -> str:
    """Return the row, its values and its inputs."""
    return json.dumps([record["row"], _changed(record), record.get("inputs")], sort_keys=True)


def _changed(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are not defaults, so a later hyperparameter changes no old cell."""
    defaults = _defaults(record["task"], record["partition"], record["row"])
    values = record["values"].items()
    return {name: value for name, value in values if json.dumps(value) != defaults.get(name)}


@cache
def _defaults(task: str, partition: str, title: str) -> dict[str, str]:
    """Return the defaults of the method of a row; of a row in a file, none."""
    found = tasks.TASKS.get(task)
    rows = found.rows(partition) if found and partition in found.partitions else ()
    entries = [row.entry for row in rows if row.title == title and row.method is not None]
    return {name: json.dumps(value) for entry in entries for name, value in entry.defaults.items()}


def unstable(path: Path) -> set[str]:
    """Return rows with values that diverged in a reported run, which no tuning may choose."""
    reported = [record for record in records.read(path) if record["trial"] is None]
    return {chosen(record) for record in reported if "diverged" in record}


def load(path: Path) -> dict[str, records.Record]:
    """Read the last record of each cell in a file, without reported runs of unstable values."""
    left_out = unstable(path)
    return {
        key(record): record
        for record in records.read(path)
        if record["trial"] is not None or chosen(record) not in left_out
    }


def run(cell: Cell) -> dict[str, Any]:
    """Run a cell in this process.

    Tiny networks gain nothing from a second thread, so a process has one.
    """
    torch.set_num_threads(1)
    for path in cell.files:
        tasks.read_methods(path)
    task, row = tasks.TASKS[cell.task], cell.row
    trial = task.make(
        cell.partition, row, seed=cell.seed, machine=cell.machine, validate=cell.trial is not None
    ).on(ranks.device(cell.machine.device))
    with torch.device(trial.setting.device):
        method = task.method(row, trial)
    return figures.run(
        method,
        trial,
        shared=not row.personalized,
        last_rounds=task.last_rounds(cell.partition, row),
        rise="rise" in task.columns,
        causes=task.causes(cell.partition, row),
    )


def run_all(
    cells: Sequence[Cell], path: Path, *, workers: int, title: str = ""
) -> list[records.Record]:
    """Run cells that have no record yet, and return the records of all, in the order of cells.

    Args:
        cells: Cells.
        path: JSON-lines file.
        workers: Number of processes; with 1, cells run in this process.
        title: Words before the bar of cells, which the first rank shows.

    Raises:
        TaskError: If a file is missing.
        RuntimeError: If a cell fails. The records of the others are written before.
    """
    found = load(path)
    missing = [cell for cell in cells if cell.key() not in found]
    failed = []
    size = {"total": len(cells), "initial": len(cells) - len(missing), "unit": "cell"}
    bar = tqdm(_results(missing, workers), title, disable=ranks.rank() > 0, **size)
    for cell, result in bar:
        if isinstance(result, TaskError | OSError):
            raise result  # a file is missing, for the other cells, too
        diverged = isinstance(result, ValueError) and "must be finite" in str(result)
        if isinstance(result, Exception) and not (diverged and cell.trial is not None):
            failed.append((cell, result))
            if not diverged:
                continue
        measured = DIVERGED if diverged else records.rounded(result)
        record = cell.named() | records.origin() | measured
        if ranks.rank() == 0:
            records.append(path, record)
        found[cell.key()] = record
    if failed:
        cell, error = failed[0]
        raise RuntimeError(f"{len(failed)} runs failed, the first is {cell.named()}") from error
    return [found[cell.key()] for cell in cells]


def _results(
    cells: Sequence[Cell], workers: int
) -> Iterable[tuple[Cell, dict[str, Any] | Exception]]:
    if workers == 1:
        yield from ((cell, _outcome(run, cell)) for cell in cells)
        return
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        futures = {pool.submit(run, cell): cell for cell in cells}
        for future in as_completed(futures):
            yield futures[future], _outcome(future.result)


def _outcome(result: Callable[..., dict[str, Any]], *cell: Cell) -> dict[str, Any] | Exception:
    try:
        return result(*cell)
    except Exception as error:  # the other cells run before it is raised
        return error
