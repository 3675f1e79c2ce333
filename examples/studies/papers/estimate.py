"""Length of a run, from a few measured steps."""

import time
from dataclasses import dataclass, replace

import torch

import fedprompt as fp
from studies.gallery import registry
from studies.gallery.tasks import Trial
from studies.papers.setting import Row


@dataclass(frozen=True)
class Estimate:
    """Length of a run of a row.

    Attributes:
        steps: Number of batches of all clients and rounds.
        images: Number of images in them.
        seconds: Predicted time of training, from `measured` steps.
        measured: Number of steps that were measured.
    """

    steps: int
    images: int
    seconds: float
    measured: int


def estimate(row: Row, trial: Trial, *, steps: int = 20) -> Estimate:
    """Measure a few steps of a row, and predict the time of all its rounds without evaluation.

    Args:
        row: Row with a method.
        trial: Trial of its setting.
        steps: Number of steps to measure, divided over one client of each backbone, or two
            clients. With more backbones than steps, each has one step.
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
        next(iter(method.function(brief, **row.values)))
    elapsed = _now(whole.device) - began
    measured = sum(map(brief.num_batches, few))
    batches = {client: whole.num_batches(client) for client in whole.clients}
    images = sum(min(len(whole.shards[client]), batches[client] * size) for client in batches)
    turns = whole.epochs * whole.rounds * whole.cohort_size / len(batches)
    total = round(turns * sum(batches.values()))
    return Estimate(total, round(turns * images), elapsed / measured * total, measured)


def _now(device: torch.device) -> float:
    """Return the time in seconds after a GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
