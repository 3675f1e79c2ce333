"""Cells of a table, each with a line in a JSON-lines file, and the processes that run them."""

import json
import os
import pickle
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm  # type: ignore[import-untyped]

from fedprompt.compare import measure, prompts, ranks, records
from fedprompt.compare.problems import Problem, Record
from fedprompt.compare.rows import SOURCES, Row, code
from fedprompt.compare.trials import CompareError, Machine, line_of

DIVERGED = {"own": 0.0, "diverged": 1.0}
"""Figures of a run that sends NaN or infinity, as with too high a learning rate."""
GUARD = '`if __name__ == "__main__":` around its calls'


@dataclass(frozen=True)
class Cell:
    """One run of a row.

    Attributes:
        problem: Problem.
        partition: Name of the partition.
        row: Row, with all its hyperparameters.
        seed: Seed of the run.
        trial: Number of the tuning trial, or None if the run is reported.
        machine: Where it runs.
        save: Folder of the trained prompts, or None.
    """

    problem: Problem
    partition: str
    row: Row
    seed: int
    trial: int | None
    machine: Machine
    save: Path | None = None

    def key(self) -> str:
        """Return what tells this cell from the others of a file."""
        return key(self.named(), self.problem)

    @property
    def stem(self) -> str:
        """First part of the names of files, which no other cell has."""
        return prompts.stem(self.named(), self.key())

    def named(self) -> Record:
        """Return the fields that a cell and its record have in common."""
        where = self.problem.name, self.partition, self.row.title, self.seed, self.trial
        named = dict(zip(records.NAMED, (*where, dict(self.row.values)), strict=True))
        named |= self.problem.inputs(self.partition, self.machine)
        if (source := code(self.row)) is not None:
            named["code"] = source
        usual = Machine()
        for name in ("shrink", "device"):
            if (value := getattr(self.machine, name)) != getattr(usual, name):
                named[name] = value
        return named


def key(record: Mapping[str, Any], problem: Problem) -> str:
    """Return the fields that identify a cell. A record without a device was made on the CPU."""
    where = [record[name] for name in records.NAMED[:-1]]
    machine = record.get("shrink", 1), record.get("device", "cpu")
    return json.dumps([where, chosen(record, problem), machine])


def chosen(record: Mapping[str, Any], problem: Problem) -> str:
    """Return the row, its values, its inputs and its code."""
    # A value that is the default is left out, so a later hyperparameter changes no old cell.
    usual, values = _defaults(problem, record["partition"], record["row"]), record["values"]
    changed = {name: each for name, each in values.items() if json.dumps(each) != usual.get(name)}
    fields = record["row"], changed, record.get("inputs"), record.get("code")
    return json.dumps(fields, sort_keys=True)


@cache
def _defaults(problem: Problem, partition: str, title: str) -> dict[str, str]:
    """Return the defaults of the method of a row; of a row in a file, none."""
    rows = problem.rows(partition) if partition in problem.partitions else ()
    entries = [row.entry for row in rows if row.title == title and row.method is not None]
    return {name: json.dumps(value) for entry in entries for name, value in entry.defaults.items()}


def unstable(path: Path, problem: Problem) -> set[str]:
    """Return rows with values that diverged in a reported run, which no tuning may choose."""
    reported = [record for record in records.read(path) if record["trial"] is None]
    return {chosen(record, problem) for record in reported if "diverged" in record}


def load(path: Path, problem: Problem) -> dict[str, Record]:
    """Read the last record of each cell in a file, without reported runs of unstable values."""
    left_out = unstable(path, problem)
    return {
        key(record, problem): record
        for record in records.read(path)
        if record["trial"] is not None or chosen(record, problem) not in left_out
    }


