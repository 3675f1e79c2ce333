"""A problem from your own inputs, labels, clients and tests."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

import fedprompt._refusals as check
from fedprompt.compare import alone
from fedprompt.compare.advice import advice
from fedprompt.compare.divisions import Division, held_out
from fedprompt.compare.identity import settled, stamp, told
from fedprompt.compare.problems import NEWCOMERS, Problem, Record
from fedprompt.compare.rows import Row, fits
from fedprompt.compare.trials import Further, Machine, Trial
from fedprompt.methods import METHODS, ClipSetting, Federation, HeldOut, Setting
from fedprompt.methods.setting import Inputs, check_inputs, owned

COLUMNS = {"full": "all tests", "own": "own tests", "worst": "worst client"}
SHARE = 0.25
"""Share of a client's training inputs of each class on which tuning trials are tested."""
NUM_PUBLIC = 100
"""Largest number of training inputs that methods with public data have without labels."""
COHORT = 10
"""Largest number of clients in a round, if the setting has none."""


@dataclass(frozen=True)
class Chosen:
    """Inputs at some positions, read and prepared when they are needed.

    Args:
        inputs: All inputs.
        positions: Positions of the chosen ones.
        prepare: Function of a batch, by default to floating point.
    """

    inputs: Inputs
    positions: Int[Tensor, "chosen"]
    prepare: Callable[[Tensor], Tensor] = Tensor.float

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, index: Tensor) -> Tensor:
        """Return a batch."""
        return self.prepare(self.inputs[self.positions[index]])


@dataclass(frozen=True, kw_only=True, eq=False)
class Data:
    """Labeled inputs, and their division over clients.

    Attributes:
        setting: Setting without clients and seed. Its budget is that of all rows.
        inputs: Function (kind, device) -> inputs; the kind is that of a method of the gallery.
        labels: Class of each input.
        tests: The same function for the test inputs.
        test_labels: Class of each test input.
        divide: Function from a generator, of another seed for each run, to the division.
        newcomers: Number of clients, the last ones, that never train.
        further: Further test inputs by the name of their figure.
    """

    setting: Setting
    inputs: Callable[[str, str], Inputs]
    labels: Int[Tensor, "inputs"]
    tests: Callable[[str, str], Inputs]
    test_labels: Int[Tensor, "tests"]
    divide: Callable[[np.random.Generator], Division]
    newcomers: int = 0
    further: Mapping[str, Callable[[str, str], Further]] = field(default_factory=dict)

    def trial(self, row: Row, *, seed: int, machine: Machine, validate: bool) -> Trial:
        """Divide the inputs over clients. Tuning trials see no test input, and half of the rounds.

        Args:
            row: Row with a method.
            seed: Seed of the division, initial values, cohorts and batches.
            machine: Where it runs.
            validate: Whether it is a tuning trial.
        """
        where = row.entry.inputs, machine.device
        inputs, labels, rng = self.inputs(*where), self.labels, np.random.default_rng(seed)
        division = self.divide(rng)
        shards = [torch.as_tensor(np.asarray(shard)).long() for shard in division.train]
        own = division.own and [torch.as_tensor(np.asarray(part)).long() for part in division.own]
        if validate:
            tried = [held_out(labels[shard].numpy(), SHARE, rng) for shard in shards]
            pairs = list(zip(shards, map(torch.from_numpy, tried), strict=True))
            shards, own = [part[~of] for part, of in pairs], [part[of] for part, of in pairs]
        tested = (inputs, labels) if validate else (self.tests(*where), self.test_labels)
        every = np.arange(len(tested[1])) if own is None else np.unique(torch.cat([*own]).numpy())
        used = torch.from_numpy(every)
        own = own and [torch.searchsorted(used, part) for part in own]
        setting = self.completed(shards, inputs, seed, validate)
        mixes = [labels[shard].bincount(minlength=setting.num_classes) for shard in shards]
        given = Chosen(inputs, torch.arange(len(labels)))
        trial = Trial(
            setting,
            Federation(setting, given, labels, dict(enumerate(shards))),
            Chosen(tested[0], used),
            tested[1][used],
            torch.stack(mixes),
            range(len(shards) - self.newcomers, len(shards)),
            own=own,
            names=division.names,
            further={} if validate else {n: make(*where) for n, make in self.further.items()},
        )
        return trial.shrunk(machine.shrink)

    def completed(
        self, shards: Sequence[Tensor], inputs: Inputs, seed: int, validate: bool
    ) -> Setting:
        """Return the setting of these clients, with a budget where it has none."""
        count, given = len(shards) - self.newcomers, self.setting
        mean = sum(map(len, shards[:count])) / count
        public = given.public
        if not len(public):
            every = torch.cat(list(shards[:count])).sort().values
            public = inputs[every[spread(len(every), NUM_PUBLIC)]].float()
        return replace(
            given,
            clients=range(count),
            rounds=math.ceil(given.rounds / 2) if validate else given.rounds,
            steps=given.steps or math.ceil(mean / given.batch_size),
            cohort_size=given.cohort_size or min(count, COHORT),
            seed=seed,
            public=public,
        )


def check_counts(given: Mapping[str, Any]) -> None:
    """Require counts of a protocol and of a budget, which may be None except for two."""
    for name in ("size", "shots", "rounds", "steps", "batch_size", "cohort_size"):
        if given.get(name) is not None or name == "rounds":
            check.count(name, given[name])
    check.count("newcomers", given["newcomers"], at_least=0)


