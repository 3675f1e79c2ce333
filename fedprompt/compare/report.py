"""Results of a comparison: tables, files, a picture, and trained classifiers."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

import fedprompt._refusals as check
from fedprompt._files import path_of
from fedprompt.compare import ranks, records, rows, runs, tables
from fedprompt.compare.classifier import Classifier, load
from fedprompt.compare.estimate import estimate as estimated
from fedprompt.compare.measure import Bits
from fedprompt.compare.problems import Problem
from fedprompt.compare.records import Record, Records
from fedprompt.compare.rows import Row
from fedprompt.compare.runs import Runner
from fedprompt.compare.tables import View
from fedprompt.compare.trials import CompareError, Machine
from fedprompt.interfaces import Method

EXTRA = "needs matplotlib: pip install 'fedprompt[compare]'"
LOAD = """The trained classifier of each client is in the folder that `clients.csv` names.
`fedprompt predict FOLDER IMAGES...` and `fedprompt.compare.load(FOLDER)` use it.
""".strip()
ALL = ""
"""Partition of the mean over partitions, which have names."""
MEANS = ("backward", "trained", "bytes_up", "bytes_down")


@dataclass(frozen=True)
class Results:
    """Figures of methods on a problem. ``print(results)`` shows the tables.

    Attributes:
        found: Records of all runs, one for each row, seed and partition.
        title: Title of the tables.
        partitions: Words for each partition.
        columns: Words for each column of a table, by its name in records.
        compared: Columns of the differences to the references.
        references: Titles of the rows with which others are compared, by words for them. Training
            alone needs no titles.
        failed: Error of each row of which a run failed, by its title.
        tune: Number of tuning trials of each row, the first with its default values.
        bits: Which test images were right in each run, by the key of its record.
        folder: Folder of the results, or None.
        others: Rows that have records of other versions, with their numbers.

    Example:
        >>> record = {"partition": "", "trial": None, "values": {}, "backward": 8}
        >>> scores = {"own": 0.5, "clients": {"0": {"own": 0.5}}}
        >>> results = Results(
        ...     [record | {"row": "A", "seed": 0} | scores], columns={"own": "own tests"}
        ... )
        >>> results.clients
        [{'method': 'A', 'seed': 0, 'partition': '', 'client': '0', 'own': 0.5}]
    """

    found: Sequence[Record]
    title: str = ""
    partitions: Mapping[str, str] = field(default_factory=lambda: {"": ""})
    columns: Mapping[str, str] = field(default_factory=dict)
    compared: Sequence[str] = ("own",)
    references: Mapping[str, Sequence[str]] = field(default_factory=lambda: tables.ALONE_ONLY)
    failed: Mapping[str, str] = field(default_factory=dict)
    tune: int = 1
    bits: Mapping[tuple[Any, ...], Bits] = field(default_factory=dict)
    folder: Path | None = None
    others: Sequence[str] = ()

    @classmethod
    def read(
        cls, file: str | os.PathLike[str], *, bits: Path | None = None, **words: Any
    ) -> Results:
        """Read the newest record of each row and seed, whatever its stamp.

        Args:
            file: File of records, such as ``OUT/records.jsonl``.
            bits: Folder that has the folder ``bits`` of these runs. If None, that of the file.
            **words: Attributes of the results, such as `title` and `columns`.
        """
        place = path_of("file", file)
        found = records.newest(records.read(place))
        return cls(found, bits=runs.bits_of(bits or place.parent, found, {}), **words)

    def __str__(self) -> str:
        """Lay out the tables of all partitions."""
        texts = [view.text() for view in self.views().values()]
        return "\n\n".join([*texts, *self.tuned(), *self.failures()])

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
        columns = (*self.columns, *MEANS)
        return [
            _named(record) | {name: record[name] for name in columns if name in record}
            for record in self.found
        ]

    def classifier(
        self, row: str, *, seed: int = 0, client: str | None = None, **options: Any
    ) -> Classifier:
        """Load the trained classifier of a row.

        Args:
            row: Title of the row.
            seed: Seed of the run.
            client: Name of the client, if clients have their own.
            options: Options of :func:`load`, such as `weights` and `device`.

        Raises:
            ValueError: If there is no such run, or its results were not written to a folder.
        """
        if self.folder is None:
            raise CompareError("`out` must be a folder, which has the classifiers.")
        for record in self.found:
            if (record["row"], record["seed"]) == (row, seed):
                places = [runs.place_of(record, each) for each in (client, None)]
                for place in places:
                    if (self.folder / place).exists():
                        return load(self.folder / place, **options)
        known = sorted({str(record["row"]) for record in self.found})
        raise check.wrong(
            "row", f"be one of {', '.join(known)}, with its seed and client", repr(row)
        )

    def views(self) -> dict[str, View]:
        """Return each table: partitions, and their mean."""
        done = {record["partition"] for record in self.found}
        same: dict[str, Any] = {"found": self.found, "bits": self.bits, "compared": self.compared}
        same |= {"references": self.references}
        views = {
            name: View(
                ", ".join(filter(None, [self.title, words])), name, columns=self.columns, **same
            )
            for name, words in self.partitions.items()
            if name in done
        }
        if len(views) < 2:
            return views
        listed = [
            mixed
            for row, seed in dict.fromkeys((each["row"], each["seed"]) for each in self.found)
            if (mixed := self._together(row, seed, len(views)))
        ]
        if not listed:
            return views
        column = self.compared[0]
        pair = tables.balanced(column)
        words = {
            name: f"{self.columns[name]}, mean" for name in (column, pair) if name in self.columns
        }
        words |= {f"{column} {name}": f"on {name}" for name in views}
        same |= {"found": listed, "compared": [column], "parts": [*views.values()]}
        return {ALL: View(f"{self.title}, each in turn", ALL, columns=words, **same), **views}

    def _together(self, row: str, seed: int, count: int) -> Record | None:
        """Return the mean record of a row and a seed, if it has all partitions."""
        found = [each for each in self.found if (each["row"], each["seed"]) == (row, seed)]
        if len(found) < count:
            return None
        column, pair = self.compared[0], tables.balanced(self.compared[0])
        names = [name for name in (*MEANS, column, pair) if all(name in each for each in found)]
        means = {name: float(np.mean([each[name] for each in found])) for name in names}
        targets = {f"{column} {each['partition']}": each[column] for each in found}
        clients = {
            f"{each['partition']}/{name}": figures
            for each in found
            for name, figures in each.get("clients", {}).items()
        }
        return {**found[0], **means, **targets, "partition": ALL, "clients": clients}

    def tuned(self) -> list[str]:
        """Return the values of each row, if they were tuned."""
        if self.tune == 1 or not self.found:
            return []
        return [f"Best of {self.tune} trials of each row:", self.hyperparameters()]

    def hyperparameters(self) -> str:
        """Return a table of the values of each row."""
        return tables.hyperparameters(self.found)

    def failures(self) -> list[str]:
        """Return a line for each row of which a run failed, or which has other versions."""
        failed = [f"{title} failed: {text}" for title, text in self.failed.items()]
        unsaved = {each["row"]: each["unsaved"] for each in self.found if "unsaved" in each}
        failed += [f"{title} has no classifier: {text}" for title, text in unsaved.items()]
        return [*failed, *(f"Not shown: {text}." for text in self.others)]

    def save(self, folder: str | os.PathLike[str], *, command: str = "") -> str:
        """Write tables (Markdown, CSV), figures of clients and of seeds (CSV) and a picture.

        Args:
            folder: Folder of the files.
            command: Command that made the results, which the first table has below it.

        Returns:
            A line that says where the files are, and why there is no picture.
        """
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        told = ", ".join(f"{name} {value}" for name, value in records.origin().items())
        line = [f"    {command}"] if command else []
        below = "\n\n".join([*self.tuned(), *self.failures(), *line, LOAD, told])
        for name, view in self.views().items():
            stem = f"table-{runs.file_name(name)}".rstrip("-")
            (place / f"{stem}.md").write_text(f"{view.text()}\n\n{below}\n", encoding="utf-8")
            header, body = view.lines()
            tables.write(place / f"{stem}.csv", [header, *body])
        tables.write_named(place / "clients.csv", self._with_models(place))
        tables.write_named(place / "seeds.csv", self.seeds)
        if not self.found:
            return f"No run finished, so {place} has no table."
        try:
            self.plot(place / "bars.png")
        except ModuleNotFoundError as error:
            return f"Tables: {place}. {error}"
        return f"Tables and picture: {place}"

    def _with_models(self, place: Path) -> list[dict[str, Any]]:
        """Return the lines of clients with the folders of their classifiers."""
        found = []
        for record in self.found:
            for client, figures in record.get("clients", {}).items():
                places = [runs.place_of(record, each) for each in (client, None)]
                model = next((str(each) for each in places if (place / each).exists()), "")
                found.append(_named(record) | {"client": client} | figures | {"model": model})
        return found

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the means of each row with their 95 % intervals, and its clients as dots.

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
        bars(list(self.views().values()), Path(path))


def _named(record: Record) -> dict[str, Any]:
    return {"method": record["row"], "seed": record["seed"], "partition": record["partition"]}


def run(
    problem: Problem,
    methods: Sequence[str | Callable[..., Method] | Row],
    *,
    seeds: int | Sequence[int] = 3,
    out: str | os.PathLike[str] | None = None,
    again: bool = False,
    tune: int = 1,
    device: Any = "cpu",
    workers: int = 1,
    shrink: float = 1.0,
    command: str = "",
) -> Results:
    """Run methods on a problem under one budget, next to training alone.

    Each method is tried for one step before anything runs. All rows have the same rounds, batches
    and number of tuning trials. References of each table are the most frequent class, and clients
    that train alone, with as many backward passes as the method.

    Args:
        problem: Problem.
        methods: Names of the gallery, FILE:NAME of functions of your own, or these functions. With
            ``NAME:learning_rate=0.003,rank=8`` you give values. A :class:`Row` has a title, so that
            one method can have several rows.
        seeds: Number of seeds, from 0 on, or the seeds. Each divides the inputs anew. With five or
            more, the differences that hold after Holm's correction have a star.
        out: Folder of the records, tables and classifiers. A killed run continues there, and a run
            of other data, network, budget or versions is refused. If the source of a method has
            changed, its rows run again. Several programs may write to it: each runs all that has
            no record when it starts, so give them different methods. If None, nothing is written.
        again: Whether to begin anew, in a folder beside `out` if that has a run.
        tune: Number of trials of each method, on a part of the training inputs: its default values,
            and others from its own ranges.
        device: Device of models and batches.
        workers: Number of processes, each with one thread.
        shrink: Share of rounds, steps and inputs, in (0, 1], to see that it runs.
        command: Command that is written below the first table.

    Raises:
        ValueError: If a method does not fit the problem, the device cannot be used, or `out` has
            another run.

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
        ['Head tuning', 'Most frequent class', 'Training alone']
    """
    place = None if out is None else path_of("out", out, of="folder")
    check.flag("again", again)
    every = seeds_of(seeds)
    counts = {"seeds": len(every), "tune": tune, "workers": workers}
    where = counts, every, place, again, Machine(device, shrink)
    runner, listed = _begun(problem, methods, *where)
    for partition in problem.partitions:
        runner.partition(partition, listed, every, tune)
    same: dict[str, Any] = {"columns": problem.columns, "compared": problem.compared}
    same |= {} if problem.references is None else {"references": problem.references}
    same |= {"failed": runner.failed, "tune": tune, "folder": runner.folder}
    bits = runs.bits_of(runner.folder, runner.found, runner.bits)
    same |= {"bits": bits, "others": runner.known.others(runner.found)}
    results = Results(runner.found, problem.title, problem.partitions, **same)
    if runner.folder is not None and ranks.rank() == 0:
        results.save(runner.folder, command=command)
    return results


def estimate(
    problem: Problem,
    methods: Sequence[str | Callable[..., Method]],
    *,
    seeds: int,
    tune: int,
    workers: int,
    machine: Machine,
) -> str:
    """Return the estimates of time, memory and disk of :func:`run`, which runs nothing."""
    counts = {"seeds": seeds, "tune": tune, "workers": workers}
    runner, listed = _begun(problem, methods, counts, range(seeds), None, False, machine)
    every = [*listed, *references(problem, listed)]
    found = estimated(runner, every, seeds, tune)
    return "\n".join(f"{name}: {text}" for name, text in found.items())


def _begun(
    problem: Problem,
    methods: Sequence[str | Callable[..., Method] | Row],
    counts: Mapping[str, int],
    seeds: Sequence[int],
    out: Path | None,
    again: bool,
    machine: Machine,
) -> tuple[Runner, list[Row]]:
    """Check the arguments of a run, enter its folder and try each method for a step."""
    check.instance("problem", problem, Problem, "be one of `compare.folder` or `compare.problem`")
    for name, count in counts.items():
        check.count(name, count)
    ranks.begin()
    workers = 1 if ranks.started() else counts["workers"]
    machine = Machine(check_device(machine.device), machine.shrink)
    rule = "be 1 for a problem whose `trial` has no `validate`"
    tuned = counts["tune"] == 1 or "validate" in inspect.signature(problem.trial).parameters
    check.require(tuned, "tune", rule, counts["tune"])
    chosen = listed = rows.chosen(methods, problem.families)
    if problem.references is None:
        listed = [row for row in chosen if row.method != rows.usual(row.family)]
    if workers > 1:
        runs.check_sent(problem, listed)
    stamp, secret = runs.stamp_of(problem, machine, seeds)
    place = None if out is None else records.enter(check_folder(out), stamp, again=again)
    known = Records(None if place is None else place / records.LINES, runs.run_id(stamp))
    more = place, workers, secret, known
    runner = Runner(problem, machine, rows.files(methods), *more)
    runner.check([*listed, *references(problem, chosen)])
    return runner, listed


def seeds_of(seeds: int | Sequence[int]) -> list[int]:
    """Return the seeds of a number of seeds, or the given ones."""
    if not isinstance(seeds, Sequence):
        check.count("seeds", seeds)
        return list(range(seeds))
    for seed in seeds:
        check.count("seeds", seed, at_least=0)
    check.require(len({*seeds}) == len(seeds), "seeds", "have each seed once", seeds)
    return list(seeds)


def references(problem: Problem, listed: Sequence[Row]) -> list[Row]:
    """Return the rows of training alone, of each family of models, unless a problem has others."""
    if problem.references is not None:
        return []
    first = problem.families[0]
    families = dict.fromkeys([first, *(row.family for row in listed)])
    return [rows.alone(each, tower=each != first) for each in families]


def check_folder(out: Path) -> Path:
    """Require that files can be written to a folder, or to its parents if it does not exist."""
    if (out / records.RUN).exists():  # it is not touched before it is known to be the same run
        return out
    parent = next(each for each in (out, *out.absolute().parents) if each.exists())
    try:
        with TemporaryDirectory(dir=parent):
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
