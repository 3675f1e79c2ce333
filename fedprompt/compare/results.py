"""A comparison: it runs methods on a problem, and its results are tables, files and a picture."""

import math
import os
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

import fedprompt as fp
import fedprompt._refusals as check
from fedprompt._files import path_of
from fedprompt.compare import alone, cells, hyperparameters, prompts, ranks, records, rows, tables
from fedprompt.compare.cells import Cell, RunsError
from fedprompt.compare.own import Chosen
from fedprompt.compare.problems import Problem, Record, no_notes
from fedprompt.compare.rows import Row
from fedprompt.compare.trials import CompareError, Machine, line_of
from fedprompt.interfaces import Method
from fedprompt.methods import HeldOut, evaluate

EXTRA = "needs matplotlib: pip install 'fedprompt[compare]'"


LOAD = """The trained prompts of each client are in the file that `clients.csv` names.
`fedprompt.compare.prompts.load` rebuilds the model: see the page "Your folder in one command".
""".strip()


@dataclass(frozen=True)
class Results:
    """Figures of methods on a problem. ``print(results)`` shows the tables.

    Attributes:
        problem: Problem.
        found: Records of all runs, one for each row, seed and partition.
        failed: Error of each row of which a run failed, by its title.
        tune: Number of tuning trials of each row, the first with its default values.

    Example:
        >>> from fedprompt.compare import Problem
        >>> problem = Problem(
        ...     title="Digits", partitions={"iid": ""}, rows=lambda partition: [], make=dict
        ... )
        >>> record = {"partition": "iid", "trial": None, "values": {}, "backward": 8}
        >>> scores = {"own": 0.5, "clients": {"0": {"own": 0.5}}}
        >>> results = Results(problem, [record | {"row": "A", "seed": 0} | scores])
        >>> results.clients
        [{'method': 'A', 'seed': 0, 'partition': 'iid', 'client': '0', 'own': 0.5}]
    """

    problem: Problem
    found: Sequence[Record]
    failed: Mapping[str, str] = field(default_factory=dict)
    tune: int = 1

    def __str__(self) -> str:
        """Lay out the tables of all partitions."""
        return "\n\n".join([*self.reports().values(), *self.tuned(), *self.failures()])

    @property
    def clients(self) -> list[dict[str, Any]]:
        """Accuracies of each client, each method, each seed and each partition."""
        return [
            _named(record) | {"client": client} | figures
            for record in self.found
            for client, figures in record.get("clients", {}).items()
        ]

    @property
    def seeds(self) -> list[dict[str, Any]]:
        """Figures of each method, each seed and each partition, such as H of base and new."""
        columns = (*self.problem.columns, *MEANS)
        return [
            _named(record) | {name: record[name] for name in columns if name in record}
            for record in self.found
        ]

    def views(self) -> dict[str, tuple[Sequence[Record], Problem]]:
        """Return the records and the problem of each table: partitions, and their mean."""
        problem, done = self.problem, {record["partition"] for record in self.found}
        views = {name: (self.found, problem) for name in problem.partitions if name in done}
        if len(views) < 2:
            return views
        column, listed = problem.compared[0], list[Record]()
        for row, seed in dict.fromkeys((each["row"], each["seed"]) for each in self.found):
            runs = [r for r in self.found if (r["row"], r["seed"]) == (row, seed)]
            if len(runs) == len(views):
                figures = {name: float(np.mean([run[name] for run in runs])) for name in MEANS}
                targets = {f"{column} {run['partition']}": run[column] for run in runs}
                clients = {
                    f"{run['partition']}/{name}": each
                    for run in runs
                    for name, each in run.get("clients", {}).items()
                }
                mean = float(np.mean([*targets.values()]))
                mixed = figures | targets | {column: mean, "partition": ALL, "clients": clients}
                listed.append(runs[0] | mixed)
        if not listed:
            return views
        words = {column: f"{problem.columns[column]}, mean"}
        words |= {f"{column} {name}": f"on {name}" for name in views}
        turns = {ALL: "each in turn"}
        together = replace(
            problem, columns=words, compared=[column], partitions=turns, notes=no_notes
        )
        return {ALL: (listed, together), **views}

    def reports(self) -> dict[str, str]:
        """Return the text of each table, with one sentence of advice if seeds carry it."""
        return {name: tables.report(*view, name) for name, view in self.views().items()}

    def tuned(self) -> list[str]:
        """Return the values of each row, if they were tuned."""
        if self.tune == 1 or not self.found:
            return []
        return [f"Best of {self.tune} trials of each row:", tables.hyperparameters(self.found)]

    def failures(self) -> list[str]:
        """Return a line for each row of which a run failed."""
        return [f"{title} failed: {text}" for title, text in self.failed.items()]

    def save(self, folder: str | os.PathLike[str], *, command: str = "") -> str:
        """Write tables (Markdown, CSV), figures of clients and of seeds (CSV) and a picture.

        Args:
            folder: Folder of the files.
            command: Command that made the results, which the first table has below it.

        Returns:
            A line that says where the files are, and why there is no picture.
        """
        place = Path(folder)
        told = ", ".join(f"{name} {value}" for name, value in records.origin().items())
        line = [f"    {command}"] if command else []
        below = "\n\n".join([*self.tuned(), *self.failures(), *line, LOAD, told])
        for name, (found, problem) in self.views().items():
            stem = place / f"table-{prompts.file_name(name)}".rstrip("-")
            tables.save(found, stem, problem, name, below)
        files = [self._files(record, place) for record in self.found]
        pairs = zip(self.clients, chain(*files), strict=True)
        _write(place / "clients.csv", [line | {"prompts": file} for line, file in pairs])
        _write(place / "seeds.csv", self.seeds)
        if not self.found:
            return f"No run finished, so {place} has no table."
        said = self._missing(files) if (place / "records.jsonl").exists() else ""
        try:
            self.plot(place / "bars.png")
        except ModuleNotFoundError as error:
            return f"Tables: {place}. {error}{said}"
        return f"Tables and picture: {place}{said}"

    def _files(self, record: Record, place: Path) -> list[str]:
        """Return the file of the prompts of each client of a run, "" if there is none."""
        stem = f"prompts/{prompts.stem(record, cells.key(record, self.problem))}"
        ends = [("", f"-{prompts.file_name(client)}") for client in record.get("clients", {})]
        found = [[f"{stem}{end}.safetensors" for end in pair] for pair in ends]
        return [next((name for name in names if (place / name).exists()), "") for names in found]

    def _missing(self, files: Sequence[Sequence[str]]) -> str:
        """Name the trained runs without a file of prompts, which someone deleted."""
        lost = [
            f"{record['row']} (seed {record['seed']})"
            for record, names in zip(self.found, files, strict=True)
            if names and not any(names) and record.get("trained")
        ]
        told = f". Prompts of {', '.join(lost)} are missing. Delete these lines of records.jsonl"
        return f"{told} to train again" if lost else ""

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the mean of each row with its 95 % interval, and its clients as dots.

        Args:
            path: File of the picture, such as ``bars.png``.

        Raises:
            ModuleNotFoundError: If matplotlib is not installed.
            ValueError: If no run finished.
        """
        if not self.found:
            raise CompareError("No run finished, so there is no picture.")
        try:
            from fedprompt.compare.pictures import bars
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"The picture {EXTRA}") from error
        bars(self.views(), Path(path))


def _named(record: Record) -> dict[str, Any]:
    return {"method": record["row"], "seed": record["seed"], "partition": record["partition"]}


def _write(path: Path, listed: Sequence[Mapping[str, Any]]) -> None:
    """Write a CSV file, if there is a line."""
    header = dict.fromkeys(name for line in listed for name in line)
    if header:
        tables.write(path, [[*header], *([line.get(name) for name in header] for line in listed)])


ALL = ""
"""Partition of the mean over partitions, which have names."""
MEANS = ("backward", "trained", "bytes_up", "bytes_down")


def run(
    problem: Problem,
    methods: Sequence[str | Callable[..., Method]],
    *,
    seeds: int = 3,
    out: str | os.PathLike[str] | None = None,
    tune: int = 1,
    device: str | torch.device = "cpu",
    workers: int = 1,
    shrink: float = 1.0,
) -> Results:
    """Run methods on a problem under one budget, next to training alone.

    Each method is tried for one step before anything runs. All rows have the same rounds, batches
    and number of tuning trials. Clients that train alone are the reference of each table, with as
    many backward passes as the method.

    Args:
        problem: Problem.
        methods: Names of the gallery, FILE:NAME of functions of your own, or these functions.
        seeds: Number of seeds, from 0 on. Each divides the inputs anew. With five or more, the
            differences that hold after Holm's correction have a star.
        out: Folder of the records and the trained prompts. A run that was killed continues there,
            and several programs may write to it: each runs all that has no record when it starts,
            so give them different methods. If None, nothing is written.
        tune: Number of trials of each method, on a part of the training inputs: its default values,
            and others from its own ranges.
        device: Device of models and batches.
        workers: Number of processes, each with one thread.
        shrink: Share of rounds, steps and inputs, in (0, 1], to see that it runs.

    Raises:
        ValueError: If a method does not fit the problem, or the device cannot be used.

    Example:
        >>> from fedprompt import compare, samples, vit_trunk
        >>> from fedprompt.methods import HeldOut, VitSetting
        >>> images, labels, test_images, test_labels = samples.digits()
        >>> setting = VitSetting(trunk=vit_trunk(samples.vit("S")), num_classes=10, rounds=1)
        >>> clients = dict(enumerate(torch.arange(60).split(20)))
        >>> tests = HeldOut(test_images[:60], test_labels[:60])
        >>> problem = compare.problem(images, labels, clients, tests, setting=setting)
        >>> results = compare.run(problem, ["head_tuning"], seeds=1)
        >>> sorted({record["row"] for record in results.found})
        ['Head tuning', 'Training alone']
    """
    check.instance("problem", problem, Problem, "be one of `compare.folder` or `compare.problem`")
    check.count("seeds", seeds)
    check.count("tune", tune)
    check.count("workers", workers)
    machine = Machine(check_device(device), shrink)
    given = None if out is None else check_folder(path_of("out", out, of="folder"))
    with TemporaryDirectory() if given is None else nullcontext(given) as folder:
        family = problem.family(next(iter(problem.partitions)))
        chosen, reference = rows.chosen(methods, family), alone.usual(family)
        listed = [row for row in chosen if row.method != reference]
        files, save = rows.files(methods), out is not None
        runner = _Runner(problem, machine, files, Path(folder), workers, save)
        if workers > 1:
            cells.check_sent(problem, listed)
        runner.check([*listed, alone.row(family)])
        for partition in problem.partitions:
            runner.partition(partition, listed, range(seeds), tune)
    return Results(problem, runner.found, runner.failed, tune)


def check_folder(out: Path) -> Path:
    """Make a folder, and require that files can be written to it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=out):
            return out
    except OSError as error:
        raise CompareError(f"`out` must be a folder for files; {error}.") from error


