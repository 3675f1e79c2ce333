"""Runs of rows: one row and seed at a time, or in several processes."""

import math
import os
import pickle
import re
import secrets
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing import get_context, parent_process
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
import torch
from tqdm import tqdm  # type: ignore[import-untyped]

import fedprompt as fp
from fedprompt._threads import one_thread
from fedprompt.compare import classifier, measure, ranks, records, rows, stamps
from fedprompt.compare.measure import Bits, Finished
from fedprompt.compare.problems import Problem
from fedprompt.compare.records import Record, Records
from fedprompt.compare.rows import CONSTANT, Row
from fedprompt.compare.trials import Chosen, CompareError, Machine, Trial, line_of
from fedprompt.interfaces import Method
from fedprompt.methods import METHODS, HeldOut, evaluate
from fedprompt.methods.registry import Range

DIVERGED = {"own": 0.0, "diverged": 1.0}
"""Figures of a run that sends NaN or infinity, as with too high a learning rate."""
GUARD = '`if __name__ == "__main__":` around its calls'
TUNING_SEED = 1_000  # of no reported run
LONGEST = 40
"""Number of characters of a name that a file has."""


@dataclass(frozen=True)
class Run:
    """One row with one seed.

    Attributes:
        problem: Problem.
        partition: Name of the partition.
        row: Row, with all its hyperparameters.
        seed: Seed of the run.
        trial: Number of the tuning trial, or None if the run is reported.
        machine: Where it runs.
        stamp: Stamp of the row in this run.
        folder: Folder of the results, or None.
        known: What the stamp is made from beside the row, or None for one that cannot be told.
    """

    problem: Problem
    partition: str
    row: Row
    seed: int
    trial: int | None
    machine: Machine
    stamp: str
    folder: Path | None = None
    known: tuple[Any, ...] | None = None

    def named(self) -> Record:
        """Return the fields that a run and its record have in common."""
        values = records.written(self.row.values)
        where = self.partition, self.row.title, self.seed, self.trial, values
        named = dict(zip(records.NAMED, where, strict=True)) | {"stamp": self.stamp}
        if self.row.family != self.problem.families[0]:
            named["tower"] = True
        usual = Machine()
        for name in ("shrink", "device"):
            if (value := getattr(self.machine, name)) != getattr(usual, name):
                named[name] = value
        return named

    def made(self) -> Trial:
        """Return the trial, on the device of this rank."""
        machine = replace(self.machine, device=ranks.device(self.machine.device))
        validate = {} if self.trial is None else {"validate": True}
        where = {"seed": self.seed, "machine": machine, **validate}
        trial = self.problem.trial(self.partition, self.row, **where)
        return trial.shrunk(machine.shrink).on(machine.device)

    def method(self, trial: Trial) -> Method:
        """Make the method of the row for a trial."""
        with torch.device(trial.setting.device):
            made = self.row.entry.make(trial.setting, **self.row.values)
        return made if made.setting is not None else made._replace(setting=trial.setting)

    @property
    def checkpoint(self) -> Path | None:
        """Folder of the state of the run while it is not finished."""
        return None if self.folder is None else self.folder / "running" / stem(self.named())

    def forget(self) -> None:
        """Delete the state of a run that is finished."""
        if self.checkpoint is not None:
            rmtree(self.checkpoint, ignore_errors=True)


def stem(record: Mapping[str, Any]) -> str:
    """Return the first part of the names of files of a run, which no other run has."""
    where = [file_name(record["partition"])] if record["partition"] else []
    row = re.sub(r"[^a-zA-Z0-9_]+", "-", record["row"]).strip("-").lower()[:LONGEST]
    known = stamps.digest(records.key(record))[:8]
    return "-".join([*where, row, f"seed{record['seed']}", known])


def file_name(name: str) -> str:
    """Return an ASCII name of a client or a domain for a file; if it is changed, it has a hash."""
    clean = re.sub(r"[^a-zA-Z0-9_ .-]", "_", name)[:LONGEST]
    return clean if clean == name else f"{clean}-{stamps.digest(name)[:8]}"


