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

Verdict = tuple[bool | None, str]
"""Whether a claim holds, None if it could not be judged, and the measurement."""

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


def judged(name: str, remedy: str, check: Callable[[], Verdict]) -> Line:
    """Return the line of a check; an exception of the backbone is a failure with its text."""
    try:
        passed, measured = check()
    except Exception as error:  # the code of a stranger may raise anything, and the table shows it
        text = " ".join(str(error).split())
        passed = False
        measured = f"{type(error).__name__}: {text[:LONGEST]}"
    return Line(name, passed, measured, remedy)


class Judge:
    """Checks of any backbone, which is compared with its state at the start."""

    def __init__(self, backbone: object) -> None:
        self.backbone = backbone
        self.model = find_module(backbone)
        trainable = getattr(backbone, "trainable", None)
        ours = trainable if isinstance(trainable, Trainable) else Trainable()
        self.trained = list(ours.parameters())
        self.state_before = self.state()

    def frozen(self) -> Verdict:
        """Whether all modules are in eval mode, and no parameter is trainable."""
        if self.model is None:
            return None, "no modules or tensors found; keep the model as the attribute `model`"
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
        return not wrong, "; ".join(wrong).replace(PREFIX, "")

    def unchanged(self) -> Verdict:
        """Whether the state is the same as at the start."""
        before = self.state_before
        state = self.state().items()
        wrong = [name for name, tensor in state if not torch.equal(tensor, before[name])]
        return not wrong, f"changed: {listed(wrong)}".replace(PREFIX, "") if wrong else ""

    def shared(self) -> Verdict:
        """Whether a deep copy is the backbone, so that clients share it."""
        if self.trained:
            return True, "with trained parameters, which no copy can share"
        is_shared = copy.deepcopy(self.backbone) is self.backbone
        return is_shared, "" if is_shared else "a deep copy is another object"

    def state(self) -> dict[str, Tensor]:
        """Copy all weights and buffers."""
        state = {} if self.model is None else tensors(self.model)
        return {name: tensor.detach().clone() for name, tensor in state.items()}


def near(
    actual: Tensor, expected: Tensor, tolerance: float, *, smallest: float = 0.0
) -> tuple[bool, str]:
    """Compare relative to the largest number, or to `smallest` if all numbers are smaller."""
    if actual.shape != expected.shape:
        return False, f"shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    if not actual.numel():
        return True, ""
    difference = (actual.detach().double() - expected.detach().double()).abs().max().item()
    scale = max(smallest, expected.detach().abs().max().item())
    passed = difference <= tolerance * scale
    return passed, f"largest difference {difference:.0e}" if difference else "no difference"