def check_device(device: str | torch.device) -> str:
    """Require a device on which PyTorch can compute, and return its name."""
    check.instance("device", device, str | torch.device, "be a device, such as 'cuda'")
    device = str(device)
    try:
        torch.ones(2, device=ranks.device(device)).sum().item()
    except (RuntimeError, AssertionError, NotImplementedError, ZeroDivisionError) as error:
        first = re.split(r"\. |\n", str(error))[0].rstrip(".")
        text = f"`device` must be one of this machine; got {device}: {first}."
        raise CompareError(text) from error
    return device


@dataclass
class _Runner:
    """Runs of one call, with the records and the failures so far."""

    problem: Problem
    machine: Machine
    files: Sequence[Path]
    folder: Path
    workers: int
    save: bool
    found: list[Record] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    def check(self, listed: Sequence[Row]) -> None:
        """Require that each method can train for a step and predict, and name those that cannot."""
        wrong = []
        for row in listed:
            try:
                rehearse(self.problem, row, self.machine)
            except (CompareError, OSError):
                raise
            except (Exception, SystemExit) as error:  # of any method, such as one of a user
                name = row.title if row.method == "longer" else row.method
                own = {str(path.resolve()) for path in self.files}
                frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename in own]
                at = [f" ({Path(f.filename).name}, line {f.lineno})" for f in frames[-1:]]
                wrong.append(f"{name}: {line_of(error)}{''.join(at)}")
        if wrong:
            raise CompareError(f"These methods do not fit. {'; '.join(wrong)}.")

    def partition(self, partition: str, listed: Sequence[Row], seeds: range, tune: int) -> None:
        """Tune and run rows, and then training alone with as many passes as each row takes."""
        family = self.problem.family(partition)
        every = [*listed, alone.row(family)]
        if tune > 1:
            drawn = replace(self.problem, trials=lambda at, row: hyperparameters.drawn(row, tune))
            at = drawn, partition, every, self.tried, self.path
            every = hyperparameters.tuned(*at, machine=self.machine, neighbors=False)
        self.rows(partition, every, seeds)
        once = self.passes(partition, every[-1].title)
        passes = [self.passes(partition, row.title) for row in every[:-1]]
        times = {math.ceil((each - 0.5) / once) for each in passes if once}
        values = {name: value for name, value in every[-1].values.items() if name != "times"}
        longer = [alone.row(family, each, **values) for each in sorted(times) if each > 1]
        self.rows(partition, longer, seeds)

    def passes(self, partition: str, title: str) -> float:
        """Return the mean number of backward passes of a row; 0 if it did not run."""
        seeds = tables.grouped(self.found, partition).get(title)
        return tables.passes(seeds) if seeds else 0.0

    @property
    def path(self) -> Path:
        """File of the records."""
        return self.folder / "records.jsonl"

    def rows(self, partition: str, listed: Sequence[Row], seeds: range) -> None:
        """Run rows with all seeds, and keep their records."""
        save = self.folder / "prompts" if self.save else None
        wanted = [
            Cell(self.problem, partition, row, seed, None, self.machine, save)
            for seed in seeds
            for row in listed
        ]
        try:
            self.found += self.tried(wanted, partition)
        except RunsError as error:
            for cell, reason in error.failed:
                self.failed[cell.row.title] = line_of(reason)
            done = cells.load(self.path, self.problem)
            self.found += [done[cell.key()] for cell in wanted if cell.key() in done]

    def tried(self, wanted: Sequence[Cell], title: str = "tuning") -> list[Record]:
        """Run cells."""
        return cells.run_all(wanted, self.path, workers=self.workers, title=title or "runs")


def rehearse(problem: Problem, row: Row, machine: Machine) -> None:
    """Let the first client of the first partition train for a step, and predict two inputs."""
    partition = next(iter(problem.partitions))
    trial = problem.make(partition, row, seed=0, machine=machine, validate=False)
    trial = trial.on(ranks.device(machine.device))
    size = min(4, trial.setting.batch_size)
    setting = replace(trial.setting, rounds=1, steps=1, cohort_size=1, batch_size=size)
    federation = replace(trial.federation, setting=setting)
    client = trial.tested[0]
    with torch.device(setting.device):
        method = problem.method(row, trial._replace(setting=setting))
        (now,) = fp.run_rounds(method, federation.data, [[client]])
    tests = [(trial.test, trial.test_cells % setting.num_classes, None), *trial.further.values()]
    for inputs, labels, class_names in tests:
        two = torch.arange(min(2, len(labels)))
        held_out = HeldOut(Chosen(inputs, two), labels[two])
        options: dict[str, Any] = {"clients": [client], "newcomers": (), "class_names": class_names}
        evaluate(method, federation, now, held_out, **options)