def check_clients(count: int, newcomers: int, cohort_size: int | None) -> None:
    """Require clients that train, at least as many as in a round."""
    check.require(newcomers < count, "newcomers", f"be below {count}, the clients", newcomers)
    rest = count - newcomers
    rule = f"be at most {rest}, the clients that train"
    check.require((cohort_size or 0) <= rest, "cohort_size", rule, cohort_size)


def problem(
    inputs: Inputs,
    labels: Int[Tensor, "inputs"],
    clients: Mapping[int, Any] | Callable[[np.random.Generator], Mapping[int, Any]],
    tests: HeldOut,
    *,
    setting: Setting,
    newcomers: int = 0,
    title: str = "Your data",
) -> Problem:
    """Make a problem from inputs and labels that you have read.

    Args:
        inputs: Training inputs of all clients, for example images that the trunk takes, or the
            tokens of a CLIP: a tensor, or another object whose ``inputs[positions]`` is a batch.
        labels: Their classes.
        clients: Positions of the inputs of each client, by client id from 0 on, or a function from
            a generator to these, which is called with another seed in each run.
        tests: Test inputs. Without `own`, clients are tested on all of them, weighted by their
            mixes of classes.
        setting: Models, classes and budget. Clients and seed are set for each run. Records are
            found again if the setting is the same, and functions in it have the same code.
        newcomers: Number of clients, the last ones, that never train.
        title: Title of the tables.

    Example:
        >>> from fedprompt import compare, data, samples, vit_trunk
        >>> from fedprompt.methods import HeldOut, VitSetting
        >>> images, labels, test_images, test_labels = samples.digits()
        >>> setting = VitSetting(trunk=vit_trunk(samples.vit("S")), num_classes=10, rounds=2)
        >>> problem = compare.problem(
        ...     images, labels, dict(enumerate(torch.arange(60).split(20))),
        ...     HeldOut(test_images[:60], test_labels[:60]), setting=setting,
        ... )
        >>> problem.family("")
        'one model'
    """
    check.instance("setting", setting, Setting, "be a Setting, such as VitSetting")
    check.instance("tests", tests, HeldOut, "be a HeldOut")
    check_counts({**vars(setting), "newcomers": newcomers})
    check.text("title", title)

    def divide(generator: np.random.Generator) -> Division:
        parts = clients(generator) if callable(clients) else clients
        check_parts(inputs, labels, parts, tests, setting.num_classes)
        check_clients(len(parts), newcomers, setting.cohort_size)
        own = None if tests.own is None else [tests.own.get(c, ()) for c in range(len(parts))]
        return Division([parts[c] for c in range(len(parts))], own, [*map(str, range(len(parts)))])

    data = Data(
        setting=setting,
        inputs=lambda kind, device: inputs,
        labels=labels,
        tests=lambda kind, device: tests.inputs,
        test_labels=tests.labels,
        divide=divide,
        newcomers=newcomers,
    )
    division = divide(np.random.default_rng(0))
    sides = (inputs, labels), (tests.inputs, tests.labels)
    parts = [list(map(np.asarray, part)) for part in (division.train, division.own or ())]
    described = [told([first(*side), side[1]]) for side in sides]
    described += [settled(setting), newcomers, told(parts)]
    columns = COLUMNS if tests.own is not None else COLUMNS | {"own": "own mix"}
    more: dict[str, Any] = {"setting": setting, "newcomers": newcomers, "title": title}
    more = {"title": title, "again": partial(problem, inputs, labels, clients, tests, **more)}
    return of_data({"": title}, lambda partition: data, columns, described, **more)


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
    plain = not isinstance(tests.mixes, Mapping)  # without them, there are no cells
    check.require(plain, "tests", "have no cells or mixes, which are those of classes", "others")


def recommended(problem: Problem, found: Sequence[Record], partition: str) -> list[str]:
    """Return one sentence of advice, if there are enough seeds."""
    if problem.compared[0] != "own":
        return []
    text = advice(found, partition, alone.TITLES, "training alone")
    return [text] if text.startswith("**") else []


def first(inputs: Inputs, labels: Tensor) -> Tensor:
    """Return all inputs of a tensor, and up to 64 of inputs that are read when they are needed."""
    return inputs if isinstance(inputs, Tensor) else inputs[spread(len(labels), 64)]


def spread(count: int, most: int) -> Int[Tensor, "chosen"]:
    """Return up to `most` of `count` positions, at equal distances."""
    return torch.linspace(0, count - 1, min(count, most)).long()


def of_data(
    partitions: Mapping[str, str],
    data: Callable[[str], Data],
    columns: Mapping[str, str],
    identity: Sequence[Any],
    *,
    title: str,
    compared: Sequence[str] = ("own", "full"),
    again: Callable[[], Problem] | None = None,
) -> Problem:
    """Make a problem from the data of its partitions, and what tells them from others."""
    first = data(next(iter(partitions)))
    family = "CLIP" if isinstance(first.setting, ClipSetting) else "one model"
    if first.setting.num_backbones > 1:
        family = "mixed models"
    inputs = [stamp(json.dumps(identity, default=str))]

    entries = METHODS.items()
    return Problem(
        name="own",
        title=title,
        partitions=partitions,
        family=lambda partition: family,
        rows=lambda partition: [Row.of(name) for name, entry in entries if fits(entry, family)],
        make=lambda partition, row, **where: data(partition).trial(row, **where),
        trials=lambda partition, row: [dict(row.values)],
        columns={**columns, **(NEWCOMERS if first.newcomers else {})},
        references={"training alone": alone.TITLES},
        compared=compared,
        every=True,
        notes=recommended,
        inputs=lambda partition, machine: {"inputs": inputs},
        again=again,
    )
