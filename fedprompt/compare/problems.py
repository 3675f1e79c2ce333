"""A problem: inputs, labels, clients and tests, under one protocol and one budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

import fedprompt._refusals as check
from fedprompt.compare import stamps
from fedprompt.compare.rows import Row
from fedprompt.compare.trials import Chosen, Further, Machine, Trial
from fedprompt.data.divisions import Division, held_out
from fedprompt.interfaces import Method, Round
from fedprompt.methods import ClipSetting, Federation, HeldOut, Setting
from fedprompt.methods.setting import Inputs, check_inputs, owned

Measured = Callable[[Trial, Method, Round], Mapping[str, float]]
"""Function from a trial, a method and a round to further figures."""

COLUMNS = {
    "full": "all tests",
    "balanced": "all tests, balanced",
    "own": "own tests",
    "own_balanced": "own tests, balanced",
    "worst": "worst client",
}
MIXES = {"own": "own mix", "own_balanced": "own mix, balanced"}
NEWCOMERS = {"received": "new clients", "after": "after 10 steps"}
SHARE = 0.25
"""Share of a client's training inputs of each class on which tuning trials are tested."""
NUM_PUBLIC = 100
"""Largest number of training inputs that methods with public data have without labels."""
COHORT = 10
"""Largest number of clients in a round, if the setting has none."""


def option(default: Any, text: str) -> Any:
    """Make a field that is an argument of :func:`fedprompt.compare.folder` and a flag."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """Which images train, and which are tests."""

    clients: str | None = option(
        None, "domains, folders, iid:N, dirichlet:ALPHA:N or pathological:K:N"
    )
    shots: int | None = option(None, "training images of each class, of all clients together")
    base_to_new: bool = option(False, "half of the classes train, and the others are new (CLIP)")
    leave_one_out: bool = option(False, "each domain in turn is left out")
    newcomers: int = option(0, "clients that never train, the last ones")

    def __post_init__(self) -> None:
        check.optional(check.text, "clients", self.clients)
        check.require(self.clients != "", "clients", "not be empty", "''")
        check.optional(check.count, "shots", self.shots)
        check.count("newcomers", self.newcomers, at_least=0)
        for name in ("base_to_new", "leave_one_out"):
            check.flag(name, getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Budget of all rows."""

    rounds: int = option(10, "rounds of a run")
    epochs: int | None = option(None, "epochs of a client in a round; 1 without --steps")
    steps: int | None = option(None, "batches of a client in a round, in place of epochs")
    batch_size: int | None = option(
        None, "images in a batch; a quarter of an average client, from 4 to 32"
    )
    cohort_size: int | None = option(None, "clients in a round; all, but at most ten")
    autocast: torch.dtype | None = option(None, "dtype of the batches")  # noqa: RUF009

    def __post_init__(self) -> None:
        check.count("rounds", self.rounds)
        for name in ("epochs", "steps", "batch_size", "cohort_size"):
            check.optional(check.count, name, getattr(self, name))
        if self.epochs is not None and self.steps is not None:
            raise check.wrong("epochs", "be None if `steps` is given", self.epochs)

    def given(self, mean: float) -> dict[str, Any]:
        """Return the fields of a setting, for clients of a mean number of images."""
        found = {name: value for name, value in vars(self).items() if value is not None}
        return {"batch_size": int(min(max(mean / 4, 4), 32)), **found}


def split_options(given: Mapping[str, Any]) -> tuple[Protocol, Budget]:
    """Make a protocol and a budget from arguments.

    Raises:
        TypeError: If neither has an argument.
    """
    sides = [
        {one.name: given[one.name] for one in fields(kind) if one.name in given}
        for kind in (Protocol, Budget)
    ]
    if unknown := sorted(given.keys() - sides[0].keys() - sides[1].keys()):
        raise TypeError(f"`{unknown[0]}` must be an argument, such as `rounds`.")
    return Protocol(**sides[0]), Budget(**sides[1])


