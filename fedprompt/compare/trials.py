"""A trial: a setting, the inputs of its clients, and their tests, for one seed."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn as nn
from jaxtyping import Int
from torch import Tensor

import fedprompt as fp
import fedprompt._refusals as check
from fedprompt.methods import Federation, Setting
from fedprompt.methods.setting import Inputs

BUDGET = ("rounds", "steps")
"""Fields of a setting that a shrunk run has less of."""


class CompareError(ValueError):
    """A mistake in a call or on the command line, or a file that is missing."""


def line_of(error: object) -> str:
    """Return the first two lines of an error or a text as one, without its full stop."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text, kind = " ".join(lines[:2])[:300].rstrip("."), type(error).__name__
    return f"{kind}: {text}" if text and isinstance(error, KeyError | SystemExit) else text or kind


@dataclass(frozen=True)
class Machine:
    """Where trials run.

    Attributes:
        device: Device of models and batches.
        shrink: Share of rounds, steps and images of a run, in (0, 1], to see that it runs.
    """

    device: str = "cpu"
    shrink: float = 1.0

    def __post_init__(self) -> None:
        check.number("shrink", self.shrink, above=0, at_most=1)


class Images(NamedTuple):
    """Images with their labels and domains.

    Attributes:
        pixels: Images, (n, channels, height, width), or the inputs of a method that stand for them.
        labels: Classes, (n,), int64.
        domains: Domains, (n,), int64; zeros for a data set without domains.
    """

    pixels: Tensor
    labels: Int[Tensor, "images"]
    domains: Int[Tensor, "images"]

    def at(self, positions: Tensor) -> "Images":
        """Return the images at some positions."""
        return Images(*(part[positions] for part in self))

    def cells(self, num_classes: int) -> Int[Tensor, "images"]:
        """Return the pair of domain and class of each image, as one number."""
        return self.domains * num_classes + self.labels


class Further(NamedTuple):
    """Further test inputs, which all clients predict.

    Attributes:
        inputs: Inputs.
        labels: Their classes.
        class_names: Names of these classes, if they are others than in training.
    """

    inputs: Inputs
    labels: Int[Tensor, "tests"]
    class_names: Sequence[str] | None = None


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
        names: Names of the clients; their numbers if there are none.
        further: Further test inputs, by the name of their figure.
    """

    setting: Setting
    federation: Federation
    test: Inputs
    test_cells: Int[Tensor, "tests"]
    mixes: Int[Tensor, "clients cells"]
    newcomers: Sequence[int] = ()
    domain_names: Sequence[str] = ("",)
    own: Sequence[Tensor] | None = None
    names: Sequence[str] = ()
    further: Mapping[str, Further] = {}

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
        federation: type[Federation] = Federation,
    ) -> "Trial":
        """Make the trial of clients whose training images are at the positions of shards."""
        owned = dict(enumerate(map(torch.as_tensor, shards)))
        cells, test_cells = (side.cells(setting.num_classes) for side in (train, test))
        count = setting.num_classes * max(len(domain_names), 1 + int(train.domains.max()))
        mixes = torch.stack([cells[shard].bincount(minlength=count) for shard in owned.values()])
        data = federation(setting, train.pixels, train.labels, owned)
        return Trial(setting, data, test.pixels, test_cells, mixes, newcomers, domain_names)

    def divided_tests(self, generator: np.random.Generator) -> "Trial":
        """Divide the test inputs of each cell over the clients, as its training inputs are."""
        shares = (self.mixes / self.mixes.sum(0).clamp(min=1).double()).numpy()
        parts = fp.data.allocate(self.test_cells, shares, min_size=0, generator=generator)
        return self._replace(own=list(map(torch.as_tensor, parts)))

    def shrunk(self, share: float) -> "Trial":
        """Return the trial with a share of its rounds, steps and images, and the same clients."""
        if share == 1:
            return self
        few = {name: max(2, math.ceil(share * getattr(self.setting, name))) for name in BUDGET}
        setting, owned = replace(self.setting, **few), self.federation.shards.items()
        shards = {c: part[: max(20, math.ceil(share * len(part)))] for c, part in owned}
        federation = replace(self.federation, setting=setting, shards=shards)
        size = max(60, math.ceil(share * len(self.test)))
        chosen = torch.arange(len(self.test), device="cpu")[:size]
        own = None if self.own is None else [part[part < size] for part in self.own]
        test: dict[str, Any] = {"test": self.test[chosen], "test_cells": self.test_cells[chosen]}
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
