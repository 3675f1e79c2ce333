"""What a study has: trials of images in cells, rows with controls, and where its files are."""

import hashlib
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import fedprompt as fp
from fedprompt import compare
from fedprompt.compare import Trial
from fedprompt.methods import METHODS, Federation, HeldOut, Setting
from studies.controls import CONTROLS
from studies.figures import Measured, mechanism

FOLDER = Path(__file__).parent / "settings"
HEAD_RATE = "head_rate"
"""Learning rate of projections and heads, a hyperparameter of the setting of a row."""
COLUMNS = {
    "full": "all test images",
    "balanced": "all, balanced",
    "own": "own mix",
    "own_balanced": "own mix, balanced",
    "worst": "worst client",
}


def content(name: str) -> dict[str, Any]:
    """Read a file of the settings."""
    return tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))


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

    def at(self, positions: Any) -> "Images":
        """Return the images at some positions."""
        return Images(*(part[positions] for part in self))

    def cells(self, num_classes: int) -> Tensor:
        """Return the pair of domain and class of each image, as one number."""
        return self.domains * num_classes + self.labels


def of_heads(
    make: Callable[..., fp.Method], setting: Any, *, head_rate: float, **values: Any
) -> fp.Method:
    """Make a method whose clients train projections and heads with another learning rate."""
    setting = replace(setting, head_rate=head_rate)
    made = make(setting, **values)
    return made if made.setting is not None else made._replace(setting=setting)


@dataclass(frozen=True)
class Row(compare.Row):
    """Row of a method of the gallery, or of a control; a row without a method cannot run.

    Attributes:
        instead: Function that makes the method in place of that of the gallery, or None.
    """

    instead: Callable[..., fp.Method] | None = field(default=None, kw_only=True)

    @staticmethod
    def of(method: str, **values: Any) -> "Row":
        """Make the row of a method, with its default hyperparameters where none are given."""
        entry = (METHODS | CONTROLS)[method]
        return Row(entry.title, entry.name, entry.defaults | values)

    @property
    def entry(self) -> Any:
        """The method, or the control."""
        entry = (METHODS | CONTROLS)[self.method]
        made = self.instead or entry.make
        return replace(entry, make=partial(of_heads, made) if HEAD_RATE in self.values else made)

    def stamp(self, *more: Any) -> str:
        """Return the stamp; that of the problem has the texts of all examples, and of controls."""
        known = self.method if self.method in METHODS else "local"
        row = compare.Row(self.title, known, self.values, family=self.family)
        return row.stamp(self.title, self.method, *more)


@dataclass(frozen=True)
class Machine:
    """Where a trial runs, and where its files are.

    Attributes:
        device: Device of models and batches.
        shrink: Share of rounds, steps and images.
        root: Folder of data sets.
        weights: File of weights by the name of a network.
        pretrained: Whether timm and open_clip download the weights without a file.
    """

    device: str = "cpu"
    shrink: float = 1.0
    root: Path = Path()
    weights: Mapping[str, Path] = field(default_factory=dict)
    pretrained: bool = False