@dataclass(frozen=True, kw_only=True, eq=False)
class Data:
    """Labeled inputs, and their division over clients.

    Attributes:
        settings: Setting of each family of models, without clients and seed.
        inputs: Function (family, kind, device, positions) -> inputs, of which these are read. The
            kind is that of a method of the gallery.
        labels: Class of each input.
        tests: The same function for the test inputs.
        test_labels: Class of each test input.
        divide: Function from a generator, of another seed for each run, to the division.
        mixes: `cells` and `mixes` of clients without tests of their own.
        newcomers: Number of clients, the last ones, that never train.
        further: Further test inputs by the name of their figure.
        figures: Function of further figures, of which each trial has a copy, or None.
    """

    settings: Mapping[str, Setting]
    inputs: Callable[[str, str, str, Tensor], Inputs]
    labels: Int[Tensor, inputs]
    tests: Callable[[str, str, str, Tensor], Inputs]
    test_labels: Int[Tensor, tests]
    divide: Callable[[np.random.Generator], Division]
    mixes: Mapping[str, Any] = field(default_factory=lambda: {"mixes": "classes"})
    newcomers: int = 0
    further: Mapping[str, Callable[[str, str, str], Further | None]] = field(default_factory=dict)
    figures: Measured | None = None

    def trial(
        self, family: str, kind: str, *, seed: int, machine: Machine, validate: bool = False
    ) -> Trial:
        """Divide the inputs over clients. Tuning trials see no test input, and half of the rounds.

        Args:
            family: Family of models of the method.
            kind: Kind of its inputs.
            seed: Seed of the division, initial values, cohorts and batches.
            machine: Where it runs.
            validate: Whether it is a tuning trial.
        """
        where, rng = (family, kind, machine.device), np.random.default_rng(seed)
        division, labels = self.divide(rng), self.labels
        shards = [torch.as_tensor(np.asarray(shard)).long() for shard in division.train]
        own = division.own and [torch.as_tensor(np.asarray(part)).long() for part in division.own]
        if validate:
            tried = [held_out(labels[shard].numpy(), SHARE, rng) for shard in shards]
            pairs = list(zip(shards, map(torch.from_numpy, tried), strict=True))
            shards, own = [part[~of] for part, of in pairs], [part[of] for part, of in pairs]
        test_labels = labels if validate else self.test_labels
        places = torch.arange(len(test_labels)) if own is None else torch.unique(torch.cat([*own]))
        inputs = self.inputs(*where, torch.cat(shards))
        tests = (self.inputs if validate else self.tests)(*where, places)
        kept: dict[str, Any] = dict(self.mixes)
        if own is not None:
            parts = enumerate(torch.searchsorted(places, part) for part in own)
            kept = {"own": {client: part for client, part in parts if len(part)}}
        more = {} if validate else {name: make(*where) for name, make in self.further.items()}
        return Trial(
            self._completed(self.settings[family], shards, inputs, seed, validate),
            Federation(Chosen(inputs, torch.arange(len(labels))), labels, dict(enumerate(shards))),
            HeldOut(Chosen(tests, places), test_labels[places], **kept),
            places,
            range(len(shards) - self.newcomers, len(shards)),
            names=division.names,
            further={name: each for name, each in more.items() if each is not None},
            figures=None if validate else deepcopy(self.figures),
        )

    def _completed(
        self, given: Setting, shards: Sequence[Tensor], inputs: Inputs, seed: int, validate: bool
    ) -> Setting:
        """Return the setting of these clients, with a budget where it has none."""
        count, public = len(shards) - self.newcomers, given.public
        if not len(public):
            every = torch.cat(list(shards[:count])).sort().values
            few = torch.linspace(0, len(every) - 1, min(len(every), NUM_PUBLIC)).long()
            public = inputs[every[few]].float()
        return replace(
            given,
            clients=range(count),
            rounds=math.ceil(given.rounds / 2) if validate else given.rounds,
            cohort_size=given.cohort_size or min(count, COHORT),
            seed=seed,
            public=public,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """Trials of rows and seeds, in one or several partitions.

    :func:`folder` and :func:`problem` make one. You can also make one by hand, for example if the
    test inputs, or the setting of a row, depend on the seed.

    Attributes:
        title: Title of tables.
        partitions: Words for each partition.
        trial: Function (partition, row, seed=, machine=) -> :class:`Trial`. With tuning, it also
            takes `validate`, which is true for trials without test inputs.
        columns: Words for each column of a table, by its name in records.
        families: Families of models, of which a row has the first that its method fits.
        compared: Columns of the differences to the references.
        references: Titles of rows with which a table compares, by words for them. If None, clients
            that train alone are the reference, and their rows are run, too.
        made: Function that returns what the problem is made from, by name, for the stamp of a run.
            If None, it is the source of `trial`.
        divisions: Function from seeds to the digest of the division of each seed, by partition, or
            None.
        again: Function without arguments that makes the problem in another process. If None, it is
            pickled.
        network: Frozen network with the preparation of its images, or None.
        class_names: Names of the classes of each partition.
        pictures: Function (partition, places of tests) -> prepared images, or None.
        cache: Bytes on the disk beside the records.

    Example:
        Each seed has other test inputs.

        >>> from fedprompt import compare, samples, vit_trunk
        >>> from fedprompt.methods import Federation, HeldOut, VitSetting
        >>> images, labels, test_images, test_labels = samples.digits()
        >>> trunk, shards = vit_trunk(samples.vit("S")), dict(enumerate(torch.arange(60).split(20)))
        >>> given = {"num_classes": 10, "rounds": 1, "steps": 1, "clients": range(3)}
        >>> def trial(partition, row, *, seed, machine):
        ...     setting = VitSetting(trunk=trunk, seed=seed, public=images[:0], **given)
        ...     places = torch.arange(60) + 60 * seed
        ...     tests = HeldOut(test_images[places], test_labels[places], mixes="classes")
        ...     federation = Federation(images, labels, shards)
        ...     return compare.Trial(setting, federation, tests, places, names=["0", "1", "2"])
        >>> problem = compare.Problem(
        ...     title="Digits", partitions={"": ""}, trial=trial, columns={"full": "all tests"},
        ...     compared=["full"], references={},
        ... )
        >>> results = compare.run(problem, ["head_tuning"], seeds=1)
        >>> sorted({record["row"] for record in results.found})
        ['Head tuning', 'Most frequent class']
    """

    title: str
    partitions: Mapping[str, str]
    trial: Callable[..., Trial]
    columns: Mapping[str, str]
    families: Sequence[str] = ("one model",)
    compared: Sequence[str] = ("own", "full")
    references: Mapping[str, Sequence[str]] | None = None
    made: Callable[[], Mapping[str, Any]] | None = None
    divisions: Callable[[Sequence[int]], Mapping[str, Any]] | None = None
    again: Callable[[], Problem] | None = None
    network: Any = None
    class_names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    pictures: Callable[[str, Tensor], Tensor] | None = None
    cache: int = 0

    def __reduce__(self) -> Any:
        """Send how the problem is made, because its functions may not be sent."""
        return super().__reduce__() if self.again is None else (self.again, ())


def of_data(data: Mapping[str, Data], **fields: Any) -> Problem:
    """Make a problem from the data of each partition, which are divided anew for each seed."""

    def trial(
        partition: str,
        row: Row,
        *,
        seed: int,
        machine: Machine = Machine(),  # noqa: B008
        validate: bool = False,
    ) -> Trial:
        how: dict[str, Any] = {"seed": seed, "machine": machine, "validate": validate}
        return data[partition].trial(row.family, row.inputs, **how)

    families = tuple(next(iter(data.values())).settings)
    divisions = partial(_divisions, data)
    return Problem(trial=trial, families=families, divisions=divisions, **fields)


def _divisions(data: Mapping[str, Data], seeds: Sequence[int]) -> dict[str, dict[str, str]]:
    """Return a digest of the division of each seed, by partition."""
    found = dict[str, dict[str, str]]()
    for partition, of in data.items():
        found[partition] = {}
        for seed in seeds:
            train, own, names = of.divide(np.random.default_rng(seed))
            parts = [list(map(np.asarray, part)) for part in (train, own or ())]
            found[partition][str(seed)] = stamps.digest(stamps.told(parts), list(names))
    return found


def family_of(setting: Setting) -> str:
    """Return the family of methods that can run with the models of a setting."""
    if isinstance(setting, ClipSetting):
        return "CLIP"
    return "mixed models" if setting.num_backbones > 1 else "one model"


def check_clients(count: int, newcomers: int, cohort_size: int | None) -> None:
    """Require clients that train, at least as many as in a round."""
    check.require(newcomers < count, "newcomers", f"be below {count}, the clients", newcomers)
    rest = count - newcomers
    rule = f"be at most {rest}, the clients that train"
    check.require((cohort_size or 0) <= rest, "cohort_size", rule, cohort_size)


def problem(
    inputs: Inputs,
    labels: Int[Tensor, inputs],
    clients: Mapping[int, Any] | Callable[[np.random.Generator], Mapping[int, Any]],
    tests: HeldOut,
    *,
    setting: Setting,
    newcomers: int = 0,
    title: str = "Your data",
    figures: Measured | None = None,
) -> Problem:
    """Make a problem from inputs and labels that you have read.

    Args:
        inputs: Training inputs of all clients, for example images that the trunk takes, or the
            tokens of a CLIP: a tensor, or another object whose ``inputs[positions]`` is a batch.
        labels: Their classes.
        clients: Positions of the inputs of each client, by client id from 0 on, or a function from
            a generator to these, which is called with another seed in each run.
        tests: Test inputs. Without `own`, clients are tested on all of them, weighted by their
            mixes of classes, or by the `mixes` of the tests.
        setting: Models, classes and budget. Clients and seed are set for each run.
        newcomers: Number of clients, the last ones, that never train.
        title: Title of the tables.
        figures: Function (trial, method, round) -> further figures, which is called after each
            round, or None. A figure is averaged over the rounds that have it. A function that needs
            earlier rounds has `state_dict` and `load_state_dict`, so that a killed run goes on.

    Example:
        >>> from fedprompt import compare, data, samples, vit_trunk
        >>> from fedprompt.methods import HeldOut, VitSetting
        >>> images, labels, test_images, test_labels = samples.digits()
        >>> setting = VitSetting(trunk=vit_trunk(samples.vit("S")), num_classes=10, rounds=2)
        >>> problem = compare.problem(
        ...     images, labels, dict(enumerate(torch.arange(60).split(20))),
        ...     HeldOut(test_images[:60], test_labels[:60]), setting=setting,
        ... )
        >>> problem.families
        ('one model',)
    """
    check.instance("setting", setting, Setting, "be a Setting, such as VitSetting")
    check.instance("tests", tests, HeldOut, "be a HeldOut")
    check.count("newcomers", newcomers, at_least=0)
    check.text("title", title)
    check.optional(check.function, "figures", figures)

    limits = setting.num_classes, newcomers, setting.cohort_size
    divide = partial(_divided, clients, inputs, labels, tests, *limits)
    divide(np.random.default_rng(0))
    data = Data(
        settings={family_of(setting): setting},
        inputs=lambda *where: inputs,
        labels=labels,
        tests=lambda *where: tests.inputs,
        test_labels=tests.labels,
        divide=divide,
        mixes={"mixes": "classes" if tests.mixes is None else tests.mixes, "cells": tests.cells},
        newcomers=newcomers,
        figures=figures,
    )
    given: dict[str, Any] = {"setting": setting, "newcomers": newcomers, "title": title}
    columns = COLUMNS if tests.own is not None else COLUMNS | MIXES
    return of_data(
        {"": data},
        title=title,
        partitions={"": ""},
        columns={**columns, **(NEWCOMERS if newcomers else {})},
        made=partial(_made_of, data, tests, figures),
        again=partial(problem, inputs, labels, clients, tests, figures=figures, **given),
    )


def _divided(
    clients: Any,
    inputs: Inputs,
    labels: Tensor,
    tests: HeldOut,
    num_classes: int,
    newcomers: int,
    cohort_size: int | None,
    generator: np.random.Generator,
) -> Division:
    """Return the division of one seed, whose positions and numbers must fit."""
    parts = clients(generator) if callable(clients) else clients
    check_parts(inputs, labels, parts, tests, num_classes)
    check_clients(len(parts), newcomers, cohort_size)
    own = None if tests.own is None else [tests.own.get(c, ()) for c in range(len(parts))]
    return Division([parts[c] for c in range(len(parts))], own, [*map(str, range(len(parts)))])


def _made_of(data: Data, tests: HeldOut, figures: Measured | None) -> dict[str, Any]:
    """Return what a problem is made from: all inputs, labels, and the setting."""
    (setting,) = data.settings.values()
    sides = {"inputs": data.inputs(), "tests.inputs": tests.inputs}  # type: ignore[call-arg, misc]
    known: dict[str, Any] = {name: stamps.of_inputs(side) for name, side in sides.items()}
    known["labels"] = stamps.digest(stamps.told([data.labels, tests.labels]))
    known["mixes"] = stamps.digest(stamps.told([tests.cells, tests.mixes]))
    known |= {f"setting.{name}": each for name, each in stamps.of_setting(setting).items()}
    return {**known, "newcomers": data.newcomers, "figures": stamps.known(figures)}


def check_parts(
    inputs: Inputs,
    labels: Tensor,
    parts: Mapping[int, Any] | list[Any],
    tests: HeldOut,
    num_classes: int,
) -> None:
    """Require positions of each client, and labels of its inputs and of tests."""
    check_inputs("inputs", inputs)
    check.labels("labels", labels, num_classes, size=len(inputs), of="inputs")
    check.labels("tests.labels", tests.labels, num_classes)
    check.instance("clients", parts, Mapping | list, "map ids to positions of inputs")
    every = parts if isinstance(parts, Mapping) else dict(enumerate(parts))
    numbered = bool(every) and {*every} == {*range(len(every))}
    check.require(numbered, "clients", "have the ids 0, 1, 2 and so on", [*every][:5])
    for client, part in every.items():
        check.some(f"clients[{client}]", len(part), "have at least one position")
        owned("clients", client, part, len(inputs))
    unknown = [client for client in tests.own or () if client not in every]
    check.nothing(unknown, "tests.own", f"have ids of clients, below {len(every)}")