@one_thread()
def run(one: Run, progress: Callable[[float], object] = lambda share: None) -> tuple[Record, Bits]:
    """Run a row and a seed in this process, and write its bits and its classifiers.

    It has one thread, so that sums are rounded the same on every machine, and as many afterwards
    as before.
    """
    try:
        trial = one.made()
        method, done = _finished(one, trial, progress)
        named, unsaved = one.named(), dict[str, str]()
        if one.folder is not None and one.trial is None:
            name = f"{stem(named)}{f'-rank{ranks.rank()}' if ranks.rank() else ''}"
            records.write_arrays(one.folder / "bits" / f"{name}.npz", measure.packed(done.bits))
            try:
                if method is not None and done.now is not None:
                    _save(one, trial, method, done.now)
            except ValueError as error:  # the figures of the row are right all the same
                unsaved["unsaved"] = line_of(error)
        return named | records.origin() | records.rounded(done.figures) | unsaved, done.bits
    except SystemExit as error:  # which would end the others, too
        raise RuntimeError(line_of(error)) from error


def _finished(
    one: Run, trial: Trial, progress: Callable[[float], object]
) -> tuple[Method | None, Finished]:
    """Run all rounds of a row, from the checkpoint of a killed run if there is one."""
    if not one.row.method:
        progress(1)
        return None, measure.constant(trial)
    method = one.method(trial)
    done = measure.run(
        method, trial, shared=not one.row.personalized, progress=progress, checkpoint=one.checkpoint
    )
    return method, done


def _save(one: Run, trial: Trial, method: Method, now: fp.Round) -> None:
    """Save the classifier of each client of this rank, or the one of all clients.

    Raises:
        ValueError: If a prediction cannot be made again from what is saved.
    """
    name = named_method(one.row)
    pictures = getattr(one.problem, "pictures", None)
    if pictures is None or one.folder is None or name is None:
        return
    few = torch.arange(min(2, len(trial.places)))
    tests = (
        trial.tests.inputs[few].to(trial.setting.device),
        pictures(one.partition, trial.places[few]),
    )
    shared = not one.row.personalized
    clients = [c for c in trial.setting.clients if c % ranks.world() == ranks.rank()]
    for client in clients if not shared else [trial.setting.clients[0]][ranks.rank() :]:
        with torch.device(trial.setting.device):
            model = now.model(method, trial.federation, client)
        own = None if shared else client
        values = {key: value for key, value in one.row.values.items() if key != "times"}
        classifier.save(
            one.folder / place_of(one.named(), None if own is None else trial.names[client]),
            model,
            network=one.problem.network,
            setting=trial.setting,
            method=name,
            make=METHODS[name].make if name in METHODS else one.row.entry.make,
            values=values,
            class_names=one.problem.class_names[one.partition],
            client=own,
            inputs="images" if one.row.family != "CLIP" else one.row.inputs or "tokens",
            tests=tests,
        )


def named_method(row: Row) -> str | None:
    """Return the name from which a classifier is made again, or None for a function of no file."""
    if row.method == rows.ALONE.name:
        return rows.usual(row.family)
    if row.make is None:
        return row.method
    source = stamps.TEXTS.get(row.make.__module__)
    return f"{source[0]}:{row.method}" if source else None


def place_of(record: Mapping[str, Any], client: str | None) -> Path:
    """Return the folder of a classifier within the results, of a client or of all clients."""
    end = "" if client is None else f"-{file_name(client)}"
    return Path("models") / f"{stem(record)}{end}"


def bits_of(
    folder: Path | None, found: Sequence[Record], known: Mapping[tuple[Any, ...], Bits]
) -> dict[tuple[Any, ...], Bits]:
    """Return the bits of records by their keys, from files of a folder if they are not known."""
    bits = {key: each for record in found if (each := known.get(key := records.key(record)))}
    for record in found if folder is not None else ():
        path = folder / "bits" / f"{stem(record)}.npz"  # type: ignore[operator]
        if records.key(record) not in bits and path.exists():
            with np.load(path) as arrays:
                bits[records.key(record)] = measure.unpacked(arrays)
    return bits


class RunsError(RuntimeError):
    """Some runs failed.

    Attributes:
        failed: Runs and their errors.
    """

    def __init__(self, failed: Sequence[tuple[Run, Exception]]) -> None:
        super().__init__(f"{len(failed)} runs failed, the first is {failed[0][0].named()}")
        self.failed = failed


