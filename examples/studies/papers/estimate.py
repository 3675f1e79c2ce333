"""Length of a run, from a few measured steps."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

import fedprompt as fp
from methods.federation import Predictions
from studies.gallery import evaluate, registry
from studies.gallery.tasks import Trial
from studies.papers.cost import BATCH
from studies.papers.setting import Row


@dataclass(frozen=True)
class Estimate:
    """Length of a run of a row.

    Attributes:
        steps: Number of batches of all clients and rounds.
        images: Number of images in them.
        seconds: Predicted time of training, from `measured` steps, and of the last evaluations.
        measured: Number of steps that were measured.
    """

    steps: int
    images: int
    seconds: float
    measured: int


def estimate(row: Row, trial: Trial, *, steps: int = 20, last_rounds: int = 1) -> Estimate:
    """Measure a few steps of a row and an evaluation, and predict the time of all its rounds.

    Args:
        row: Row with a method.
        trial: Trial of its setting.
        steps: Number of steps to measure, divided over one client of each backbone, or two
            clients. With more backbones than steps, each has one step.
        last_rounds: Number of rounds with an evaluation.
    """
    whole = trial.federation
    few = whole.clients[: max(2, whole.num_backbones)]
    size, each = whole.batch_size, max(1, steps // len(few))
    shards = {client: whole.shards[client][: each * size] for client in few}
    brief = replace(
        whole,
        shards=shards,
        clients=few,
        rounds=1,
        cohort_size=len(few),
        epochs=1,
        ledger=fp.Ledger(),
    )
    method = registry.gallery()[row.method]
    began = _now(whole.device)
    with torch.device(whole.device):
        torch.manual_seed(whole.seed)
        predictions = next(iter(method.function(brief, **row.values)))
        elapsed = _now(whole.device) - began
        tested = last_rounds * _evaluation(predictions, trial, few)
    measured = sum(map(brief.num_batches, few))
    batches = {client: whole.num_batches(client) for client in whole.clients}
    images = sum(min(len(whole.shards[client]), batches[client] * size) for client in batches)
    turns = whole.epochs * whole.rounds * whole.cohort_size / len(batches)
    total = round(turns * sum(batches.values()))
    seconds = elapsed / measured * total + tested
    return Estimate(total, round(turns * images), seconds, measured)


def _evaluation(predictions: Predictions, trial: Trial, few: Sequence[int]) -> float:
    """Measure the evaluation of a few clients on one batch, and predict that of all in seconds."""
    models = 1 if predictions.client is None else len(trial.federation.clients)
    measured = few[:models]
    batch = trial._replace(test=trial.test[:BATCH], test_cells=trial.test_cells[:BATCH])
    began = _now(trial.federation.device)
    for client in measured:
        evaluate.by_cell(predictions.of(client), batch)
    elapsed = _now(trial.federation.device) - began
    return elapsed / len(measured) * models * len(trial.test) / len(batch.test)


def _now(device: torch.device) -> float:
    """Return the time in seconds after a GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
