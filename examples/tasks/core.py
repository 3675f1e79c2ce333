"""What a task has beside its problem, and where its files are."""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fedprompt as fp
from fedprompt.compare import trials
from fedprompt.compare.problems import Causes, Problem, Record
from fedprompt.compare.rows import FURTHER, Row
from fedprompt.compare.trials import Images, Trial
from fedprompt.methods import Setting
from tasks.controls import CONTROLS
from tasks.epochs import EpochFederation

FOLDER = Path(__file__).parent / "settings"
FURTHER.update(CONTROLS)


def content(name: str) -> dict[str, Any]:
    """Read a file of the settings."""
    return tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Machine(trials.Machine):
    """Where a trial runs, and where its files are.

    Attributes:
        root: Folder of data sets.
        weights: File of weights by the name of a network.
        pretrained: Whether timm and open_clip download the weights without a file.
    """

    root: Path = Path()
    weights: Mapping[str, Path] = field(default_factory=dict)
    pretrained: bool = False


def guides(trial: Trial, method: fp.Method, now: fp.Round) -> dict[str, float]:
    """Measure how far the guides of FedL2G moved."""
    first, last = method.server.state["guides"], now.server["guides"]
    return {
        "distance of the guides, of their first norm": float((last - first).norm() / first.norm())
    }


def explained(partition: str, row: Row) -> Causes | None:
    """Return what explains a row of any task: how far guides moved."""
    return guides if row.method in ("fedl2g_l", "fedl2g_f") else None


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
    shards: Sequence[Any],
    *,
    newcomers: int = 0,
    domain_names: Sequence[str] = ("",),
    **fields: Any,
) -> Trial:
    """Make the trial of clients, the last of which never train.

    Args:
        build: Function that makes the setting.
        train: Training images.
        test: Test images.
        shards: Positions of the training images of each client.
        newcomers: Number of clients that never train.
        domain_names: Names of the domains.
        fields: Further fields of the setting; without `num_classes`, there are ten classes.
    """
    first = len(shards) - newcomers
    same = {"clients": range(first), "num_classes": 10, "public": train.pixels[:0]}
    setting = build(**{**same, **fields})
    new = range(first, len(shards))
    return Trial.of(setting, train, test, shards, new, domain_names, EpochFederation)


@dataclass(frozen=True, kw_only=True, eq=False)
class Task(Problem):
    """Problem of our pages.

    Attributes:
        hours: Function (partition, row) -> hours of one run, by arithmetic; None if not known.
        processor: Processor of these hours.
        bound: Largest difference of an accuracy between two processors, measured.
        choices: Function from a partition to choices that its paper leaves open.
        advice: Function (records, partition) -> a recommendation, or None.
    """

    causes: Callable[[str, Row], Causes | None] = explained
    hours: Callable[[str, Row], float | None]
    processor: str = "one core of the machine of the records"
    bound: float = 0.01
    choices: Callable[[str], Sequence[str]] = lambda partition: ()
    advice: Callable[[Sequence[Record], str], str] | None = None


def task(name: str, **functions: Any) -> Task:
    """Make a task of ``settings/tasks.toml`` with its functions."""
    known = content("tasks")
    fields = known.get(known[name].pop("like", ""), {}) | known[name]
    seconds, family = fields.pop("seconds"), fields.pop("family", "one model")
    same = {"family": lambda partition: family, "hours": lambda partition, row: seconds / 3600}
    return Task(**same, **fields, **functions)