def run_all(
    wanted: Sequence[Run],
    known: Records,
    bits: dict[tuple[Any, ...], Bits],
    *,
    workers: int,
    title: str = "",
) -> list[Record]:
    """Run what has no record yet, and return the records of all, in the order of runs.

    Args:
        wanted: Runs of one problem.
        known: Records.
        bits: Bits of reported runs, by the key of their records.
        workers: Number of processes; with 1, runs are in this process.
        title: Words before the bar of runs, which the first rank shows on a terminal.

    Raises:
        CompareError: If a file is missing.
        RunsError: If a run fails. The records of the others are written before.
    """
    missing = [one for one in wanted if records.key(one.named()) not in known.found]
    for one in wanted if ranks.rank() == 0 else ():
        if one not in missing:
            one.forget()  # what a process left that was killed after its last line
    failed = []
    with (
        _told(title, len(wanted), len(wanted) - len(missing)) as (bar, tell),
        closing(_results(missing, workers, bar)) as results,
    ):
        for one, result in results:
            if isinstance(result, CompareError | OSError):
                raise result  # a file is missing, for the other runs, too
            if isinstance(result, Exception):
                diverged = isinstance(result, ValueError) and "must be finite" in str(result)
                if not (diverged and one.trial is not None):
                    failed.append((one, result))
                if not diverged:
                    continue
                result = one.named() | records.origin() | DIVERGED, {}
            record, found = result
            if ranks.rank() == 0:
                known.add(record)
            known.found[records.key(record)] = record
            bits[records.key(record)] = found
            one.forget()
            tell(one)
    ranks.wait()  # before another one reads the file
    if failed:
        raise RunsError(failed) from failed[0][1]
    return [known.found[records.key(one.named())] for one in wanted]


@contextmanager
def _told(
    title: str, total: int, done: int
) -> Iterator[tuple[Callable[[float], object], Callable[[Run], None]]]:
    """Show a bar of the runs on a terminal, and in a log a line for each finished run."""
    form = "{desc}: {percentage:3.0f}%|{bar}| {n:.0f}/{total} [{elapsed}<{remaining}]"
    hidden = True if ranks.rank() > 0 else None  # with None, it is hidden in a log
    began, finished = time.monotonic(), [done]

    def tell(one: Run) -> None:
        finished[0] += 1
        if bar.disable and ranks.rank() == 0:
            spent = (time.monotonic() - began) / (finished[0] - done)
            left = spent * (total - finished[0])
            what = f"{one.row.title}, seed {one.seed}"
            where = f"{title}, " if title else ""
            text = f"{where}{finished[0]} of {total}: {what}; about {duration(left)} left"
            print(text, file=sys.stderr, flush=True)

    with tqdm(
        desc=title or "runs", total=total, initial=done, bar_format=form, disable=hidden
    ) as bar:
        yield bar.update, tell


