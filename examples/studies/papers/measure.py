"""Accuracy in the columns that papers print."""

from collections.abc import Sequence

import numpy as np
import torch

from methods.federation import Predictions
from studies.gallery import evaluate
from studies.gallery.tasks import Trial


def columns(
    predictions: Predictions, trial: Trial, domain_names: Sequence[str] = ("",)
) -> dict[str, float]:
    """Measure the accuracy of all clients, by column.

    Args:
        predictions: Last predictions of a method.
        trial: Federation and test inputs.
        domain_names: Name of each domain.

    Returns:
        `full`, the mean over clients on all test images, with `lowest` and `highest` client; `own`,
        the mean on their own mixes of classes and domains; `worst`, the lowest of these. With
        several domains, the name of each has the mean over its clients on their own mixes.
    """
    total = trial.mixes.shape[1]
    counts = torch.bincount(trial.test_cells, minlength=total).cpu()
    cells, full, own = None, [], []
    for client in trial.federation.clients:
        if cells is None or predictions.client is not None:
            cells = evaluate.by_cell(predictions.of(client), trial).cpu()
        full.append(evaluate.mixed(cells, counts))
        own.append(evaluate.mixed(cells, trial.mixes[client]))
    figures = {
        "full": float(np.mean(full)),
        "lowest": min(full),
        "highest": max(full),
        "own": float(np.mean(own)),
        "worst": min(own),
    }
    if len(domain_names) > 1:
        of = trial.mixes.reshape(len(own), len(domain_names), -1).sum(2).argmax(1).numpy()
        for number, name in enumerate(domain_names):
            figures[name] = float(np.mean(np.array(own)[of == number]))
    return figures
