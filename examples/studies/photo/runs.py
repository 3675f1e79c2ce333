"""Runs of the study: the figures of a row, and its record."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

import fedprompt as fp
from methods.federation import Predictions
from studies.gallery import evaluate, jobs
from studies.gallery.registry import Method
from studies.gallery.tasks import Trial
from studies.photo import trials
from studies.photo.settings import Sources

EVERY = 5  # rounds between two points of the curve
CURVE_SEED = 0
NUM_SHOWN = 24  # test images whose predicted class is in the record


@dataclass(frozen=True)
class Run(jobs.Job):
    """One run of a method on photographs.

    Attributes:
        sources: Networks.
    """

    sources: Sources

    def measure(self, method: Method, finished_round: Callable[[], None]) -> dict[str, Any]:
        """Run the method; add figures of skewed classes, and the accuracy over rounds."""
        trial = trials.make_trial(
            self.task,
            self.partition,
            seed=self.seed,
            settings=self.settings,
            sources=self.sources,
            validate=self.trial is not None,
        )
        curve = self.seed == CURVE_SEED and self.trial is None
        watch = Watch(trial, EVERY if curve else None)

        def watched(federation: Any, **values: Any) -> Iterator[Predictions]:
            yield from watch(method.function(federation, **values))

        figures = evaluate.run(watched, trial, self.values, finished_round=finished_round)
        turns = self.settings.rounds * self.settings.cohort_size
        figures["seconds"] -= watch.seconds
        figures["backward"] -= watch.backward / turns
        return figures | watch.figures(curve)


class Watch:
    """Record of the predictions that a method yields.

    Args:
        trial: Federation and test inputs.
        every: Number of rounds between two points of the curve. If None, there is no curve.
    """

    def __init__(self, trial: Trial, every: int | None) -> None:
        self.trial, self.every = trial, every
        self.guesses: dict[int, list[Tensor]] = {}
        self.rounds: list[float] = []
        self.accuracy: list[float] = []
        self.seconds, self.backward = 0.0, 0

    def __call__(self, rounds: Iterator[Predictions]) -> Iterator[Predictions]:
        """Yield the predictions of each round; those of the last one record their classes."""
        last = self.trial.federation.rounds
        for number, predictions in enumerate(rounds, 1):
            if self.every is not None and number < last and number % self.every == 0:
                self._measure(number, predictions)
            yield predictions if number < last else self._recorded(predictions)

    def _measure(self, number: int, predictions: Predictions) -> None:
        """Add a point of the curve; its time and gradient passes are not those of the method."""
        began, clients = time.process_time(), self.trial.federation.clients
        counts = torch.bincount(self.trial.test_cells, minlength=self.trial.mixes.shape[1])
        with evaluate.counted_passes() as passes:
            own = clients if predictions.client is not None else clients[:1]
            cells = [evaluate.by_cell(predictions.of(client), self.trial) for client in own]
        self.rounds.append(number)
        self.accuracy.append(sum(evaluate.mixed(each, counts) for each in cells) / len(cells))
        self.seconds += time.process_time() - began
        self.backward += passes["backward"]

    def _recorded(self, predictions: Predictions) -> Predictions:
        if predictions.client is None:
            kept = self.guesses.setdefault(-1, [])
            model = Recorded(predictions.everyone, kept)
            return Predictions(everyone=model, newcomer=lambda client: predictions.everyone)

        def client(number: int) -> Recorded:
            kept = self.guesses.setdefault(number, [])
            return Recorded(predictions.of(number), kept)

        return Predictions(client=client, newcomer=predictions.received)

    def figures(self, curve: bool) -> dict[str, Any]:
        """Return balanced accuracy and macro-F1 on all test images, and the curve if there is one.

        Each is the mean over the models that predict for a client.
        """
        classes = self.trial.federation.num_classes
        labels = self.trial.test_cells % classes
        guesses = [torch.cat(kept)[: len(labels)] for kept in self.guesses.values() if kept]
        tables = [
            fp.selection.contingency_table(each, labels, classes, classes) for each in guesses
        ]
        found: dict[str, Any] = {
            name: sum(map(measure, tables)) / len(tables)
            for name, measure in (
                ("balanced", fp.metrics.balanced_accuracy),
                ("macro_f1", fp.metrics.macro_f1),
            )
        }
        if curve:
            ends = [(each == labels).float().mean().item() for each in guesses]
            found["rounds"] = [*self.rounds, self.trial.federation.rounds]
            found["accuracy"] = [*self.accuracy, sum(ends) / len(ends)]
            found["shown"] = guesses[0][:NUM_SHOWN].tolist()
        return found


class Recorded(nn.Module):
    """Model that keeps the classes that it predicts.

    Args:
        model: Model from inputs to logits.
        kept: List to which the classes of each batch are added.
    """

    def __init__(self, model: nn.Module, kept: list[Tensor]) -> None:
        super().__init__()
        self.model, self.kept = model, kept
        self.training = model.training

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits."""
        logits = self.model(inputs)
        self.kept.append(logits.argmax(1))
        return logits