def run(cell: Cell, progress: Callable[[float], object] = lambda share: None) -> Record:
    """Run a cell in this process.

    It has one thread, so that sums are rounded the same on every machine, and as many afterwards
    as before.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _run(cell, progress)
    except SystemExit as error:  # which would end the others, too
        raise RuntimeError(line_of(error)) from error
    finally:
        torch.set_num_threads(threads)


def _run(cell: Cell, progress: Callable[[float], object]) -> Record:
    problem, row = cell.problem, cell.row
    trial = problem.make(
        cell.partition, row, seed=cell.seed, machine=cell.machine, validate=cell.trial is not None
    ).on(ranks.device(cell.machine.device))
    with torch.device(trial.setting.device):
        method = problem.method(row, trial)
    save = partial(prompts.save, cell.save or Path(), cell.stem, not row.personalized)
    return measure.run(
        method,
        trial,
        shared=not row.personalized,
        last_rounds=problem.last_rounds(cell.partition, row),
        rise="rise" in problem.columns,
        causes=problem.causes(cell.partition, row),
        progress=progress,
        finished=(lambda *run: None) if cell.save is None else save,
    )


class RunsError(RuntimeError):
    """Some runs failed.

    Attributes:
        failed: Cells, and the errors of their runs.
    """

    def __init__(self, failed: Sequence[tuple[Cell, Exception]]) -> None:
        super().__init__(f"{len(failed)} runs failed, the first is {failed[0][0].named()}")
        self.failed = failed


def run_all(cells: Sequence[Cell], path: Path, *, workers: int, title: str = "") -> list[Record]:
    """Run cells that have no record yet, and return the records of all, in the order of cells.

    Args:
        cells: Cells of one problem.
        path: JSON-lines file.
        workers: Number of processes; with 1, cells run in this process.
        title: Words before the bar of cells, which the first rank shows on a terminal.

    Raises:
        CompareError: If a file is missing.
        RunsError: If a cell fails. The records of the others are written before.
    """
    found = load(path, cells[0].problem) if cells else {}
    missing = [cell for cell in cells if cell.key() not in found]
    failed = []
    with (
        _bar(title, len(cells), len(cells) - len(missing)) as bar,
        closing(_results(missing, workers, bar.update)) as results,
    ):
        for cell, result in results:
            if isinstance(result, CompareError | OSError):
                raise result  # a file is missing, for the other cells, too
            diverged = isinstance(result, ValueError) and "must be finite" in str(result)
            if isinstance(result, Exception):
                if not (diverged and cell.trial is not None):
                    failed.append((cell, result))
                if not diverged:
                    continue
                result = DIVERGED
            record = cell.named() | records.origin() | records.rounded(result)
            if ranks.rank() == 0:
                records.append(path, record)
            found[cell.key()] = record
    ranks.wait()  # before another one reads the file
    if failed:
        raise RunsError(failed) from failed[0][1]
    return [found[cell.key()] for cell in cells]


def _bar(title: str, total: int, initial: int) -> Any:
    """Make a bar of the cells on a terminal. A log has no bar."""
    form = "{desc}: {percentage:3.0f}%|{bar}| {n:.0f}/{total} [{elapsed}<{remaining}]"
    hidden = True if ranks.rank() > 0 else None  # with None, it is hidden in a log
    return tqdm(desc=title, total=total, initial=initial, bar_format=form, disable=hidden)


def _results(
    cells: Sequence[Cell], workers: int, progress: Callable[[float], object]
) -> Generator[tuple[Cell, Record | Exception], None, None]:
    if workers == 1:
        yield from ((cell, _outcome(run, cell, progress)) for cell in cells)
        return
    with _pool(min(workers, len(cells) or 1)) as pool:
        futures = {pool.submit(run, cell): cell for cell in cells}
        try:
            for future in as_completed(futures):
                progress(1)
                yield futures[future], _outcome(future.result)
        finally:
            pool.shutdown(cancel_futures=True)


def _pool(workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(workers, get_context("spawn"), initializer=end_with_parent)


def end_with_parent() -> None:
    """End this process when its parent has ended, even if the parent was killed."""
    parent = parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def check_sent(problem: Problem, rows: Sequence[Row]) -> None:
    """Require that another process can make a problem, and import the functions of rows."""
    imported = [row for row in rows if row.make and row.make.__module__ not in SOURCES]
    try:
        pickle.dumps(problem)
        with _pool(1) as pool:  # which starts a process when something is submitted
            for row in imported:
                if pool.submit(_code, pickle.dumps(row)).result() != code(row):
                    raise ImportError(f"{row.method} has other code there")
    except Exception as error:
        rule = "be 1 for functions that another process cannot import"
        remedy = f"Write them to a module or a file. A script needs {GUARD}"
        raise CompareError(f"`workers` must {rule}: {line_of(error)}. {remedy}.") from error


def _code(sent: bytes) -> str | None:
    return code(pickle.loads(sent))


def _outcome(result: Callable[..., Record], *arguments: Any) -> Record | Exception:
    try:
        return result(*arguments)
    except BrokenProcessPool:
        text = f"A worker process ended, perhaps without memory. A script needs {GUARD}."
        raise CompareError(text) from None
    except Exception as error:  # the other cells run before it is raised
        return error
