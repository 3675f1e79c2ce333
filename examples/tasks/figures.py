"""Accuracy, bytes and gradient passes of a method on a trial."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import fedprompt as fp
from tasks.core import Trial

OWN_STEPS, OWN_RATE = 10, 1e-2  # of a newcomer, after every method
EVERY = 5  # rounds between two points of a curve


def run(
    method: fp.Method,
    trial: Trial,
    *,
    shared: bool,
    last_rounds: int = 1,
    curve: bool = False,
    causes: Callable[..., Mapping[str, float]] | None = None,
    finished_round: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Run all rounds of a method, and measure the last predictions.

    Args:
        method: Method.
        trial: Trial.
        shared: Whether all clients predict with one model.
        last_rounds: Number of last rounds whose accuracies are averaged.
        curve: Whether to measure the accuracy on all test inputs every five rounds, too.
        causes: Function (trial, method, last round) -> further figures.
        finished_round: Called after each round.
    """
    setting, ledger, measured = trial.setting, fp.Ledger(), []
    points: dict[str, list[float]] = {"rounds": [], "accuracy": []}
    passes = {"backward": 0}
    rounds = fp.run_rounds(fp.counted(method, ledger), trial.federation.data, setting.cohorts())
    for number in range(1, setting.rounds + 1):
        with counted_passes(passes), torch.device(setting.device):
            now = next(rounds)
        finished_round()
        if number > setting.rounds - last_rounds:
            with counted_passes(passes):
                guesses = Guesses(method, trial, now, shared=shared)
            measured.append(guesses.figures())
        elif curve and number % EVERY == 0:
            points["rounds"].append(number)
            points["accuracy"].append(Guesses(method, trial, now, shared=shared).figures()["full"])
    turns = setting.rounds * setting.cohort_size
    figures = {name: float(np.mean([each[name] for each in measured])) for name in measured[0]}
    figures |= newcomers(method, trial, now)
    figures |= {
        f"bytes_{direction}": ledger.total(direction=direction) / turns
        for direction in ("up", "down")
    }
    figures |= {"trained": guesses.trained, "backward": passes["backward"] / turns}
    if curve:
        points["rounds"].append(setting.rounds)
        points["accuracy"].append(figures["full"])
    return figures | (points if curve else {}) | dict(causes(trial, method, now) if causes else {})


