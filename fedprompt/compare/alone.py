"""Training alone: the reference of every table, with as many passes as a method takes."""

from typing import Any, cast

import torch.nn as nn
import torch.nn.functional as F

import fedprompt as fp
from fedprompt.compare.rows import FAMILIES, FURTHER, Row
from fedprompt.interfaces import Method
from fedprompt.methods import METHODS, ClientData, ClipSetting, Entry, Setting, coop, local
from fedprompt.methods.registry import LEARNING_RATE
from fedprompt.methods.steps import take_step


def train(model: nn.Module, data: ClientData, learning_rate: float, times: int) -> None:
    """Train on the batches of a round, and on as many others for each further time."""
    optimizer = data.optimizer(model, learning_rate)
    for time in range(times):
        for inputs, labels in data.batches(purpose=f"batches {time}" if time else "batches"):
            take_step(optimizer, F.cross_entropy(model(inputs), labels))


def longer(setting: Setting, *, learning_rate: float = 1e-2, times: int = 1) -> Method:
    """Train each client alone, with several times the batches."""

    def client(data: ClientData, answer: Any, state: Any) -> Any:
        model = setting.model(data.id, state)
        train(model, data, learning_rate, times)
        return {}, fp.snapshot(model, buffers=True)

    if isinstance(setting, ClipSetting):
        return coop(setting, learning_rate=learning_rate)._replace(client=client)
    return local(cast(Any, setting), learning_rate=learning_rate)._replace(client=client)


TITLES = ["Training alone", *(f"Training alone, {times} times as long" for times in range(2, 100))]
"""Titles of the rows by the number of times, from 1 on."""


def row(family: str, times: int = 1, **values: Any) -> Row:
    """Make the row of training alone, with the default values of the family of models."""
    values = {**METHODS[usual(family)].defaults, **values, "times": times}
    return Row(TITLES[times - 1], "longer", values)


def usual(family: str) -> str:
    """Return the method of the gallery that is training alone."""
    return "coop" if family == "CLIP" else "local"


FURTHER["longer"] = Entry(
    "longer", "Training alone", longer, FAMILIES, ("personalized",), LEARNING_RATE, ""
)
