"""A trial: a setting, the inputs of its clients, and their tests, for one seed."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from jaxtyping import Int
from torch import Tensor

import fedprompt._refusals as check
from fedprompt._signatures import short_types
from fedprompt.interfaces import Method, Round
from fedprompt.methods import Federation, HeldOut, Setting
from fedprompt.methods.setting import Inputs


class CompareError(ValueError):
    """A mistake in a call or on the command line, or a file that is missing."""


def line_of(error: object) -> str:
    """Return the first two lines of an error or a text as one, without its full stop."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text, kind = " ".join(lines[:2])[:300].rstrip("."), type(error).__name__
    return f"{kind}: {text}" if text and isinstance(error, KeyError | SystemExit) else text or kind


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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


class Further(NamedTuple):
    """Further test inputs, which all clients predict.

    Attributes:
        inputs: Inputs.
        labels: Their classes.
        class_names: Names of these classes, if they are others than in training.
        trained: Whether clients have training inputs of the same domain and classes.
    """

    inputs: Inputs
    labels: Int[Tensor, "tests"]
    class_names: Sequence[str] | None = None
    trained: bool = True


@short_types
class Trial(NamedTuple):
    """A setting, the data of its clients, and test inputs.

    Attributes:
        setting: Setting of a method.
        federation: Data of the clients.
        tests: Test inputs. A client without any of its own is not tested.
        places: Number of each test input, the same for all seeds that test it.
        newcomers: Ids of the clients that never train.
        names: Names of the clients.
        further: Further test inputs, by the name of their figure.
        figures: Function (trial, method, round) -> further figures, or None.
    """

    setting: Setting
    federation: Federation
    tests: HeldOut
    places: Int[Tensor, "tests"]
    newcomers: Sequence[int] = ()
    names: Sequence[str] = ()
    further: Mapping[str, Further] = {}
    figures: Callable[[Any, Method, Round], Mapping[str, float]] | None = None

    def has_tests(self, client: int) -> bool:
        """Return whether a client is tested."""
        own = self.tests.own
        return own is None or (client in own and len(own[client]) > 0)

    @property
    def tested(self) -> list[int]:
        """Clients that train and are tested."""
        return [client for client in self.setting.clients if self.has_tests(client)]

    def shrunk(self, share: float) -> "Trial":
        """Return the trial with a share of its rounds, steps and images, and the same clients."""
        if share == 1:
            return self
        given = {name: getattr(self.setting, name) for name in ("rounds", "steps")}
        few = {name: max(2, math.ceil(share * value)) for name, value in given.items() if value}
        owned = self.federation.shards.items()
        shards = {c: part[: max(20, math.ceil(share * len(part)))] for c, part in owned}
        size, tests = max(60, math.ceil(share * len(self.places))), self.tests
        chosen = torch.arange(min(size, len(self.places)), device="cpu")
        own = tests.own and {c: part[part < size] for c, part in tests.own.items()}
        own = own and {c: part for c, part in own.items() if len(part)}
        cells = None if tests.cells is None else tests.cells[chosen]
        kept: Any = {"own": own, "mixes": tests.mixes, "cells": cells}
        few_tests: Any = Chosen(tests.inputs, chosen)
        if isinstance(tests.inputs, Tensor):
            few_tests = tests.inputs[chosen]
        held_out = HeldOut(few_tests, tests.labels[chosen], **kept)
        return self._replace(
            setting=replace(self.setting, **few),
            federation=replace(self.federation, shards=shards),
            tests=held_out,
            places=self.places[chosen],
        )

    def on(self, device: str) -> "Trial":
        """Return the trial with its models and public inputs on a device, where batches go, too."""
        if torch.device(device).type == "cpu":
            return self
        for frozen in (*getattr(self.setting, "trunks", ()), getattr(self.setting, "clip", None)):
            move(frozen, device)
        public = self.setting.public.to(device)
        return self._replace(setting=replace(self.setting, device=device, public=public))


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