def duration(seconds: float) -> str:
    """Write a duration in the unit that fits."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _results(
    wanted: Sequence[Run], workers: int, progress: Callable[[float], object]
) -> Generator[tuple[Run, tuple[Record, Bits] | Exception], None, None]:
    if workers == 1:
        yield from ((one, _outcome(run, one, progress)) for one in wanted)
        return
    with _pool(min(workers, len(wanted) or 1)) as pool:
        futures = {pool.submit(_run_in_worker, one): one for one in wanted}
        try:
            for future in as_completed(futures):
                progress(1)
                yield futures[future], _outcome(future.result)
        finally:
            pool.shutdown(cancel_futures=True)


CHECKED = set[object]()
"""Modules of methods, and stamps of problems, that this worker process was compared in."""


def _run_in_worker(one: Run) -> tuple[Record, Bits]:
    """Run in another process, whose files and values must be those of the first one.

    Raises:
        CompareError: If a file was changed in between, or the first process has changed a value.
    """
    make = one.row.make or (one.row.entry.make if one.row.method else None)
    where = getattr(make, "__module__", None)
    if one.known is not None and where is not None and where not in CHECKED:
        with suppress(stamps.UntoldError):
            if one.row.stamp(*one.known) == one.stamp:
                CHECKED.add(where)
        if where not in CHECKED:
            text = f"`workers` must be 1, or {one.row.title} be the same in each process"
            raise CompareError(f"{text}; a module of it has changed since the command began.")
    if one.known is not None and one.known[0] not in CHECKED:
        if run_id(stamp_of(one.problem, one.machine, ())[0]) != one.known[0]:
            raise CompareError("The images or other inputs have changed since the command began.")
        CHECKED.add(one.known[0])
    return run(one)


def stamp_of(
    problem: Problem, machine: Machine, seeds: Sequence[int]
) -> tuple[dict[str, Any], str | None]:
    """Return the stamp of a run, and a secret if a part of it cannot be told from others."""
    made = dict(problem.made() if problem.made else {"trial": stamps.known(problem.trial)})
    untold = [name for name, value in made.items() if isinstance(value, stamps.UntoldError)]
    made |= dict.fromkeys(untold, "cannot be told")
    made |= {**stamps.versions(), "device": machine.device, "shrink": machine.shrink}
    made |= {"dtype": str(torch.get_default_dtype())}
    made |= {"precision": torch.get_float32_matmul_precision()}
    secret = os.urandom(8).hex() if untold else None
    divided = problem.divisions(seeds) if problem.divisions else {}
    return made | {records.DIVIDED: divided}, secret


def run_id(stamp: Mapping[str, Any]) -> str:
    """Return a digest of a stamp of a run, the same for any number of seeds."""
    return stamps.digest({name: each for name, each in stamp.items() if name != records.DIVIDED})


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


def check_sent(problem: Problem, listed: Sequence[Row]) -> None:
    """Require that another process can make a problem, and import the functions of rows."""
    imported = [row for row in listed if row.make and row.make.__module__ not in stamps.TEXTS]
    try:
        pickle.dumps(problem)
        with _pool(1) as pool:  # which starts a process when something is submitted
            for row in imported:
                pool.submit(_received, pickle.dumps(row)).result()
    except Exception as error:  # of any value that is sent, and of the import of its module
        rule = "be 1 for functions that another process cannot import"
        remedy = f"Write them to a module or a file. A script needs {GUARD}"
        raise CompareError(f"`workers` must {rule}: {line_of(error)}. {remedy}.") from error


def _received(sent: bytes) -> str:
    return str(pickle.loads(sent).title)


def _outcome(result: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return result(*arguments)
    except BrokenProcessPool:
        text = f"A worker process ended, perhaps without memory. A script needs {GUARD}."
        raise CompareError(text) from None
    except Exception as error:  # the other runs go on before it is raised
        return error


# Hyperparameters: trials from a method's own ranges.


def drawn(row: Row, count: int) -> list[dict[str, Any]]:
    """Return the hyperparameters of some trials, the first with those of the row.

    The others are drawn from the ranges of the method, the same in each call.
    """
    rng = np.random.default_rng([TUNING_SEED, *str(row.method).encode()])
    search = {name: of for name, of in row.entry.search.items() if name not in row.given}
    others = [{name: draw(search[name], rng) for name in search} for _ in range(count - 1)]
    return [dict(row.values), *({**row.values, **values} for values in others if values)]


def draw(values: Range, rng: np.random.Generator) -> Any:
    """Draw a number log-uniformly, or a choice."""
    if isinstance(values, list):
        return values[rng.integers(len(values))]
    low, high = values
    return float(f"{np.exp(rng.uniform(np.log(low), np.log(high))):.3g}")


# All runs of a call.


@dataclass
class Runner:
    """Runs of one call, with the records and the failures so far."""

    problem: Problem
    machine: Machine
    files: Sequence[Path]
    folder: Path | None
    workers: int
    secret: str | None
    known: Records
    found: list[Record] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    bits: dict[tuple[Any, ...], Bits] = field(default_factory=dict)
    stamped: dict[tuple[str, str], tuple[str, tuple[Any, ...] | None]] = field(default_factory=dict)
    untold: set[str] = field(default_factory=set)

    def stamp(self, row: Row) -> tuple[str, tuple[Any, ...] | None]:
        """Return the stamp of a row and what is in it; of one that cannot be told, a new one."""
        key = row.title, str(sorted(row.values.items()))
        if key not in self.stamped:
            try:
                self.stamped[key] = row.stamp(*self.of_run), self.of_run
            except stamps.UntoldError as error:
                self.stamped[key] = secrets.token_hex(stamps.LENGTH // 2), None
                if self.folder is not None and ranks.rank() == 0 and row.title not in self.untold:
                    self.untold.add(row.title)
                    why = f"{row.title} runs again in each process, because of {error}."
                    print(why, file=sys.stderr, flush=True)
        return self.stamped[key]

    @property
    def of_run(self) -> tuple[Any, ...]:
        """What the stamps of all rows have in common: the run, and a secret."""
        return self.known.run, self.secret

    def of(self, partition: str, row: Row, seed: int, trial: int | None = None) -> Run:
        """Return a run."""
        stamp, known = self.stamp(row)
        where = self.machine, stamp, self.folder, known
        return Run(self.problem, partition, row, seed, trial, *where)

    def check(self, listed: Sequence[Row]) -> None:
        """Require that each method can train for a step and predict, and name those that cannot."""
        wrong = []
        for row in listed:
            try:
                rehearse(self.of(next(iter(self.problem.partitions)), row, 0))
            except (CompareError, OSError):
                raise
            except (Exception, SystemExit) as error:  # of any method, such as one of a user
                name = row.title if row.method == rows.ALONE.name else row.method
                own = {str(path.resolve()) for path in self.files}
                frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename in own]
                at = [f" ({Path(f.filename).name}, line {f.lineno})" for f in frames[-1:]]
                wrong.append(f"{name}: {line_of(error)}{''.join(at)}")
        if wrong:
            raise CompareError(f"These methods do not fit. {'; '.join(wrong)}.")

    def partition(
        self, partition: str, listed: Sequence[Row], seeds: Sequence[int], tune: int
    ) -> None:
        """Tune and run rows, and then training alone with as many passes as each row takes.

        If the problem has references, these are among the rows.
        """
        first = self.problem.families[0]
        self.rows(partition, [Row(CONSTANT, "", family=first)], seeds)
        if self.problem.references is not None:
            self.rows(partition, self.tuned(partition, listed, tune), seeds)
            return
        families = dict.fromkeys([first, *(row.family for row in listed)])
        every = [*listed, *(rows.alone(each, tower=each != first) for each in families)]
        every = self.tuned(partition, every, tune)
        self.rows(partition, every, seeds)
        for each, reference in zip(families, every[len(listed) :], strict=True):
            once = self.passes(partition, reference.title)
            taken = [self.passes(partition, row.title) for row in listed if row.family == each]
            times = {math.ceil((passes - 0.5) / once) for passes in taken if once}
            values = {name: value for name, value in reference.values.items() if name != "times"}
            where: dict[str, Any] = {"tower": each != first}
            more = [rows.alone(each, time, **where, **values) for time in sorted(times) if time > 1]
            self.rows(partition, more, seeds)

    def tuned(self, partition: str, listed: Sequence[Row], count: int) -> list[Row]:
        """Return the rows with the values of their trials that are best on own mixes.

        Trials train on a part of the training images and test on the others. Of equal trials, the
        first counts.
        """
        if count == 1:
            return list(listed)
        tried = [
            self.of(partition, replace(row, values=values), TUNING_SEED, trial)
            for row in listed
            for trial, values in enumerate(drawn(row, count))
        ]
        found = self.run(tried, "tuning")[::-1]  # of equal ones the first
        found.sort(key=lambda record: float(record["own"]))
        best = {record["row"]: record["values"] for record in found if "diverged" not in record}
        return [replace(row, values=best.get(row.title, row.values)) for row in listed]

    def passes(self, partition: str, title: str) -> float:
        """Return the mean number of backward passes of a row; 0 if it did not run."""
        listed = [r for r in self.found if (r["partition"], r["row"]) == (partition, title)]
        return float(np.mean([record.get("backward", 0.0) for record in listed])) if listed else 0.0

    def rows(self, partition: str, listed: Sequence[Row], seeds: Sequence[int]) -> None:
        """Run rows with all seeds, and keep their records."""
        wanted = [self.of(partition, row, seed) for seed in seeds for row in listed]
        try:
            self.found += self.run(wanted, partition)
        except RunsError as error:
            for one, reason in error.failed:
                self.failed[one.row.title] = line_of(reason)
            done = [self.known.found.get(records.key(one.named())) for one in wanted]
            self.found += [record for record in done if record and "diverged" not in record]

    def run(self, wanted: Sequence[Run], title: str) -> list[Record]:
        """Run what has no record."""
        return run_all(wanted, self.known, self.bits, workers=self.workers, title=title)


def rehearse(one: Run) -> float:
    """Let the first client train for a step, and predict two inputs; return the seconds."""
    trial = one.made()
    size = min(4, trial.setting.batch_size)
    few: dict[str, Any] = {"rounds": 1, "steps": 1, "epochs": None, "cohort_size": 1}
    few |= {"batch_size": size, "drop_last": False}
    setting = replace(trial.setting, **few)
    client = trial.tested[0]
    began = time.monotonic()
    method = one.method(trial._replace(setting=setting))
    with torch.device(setting.device):
        (now,) = fp.run_rounds(method, trial.federation, [[client]])
    tests = [(trial.tests.inputs, trial.tests.labels, None, True), *trial.further.values()]
    for inputs, labels, class_names, _ in tests:
        two = torch.arange(min(2, len(labels)))
        held_out = HeldOut(Chosen(inputs, two), labels[two])
        options: dict[str, Any] = {"clients": [client], "newcomers": (), "class_names": class_names}
        evaluate(method, trial.federation, now, held_out, **options)
    return time.monotonic() - began
