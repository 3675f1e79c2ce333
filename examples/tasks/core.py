"""What a task gives to the program: partitions, rows, and a trial for each seed."""

import math
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor

import fedprompt as fp
from fedprompt.methods import METHODS, Entry, Federation, Setting
from tasks.controls import CONTROLS
from tasks.epochs import EpochFederation

FOLDER = Path(__file__).parent / "settings"
HEAD_RATE = "head_rate"
"""Learning rate of projections and heads, a hyperparameter of the setting of a row."""

BUDGET = ("rounds", "steps")
"""Fields of a setting that a shrunk run has less of."""


def content(name: str) -> dict[str, Any]:
    """Read a file of the settings."""
    return tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))


class TaskError(ValueError):
    """A mistake on the command line, or a file that is missing."""


@dataclass(frozen=True)
class Machine:
    """Where a trial runs, and where its files are.

    Attributes:
        device: Device of models and batches.
        root: Folder of data sets.
        weights: File of weights by the name of a network.
        pretrained: Whether timm and open_clip download the weights without a file.
        shrink: Share of rounds and images of a run, in (0, 1].
    """

    device: str = "cpu"
    root: Path = Path()
    weights: Mapping[str, Path] = field(default_factory=dict)
    pretrained: bool = False
    shrink: float = 1.0


class Images(NamedTuple):
    """Images with their labels and domains.

    Attributes:
        pixels: Images, (n, channels, height, width), or the inputs of a method that stand for them.
        labels: Classes, (n,), int64.
        domains: Domains, (n,), int64; zeros for a data set without domains.
    """

    pixels: Tensor
    labels: Tensor
    domains: Tensor

    def at(self, positions: Tensor) -> "Images":
        """Return the images at some positions."""
        return Images(*(part[positions] for part in self))

    def cells(self, num_classes: int) -> Tensor:
        """Return the pair of domain and class of each image, as one number."""
        return self.domains * num_classes + self.labels


def held_out(cells: Tensor, share: float, generator: np.random.Generator) -> Tensor:
    """Draw a share of the images of each cell, and return for each image whether it is drawn.

    Of two images or more, at least one is drawn.
    """
    drawn = torch.zeros(len(cells), dtype=torch.bool)
    for cell in cells.unique():
        places = generator.permutation((cells == cell).nonzero()[:, 0])
        drawn[places[: max(len(places) > 1, round(share * len(places)))]] = True
    return drawn


class Trial(NamedTuple):
    """A setting, the data of its clients, and test inputs.

    A cell is a pair of domain and class. The own mix of a client has its shares of the cells.

    Attributes:
        setting: Setting of a method.
        federation: Data of the clients.
        test: Test inputs.
        test_cells: Cell of each test input.
        mixes: Number of training inputs of each client in each cell, (clients, cells).
        newcomers: Ids of the clients that never train.
        domain_names: Names of the domains.
        own: Positions of each client's test inputs. A client without any is not tested. If None,
            clients are tested on all test inputs, weighted by their mixes.
    """

    setting: Setting
    federation: Federation
    test: Tensor
    test_cells: Tensor
    mixes: Tensor
    newcomers: Sequence[int] = ()
    domain_names: Sequence[str] = ("",)
    own: Sequence[Tensor] | None = None

    @property
    def tested(self) -> list[int]:
        """Clients that are tested."""
        return [c for c in self.setting.clients if self.own is None or len(self.own[c])]

    @staticmethod
    def of(
        setting: Setting,
        train: Images,
        test: Images,
        shards: Iterable[Any],
        newcomers: Sequence[int] = (),
        domain_names: Sequence[str] = ("",),
    ) -> "Trial":
        """Make the trial of clients whose training images are at the positions of shards."""
        owned = dict(enumerate(map(torch.as_tensor, shards)))
        cells, test_cells = (side.cells(setting.num_classes) for side in (train, test))
        count = setting.num_classes * max(len(domain_names), 1 + int(train.domains.max()))
        mixes = torch.stack([cells[shard].bincount(minlength=count) for shard in owned.values()])
        federation = EpochFederation(setting, train.pixels, train.labels, owned)
        return Trial(setting, federation, test.pixels, test_cells, mixes, newcomers, domain_names)

    def divided_tests(self, generator: np.random.Generator) -> "Trial":
        """Divide the test inputs of each cell over the clients, as its training inputs are."""
        shares = (self.mixes / self.mixes.sum(0).clamp(min=1).double()).numpy()
        drawn = {"min_size": 0, "generator": generator}
        parts = fp.data.allocate(self.test_cells, shares, **drawn)
        return self._replace(own=list(map(torch.from_numpy, parts)))

    def shrunk(self, share: float) -> "Trial":
        """Return the trial with a share of its rounds, steps and images, and the same clients."""
        if share == 1:
            return self
        few = {name: max(2, math.ceil(share * getattr(self.setting, name))) for name in BUDGET}
        setting, shards = replace(self.setting, **few), self.federation.shards
        shards = {c: part[: max(20, math.ceil(share * len(part)))] for c, part in shards.items()}
        federation = replace(self.federation, setting=setting, shards=shards)
        size = max(60, math.ceil(share * len(self.test)))
        test = {"test": self.test[:size], "test_cells": self.test_cells[:size]}
        own = None if self.own is None else [part[part < size] for part in self.own]
        return self._replace(setting=setting, federation=federation, own=own, **test)

    def on(self, device: str) -> "Trial":
        """Return the trial with its models and public inputs on a device, where batches go, too."""
        if torch.device(device).type == "cpu":
            return self
        for frozen in (*getattr(self.setting, "trunks", ()), getattr(self.setting, "clip", None)):
            move(frozen, device)
        setting = replace(self.setting, device=device, public=self.setting.public.to(device))
        federation = replace(self.federation, setting=setting)
        return self._replace(setting=setting, federation=federation)


