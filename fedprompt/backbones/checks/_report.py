"""Reports on backbones of your own: a table of claims, with a remedy for each that failed."""

import copy
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

from fedprompt.backbones._attributes import PREFIX, Attributes, find_module, tensors
from fedprompt.backbones._models import Trainable, listed

LONGEST = 100
"""Longest text of an exception in a table, in characters."""

_CONTAINERS = (Attributes, nn.ModuleList)  # the fingerprint makes them of attributes


class Line(NamedTuple):
    """One claim about a backbone.

    Attributes:
        name: The claim.
        passed: Whether it holds; None if it could not be judged.
        measured: What was measured, as text.
        remedy: What to do if it does not hold, or how to have it judged.
    """

    name: str
    passed: bool | None
    measured: str
    remedy: str = ""

    @property
    def verdict(self) -> str:
        """Return the claim's verdict in one word."""
        return {True: "ok", False: "FAILED", None: "not judged"}[self.passed]


class Report(NamedTuple):
    """Claims about a backbone, which print as a table.

    Attributes:
        title: The class of the backbone.
        lines: The claims, in the order in which they were checked.
    """

    title: str
    lines: tuple[Line, ...]

    @property
    def passed(self) -> bool:
        """Whether no claim failed."""
        return not self.failed

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the claims that failed."""
        return tuple(line.name for line in self.lines if line.passed is False)

    def __str__(self) -> str:
        names = max(len(line.name) for line in self.lines)
        verdicts = max(len(line.verdict) for line in self.lines)
        rows = [self.title]
        for line in self.lines:
            rows.append(f"{line.verdict:{verdicts}}  {line.name:{names}}  {line.measured}".rstrip())
            if line.passed is not True and line.remedy:
                rows.append(f"{'':{verdicts}}  -> {line.remedy}")
        return "\n".join(rows)


class ClaimError(Exception):
    """A claim that fails (False) or is not judged (None), and what was measured."""


def fail_if(found: object, measured: str) -> None:
    """Let a claim fail if something was found."""
    if found:
        raise ClaimError(False, measured)


def judged(name: str, remedy: str, check: Callable[[], str | None]) -> Line:
    """Return the line of a check, which returns what it measured.

    An exception of the backbone is a failure with its text.
    """
    try:
        return Line(name, True, check() or "", remedy)
    except ClaimError as error:
        return Line._make((name, *error.args, remedy))
    except Exception as error:  # the code of a stranger may raise anything, and the table shows it
        text = " ".join(str(error).split())
        return Line(name, False, f"{type(error).__name__}: {text[:LONGEST]}", remedy)


class Judge:
    """Checks of any backbone, which is compared with its state at the start."""

    def __init__(self, backbone: object) -> None:
        self.backbone = backbone
        self.model = find_module(backbone)
        trainable = getattr(backbone, "trainable", None)
        ours = trainable if isinstance(trainable, Trainable) else Trainable()
        self.trained = list(ours.parameters())
        self.state_before = self.state()

    def frozen(self) -> None:
        """Whether all modules are in eval mode, and no parameter is trainable."""
        if self.model is None:
            remedy = "keep the model as the attribute `model`"
            raise ClaimError(None, f"no modules or tensors found; {remedy}")
        training = [
            name or type(module).__name__
            for name, module in self.model.named_modules()
            if module.training and not isinstance(module, _CONTAINERS)
        ]
        chosen = set(self.trained)
        named = self.model.named_parameters()
        trainable = [name for name, each in named if each.requires_grad and each not in chosen]
        wrong = [f"in train mode: {listed(training)}"] if training else []
        wrong += [f"trainable: {listed(trainable)}"] if trainable else []
        fail_if(wrong, "; ".join(wrong).replace(PREFIX, ""))

    def unchanged(self) -> None:
        """Whether the state is the same as at the start."""
        before = self.state_before
        state = self.state().items()
        wrong = [name for name, tensor in state if not torch.equal(tensor, before[name])]
        fail_if(wrong, f"changed: {listed(wrong)}".replace(PREFIX, ""))

    def shared(self) -> str:
        """Whether a deep copy is the backbone, so that clients share it."""
        if self.trained:
            return "with trained parameters, which no copy can share"
        fail_if(copy.deepcopy(self.backbone) is not self.backbone, "a deep copy is another object")
        return ""

    def state(self) -> dict[str, Tensor]:
        """Copy all weights and buffers."""
        state = {} if self.model is None else tensors(self.model)
        return {name: tensor.detach().clone() for name, tensor in state.items()}


def near(
    actual: Tensor, expected: Tensor, tolerance: float, *, smallest: float = 0.0, where: str = ""
) -> str:
    """Compare relative to the largest number, or to `smallest` if all numbers are smaller."""
    sizes = f"shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    fail_if(actual.shape != expected.shape, where + sizes)
    if not actual.numel():
        return ""
    difference = (actual.detach().double() - expected.detach().double()).abs().max().item()
    scale = max(smallest, expected.detach().abs().max().item())
    measured = f"largest difference {difference:.0e}" if difference else "no difference"
    fail_if(not difference <= tolerance * scale, where + measured)  # it may be NaN
    return measured