def divided(
    images: Images,
    of: str,
    count: int,
    rng: np.random.Generator,
    *,
    clients: int | None = None,
    most: int | None = None,
    mix: np.random.Generator | None = None,
    shots: int | None = None,
    **how: Any,
) -> list[Any]:
    """Return the positions of the images of each client.

    Args:
        images: Images.
        of: "domains", which the clients have in turn, "blocks" for clients of a domain one after
            another, or a function of :mod:`fedprompt.data`.
        count: Number of parts.
        rng: Source of randomness.
        clients: Number of clients, which have the first parts. If None, as many as parts.
        most: Largest number of images of a client. If None, it has all of its part.
        mix: Source of the order in which a client's images are taken. If None, it is kept.
        shots: Largest number of images of a class of a client.
        how: Further arguments of the function.
    """
    if of in ("domains", "blocks"):
        parts, kinds = in_turn(images.domains, count), 1 + int(images.domains.max())
        if of == "blocks":
            parts = [part for kind in range(kinds) for part in parts[kind::kinds]]
    else:
        if of == "dirichlet":
            how.setdefault("min_size", len(images.labels) // count // 4)
        parts = getattr(fp.data, of)(images.labels, count, generator=rng, **how)
    parts = parts[:clients]
    if shots is not None:
        few = partial(fp.data.few_shot, shots=shots, generator=rng)
        parts = [part[few(images.labels[torch.as_tensor(part)])] for part in parts]
    return [(part if mix is None else mix.permutation(part))[:most] for part in parts]


def in_turn(domains: Tensor, num_clients: int) -> list[np.ndarray]:
    """Give the clients one domain each, in turn, and divide its images over its clients."""
    owned = fp.data.by_domain(domains)
    count = len(owned)
    sizes = [-(-(num_clients - k) // count) for k in range(count)]
    parts = [np.array_split(*pair) for pair in zip(owned, sizes, strict=True)]
    return [parts[client % count][client // count] for client in range(num_clients)]


def trial(
    build: Callable[..., Setting],
    train: Images,
    test: Images,
    shards: Sequence[Any] | Mapping[str, Any],
    *,
    seed: int,
    newcomers: int = 0,
    domain_names: Sequence[str] = ("",),
    own: Sequence[Tensor] | None = None,
    places: Tensor | None = None,
    **fields: Any,
) -> Trial:
    """Make the trial of clients, the last of which never train.

    A cell is a pair of domain and class. The own mix of a client has its shares of the cells.

    Args:
        build: Function that makes the setting.
        train: Training images.
        test: Test images.
        shards: Positions of the training images of each client, or arguments of :func:`divided`.
        seed: Seed of the setting, and of the division.
        newcomers: Number of clients that never train.
        domain_names: Names of the domains.
        own: Positions of each client's test images, in place of its mix.
        places: Number of each test image, the same in all seeds. If None, no image is in the tests
            of two seeds.
        fields: Further fields of the setting; without `num_classes`, there are ten classes.
    """
    if isinstance(shards, Mapping):
        shards = divided(train, rng=np.random.default_rng(seed), **shards)
    first = len(shards) - newcomers
    same = {"clients": range(first), "num_classes": 10, "public": train.pixels[:0], "seed": seed}
    setting = build(**{**same, **fields})
    owned = dict(enumerate(map(torch.as_tensor, shards)))
    federation = Federation(train.pixels, train.labels, owned)
    if own is not None:
        kept = {client: part for client, part in enumerate(own) if len(part)}
        tests = HeldOut(test.pixels, test.labels, own=kept)
    else:
        cells = train.cells(setting.num_classes)
        count = setting.num_classes * max(len(domain_names), 1 + int(train.domains.max()))
        mixes = {client: cells[part].bincount(minlength=count) for client, part in owned.items()}
        known = test.cells(setting.num_classes)
        tests = HeldOut(test.pixels, test.labels, cells=known, mixes=mixes)
    if places is None:
        places = torch.arange(len(test.labels)) + 10**6 * seed
    names = [*map(str, owned)]
    return Trial(setting, federation, tests, places, range(first, len(shards)), names)


@dataclass(frozen=True, kw_only=True, eq=False)
class Study:
    """Study of our pages.

    Attributes:
        title: Name in tables.
        partitions: Words for each partition.
        family: Function from a partition to the family of the methods that can take part.
        rows: Function from a partition to its rows.
        make: Function (partition, row, seed, machine) -> trial.
        columns: Words for each column of a table, by its name in records.
        references: Titles of the rows with which a table compares, by the word for them.
        compared: Columns of the differences to the references.
        figures: Function (partition, row) -> function (trial, method, round) -> further figures, or
            None.
        hours: Function (partition, row) -> hours of one run, by arithmetic; None if not known.
        processor: Processor of these hours.
        bound: Largest difference of an accuracy between two processors, measured.
        choices: Function from a partition to choices that its paper leaves open.
        networks: Function (partition, row) -> names of networks whose weights a file can have.
    """

    title: str
    partitions: Mapping[str, str]
    family: Callable[[str], str] = lambda partition: "one model"
    rows: Callable[[str], Sequence[Row]]
    make: Callable[..., Trial]
    columns: Mapping[str, str] = field(default_factory=lambda: COLUMNS)
    references: Mapping[str, Sequence[str]] = field(default_factory=dict)
    compared: Sequence[str] = ("own",)
    figures: Callable[[str, Row], Measured | None] = lambda partition, row: mechanism(row)
    hours: Callable[[str, Row], float | None]
    processor: str = "one core of the machine of the records"
    bound: float = 0.01
    choices: Callable[[str], Sequence[str]] = lambda partition: ()
    networks: Callable[[str, Row], Sequence[str]] = lambda partition, row: ()

    @property
    def words(self) -> dict[str, Any]:
        """What a table has beside records."""
        names = ("title", "columns", "compared", "references")
        return {name: getattr(self, name) for name in names}

    def problem(self, partition: str, files: Machine, **again: Any) -> compare.Problem:
        """Make the problem of a partition, with the files of a machine."""

        def trial(partition: str, row: Row, *, seed: int, machine: Any) -> Trial:
            where = replace(files, device=machine.device, shrink=machine.shrink)
            made = self.make(partition, row, seed=seed, machine=where)
            return made._replace(figures=self.figures(partition, row))

        return compare.Problem(
            partitions={partition: self.partitions[partition]},
            trial=trial,
            families=[self.family(partition)],
            made=partial(stamp_of, partition, files),
            **self.words,
            **again,
        )


def stamp_of(partition: str, files: Machine) -> dict[str, Any]:
    """Return what a problem is made from: the texts of all examples, and given files."""
    texts = [path for path in Path(__file__).parents[1].rglob("*") if path.suffix in SUFFIXES]
    given = [path for path in files.weights.values() if path.exists()]
    known = {"examples": sorted(texts), "weights": given}
    digests = {name: hashlib.sha256() for name in known}
    for name, paths in known.items():
        for path in paths:
            digests[name].update(path.read_bytes())
    found = {name: digest.hexdigest()[:16] for name, digest in digests.items()}
    return {"partition": partition, "root": str(files.root), **found}


SUFFIXES = (".py", ".toml", ".safetensors", ".json")


def study(name: str, **functions: Any) -> Study:
    """Make a study of ``settings/studies.toml`` with its functions."""
    known = content("studies")
    fields = known.get(known[name].pop("like", ""), {}) | known[name]
    seconds, family = fields.pop("seconds"), fields.pop("family", "one model")
    same = {"family": lambda partition: family, "hours": lambda partition, row: seconds / 3600}
    return Study(**same, **fields, **functions)