@contextmanager
def counted_passes(count: dict[str, int]) -> Iterator[None]:
    """Count calls of autograd's `backward` and `grad`."""
    kept = (torch.autograd.backward, torch.autograd.grad)

    def counting(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            count["backward"] += 1
            return function(*args, **kwargs)

        return call

    torch.autograd.backward, torch.autograd.grad = map(counting, kept)
    try:
        yield
    finally:
        torch.autograd.backward, torch.autograd.grad = kept


class Guesses:
    """Predicted classes of all test inputs, of one model for all clients or one for each.

    Args:
        method: Method.
        trial: Trial.
        now: Round after which clients predict.
        shared: Whether all clients predict with one model.
    """

    def __init__(self, method: fp.Method, trial: Trial, now: fp.Round, *, shared: bool) -> None:
        self.trial, self.trained, classes = trial, 0, {}
        for client in trial.setting.clients:
            if not (shared and classes):
                model = model_of(client, method, trial, now)
                self.trained = self.trained or num_trained(model)
                found = predicted(model, trial)
            classes[client] = found
        self.classes: dict[int, Tensor] = classes
        self.models = list(classes.values())[: 1 if shared else None]

    def figures(self) -> dict[str, float]:
        """Measure accuracy.

        Returns:
            `full`, the mean over clients on all test inputs, with the `lowest` and the `highest`
            client; `own`, the mean on their own mixes, and `worst`, the lowest of these; `balanced`
            accuracy and `macro_f1` on all test inputs. With several domains, the name of each has
            the mean over its clients on their own mixes.
        """
        trial, own, full = self.trial, [], []
        total = trial.mixes.shape[1]
        counts = torch.bincount(trial.test_cells, minlength=total)
        for client, classes in self.classes.items():
            cells = by_cell(classes, trial)
            full.append(mixed(cells, counts))
            own.append(mixed(cells, trial.mixes[client]))
        figures = {"full": sum(full) / len(full), "lowest": min(full), "highest": max(full)}
        figures |= {"own": sum(own) / len(own), "worst": min(own)}
        number = trial.setting.num_classes
        labels = trial.test_cells % number
        tables = [
            fp.selection.contingency_table(each, labels, number, number) for each in self.models
        ]
        for name, measure in (
            ("balanced", fp.metrics.balanced_accuracy),
            ("macro_f1", fp.metrics.macro_f1),
        ):
            figures[name] = sum(map(measure, tables)) / len(tables)
        return figures | self._by_domain(own)

    def _by_domain(self, own: Sequence[float]) -> dict[str, float]:
        names, mixes = self.trial.domain_names, self.trial.mixes[list(self.classes)]
        if len(names) == 1:
            return {}
        of = mixes.reshape(len(own), len(names), -1).sum(2).argmax(1).numpy()
        return {
            name: float(np.mean(np.array(own)[of == number])) for number, name in enumerate(names)
        }


def model_of(client: int, method: fp.Method, trial: Trial, now: fp.Round) -> Any:
    """Return the model with which a client predicts after a round."""
    with torch.device(trial.setting.device):
        return now.model(method, trial.federation.data(client, now.server_round))


def newcomers(method: fp.Method, trial: Trial, now: fp.Round) -> dict[str, float]:
    """Measure the newcomers on their own mixes: `received`, and `after` ten steps."""
    received, after = [], []
    for client in trial.newcomers:
        model, mix = model_of(client, method, trial, now), trial.mixes[client]
        received.append(mixed(by_cell(predicted(model, trial), trial), mix))
        train(model, trial, client)
        after.append(mixed(by_cell(predicted(model, trial), trial), mix))
    if not received:
        return {}
    return {"received": sum(received) / len(received), "after": sum(after) / len(after)}


def train(model: Any, trial: Trial, client: int) -> None:
    """Train a model on ten batches of a newcomer; a plain function stays as it is."""
    parameters = list(model.parameters()) if isinstance(model, nn.Module) else []
    parameters = [each for each in parameters if each.requires_grad]
    if not parameters:
        return
    optimizer = trial.setting.optimizer(parameters, OWN_RATE)
    longer = replace(trial.setting, steps=OWN_STEPS)
    data = replace(trial.federation, setting=longer).data(client, 0)
    for inputs, labels in data.batches(purpose="newcomer"):
        loss = F.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def predicted(model: Any, trial: Trial) -> Tensor:
    """Predict the class of each test input, without dropout and with stored statistics."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    training = [module for module in modules if module.training]  # a frozen part is not
    for module in training:
        module.training = False
    batches = (inputs.to(trial.setting.device) for inputs in trial.test.split(256))
    guesses = torch.cat([model(inputs).argmax(1).cpu() for inputs in batches])
    for module in training:
        module.training = True
    return guesses


def by_cell(classes: Tensor, trial: Trial) -> Tensor:
    """Compute the accuracy on the test inputs of each cell."""
    correct = (classes == trial.test_cells % trial.setting.num_classes).float()
    return fp.class_means(correct, trial.test_cells, num_classes=trial.mixes.shape[1]).value


def mixed(accuracy: Tensor, mix: Tensor) -> float:
    """Average the accuracy of cells with the shares of a mix."""
    return fp.metrics.global_accuracy(accuracy[None], mix)


def num_trained(model: Any) -> int:
    """Count the parameters that a model trains."""
    if not isinstance(model, nn.Module):
        return 0
    return sum(each.numel() for each in model.parameters() if each.requires_grad)