def move(frozen: Any, device: str) -> None:
    """Move a frozen module, or the modules and tensors of a trunk, in place."""
    if isinstance(frozen, nn.Module):
        frozen.to(device)
        return
    for name, value in vars(frozen).items() if hasattr(frozen, "__dict__") else ():
        if isinstance(value, Tensor):
            setattr(frozen, name, value.to(device))
        elif isinstance(value, nn.Module) or hasattr(value, "embed"):
            move(value, device)


@dataclass(frozen=True)
class Row:
    """A method with its hyperparameters, and what a paper prints for it.

    Attributes:
        title: Name in tables.
        method: Name in :data:`fedprompt.methods.METHODS`; None if the gallery does not have it.
        values: Hyperparameters. The others have their defaults. `HEAD_RATE` belongs to the setting.
        changes: Fields of a paper's setting that this row changes.
        figures: Figures of the paper in percent, by column.
        spread: Standard deviations of the paper, by column.
    """

    title: str
    method: str | None
    values: Mapping[str, Any] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)
    spread: Mapping[str, float] = field(default_factory=dict)

    @staticmethod
    def of(name: str, **values: Any) -> "Row":
        """Make the row of a method, with its default hyperparameters where none are given."""
        entry = (METHODS | CONTROLS)[name]
        return Row(entry.title, name, entry.defaults | values)

    @property
    def personalized(self) -> bool:
        """Whether the method has a model for each client."""
        return "personalized" in self.entry.traits

    @property
    def entry(self) -> Entry:
        """The method of the gallery, or the control row."""
        return (METHODS | CONTROLS)[str(self.method)]


def plain_method(row: Row, trial: Trial) -> fp.Method:
    """Make the method of a row for a trial."""
    values = {name: value for name, value in row.values.items() if name != HEAD_RATE}
    return row.entry.make(trial.setting, **values)


Causes = Callable[[Trial, fp.Method, fp.Round], Mapping[str, float]]
"""Function from a finished run to further figures."""


def guides(trial: Trial, method: fp.Method, now: fp.Round) -> dict[str, float]:
    """Measure how far the guides of FedL2G moved."""
    first, last = method.server.state["guides"], now.server["guides"]
    return {
        "distance of the guides, of their first norm": float((last - first).norm() / first.norm())
    }


def explained(partition: str, row: Row) -> Causes | None:
    """Return what explains a row of any task: how far guides moved."""
    return guides if row.method in ("fedl2g_l", "fedl2g_f") else None


@dataclass(frozen=True, kw_only=True)
class Task:
    """Partitions of one kind of data and models.

    Attributes:
        title: Name in tables.
        partitions: Words for each partition.
        family: Function from a partition to the family of the methods that can take part.
        rows: Function from a partition to its rows.
        make: Function (partition, row, seed, machine, validate) -> trial. With `validate`, a part
            of the training images is for testing, and does not train.
        trials: Function (partition, row) -> hyperparameters of the tuning trials, the first with
            the defaults. If None, the values of a row are fixed.
        tuned_on: Partition of the tuning trials. If None, each partition has its own.
        method: Function (row, trial) -> method.
        columns: Words for each column of a table, by its name in records.
        references: Titles of the rows with which a table compares, by the word for them. Of
            several, a row is compared with the one that takes as many backward passes.
        compared: Columns of the differences to the references.
        causes: Function (partition, row) -> function (trial, method, last round) -> further
            figures, or None. If not given, :func:`explained`.
        last_rounds: Function (partition, row) -> number of last rounds that are averaged.
        hours: Function (partition, row) -> hours of one run, by arithmetic; None if not known.
        processor: Processor of these hours.
        bound: Largest difference of an accuracy between two processors, measured.
        choices: Function from a partition to choices that its paper leaves open.
        advice: Function (records, partition) -> a recommendation, or None.
        inputs: Function (partition, machine) -> fields of a record that tell its data from others.
    """

    title: str
    partitions: Mapping[str, str]
    rows: Callable[[str], Sequence[Row]]
    make: Callable[..., Trial]
    family: Callable[[str], str] = lambda partition: "one model"
    trials: Callable[[str, Row], list[dict[str, Any]]] | None = None
    tuned_on: str | None = None
    method: Callable[[Row, Trial], fp.Method] = plain_method
    columns: Mapping[str, str] = field(default_factory=lambda: COLUMNS)
    references: Mapping[str, Sequence[str]] = field(default_factory=dict)
    compared: Sequence[str] = ("own",)
    causes: Callable[[str, Row], Causes | None] = explained
    last_rounds: Callable[[str, Row], int] = lambda partition, row: 1
    hours: Callable[[str, Row], float | None]
    processor: str = "one core of the machine of the records"
    bound: float = 0.01
    choices: Callable[[str], Sequence[str]] = lambda partition: ()
    advice: Callable[[Sequence[Mapping[str, Any]], str], str] | None = None
    inputs: Callable[[str, Machine], Mapping[str, Any]] = lambda partition, machine: {}


COLUMNS = {"full": "all test images", "own": "own mix", "worst": "worst client"}
NEWCOMERS = {"received": "new clients", "after": "after 10 steps"}
COSTS = {
    "bytes_up": "bytes up",
    "bytes_down": "bytes down",
    "trained": "trained",
    "backward": "backward",
    "kept": "bytes kept",
}
