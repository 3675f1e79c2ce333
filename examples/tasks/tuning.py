"""Hyperparameters of the tuning trials."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedprompt.methods import METHODS
from fedprompt.methods.registry import Range
from tasks.controls import DRAWN_AS
from tasks.core import Row

NUM_TRIALS = 6
TUNING_SEED = 1_000  # of no reported run


def draws(row: Row, name: str) -> list[dict[str, Any]]:
    """Draw the hyperparameters of trials; the first has those of the row.

    A control row has the trials of the row that it controls, so that both have the same rates.

    Args:
        row: Row with a method.
        name: Name that decides the draws, with that of the method.
    """
    method = DRAWN_AS.get(str(row.method), row.method)
    rng = np.random.default_rng([TUNING_SEED, *f"{name} {method}".encode()])
    drawn, search = [dict(row.values)], METHODS[str(method)].search
    while search and len(drawn) < NUM_TRIALS:
        values = {each: draw(search[each], rng) for each in search}
        drawn.append({**row.values, **{each: values[each] for each in row.entry.search}})
    return drawn


def rates(row: Row, name: str, learning_rates: Sequence[float]) -> list[dict[str, Any]]:
    """Return trials with the same learning rates in all rows, and other hyperparameters drawn."""
    trials = zip(draws(row, name), learning_rates, strict=False)
    return [values | {"learning_rate": rate} for values, rate in trials]


def draw(values: Range, rng: np.random.Generator) -> Any:
    """Draw a number log-uniformly, or a choice."""
    if isinstance(values, list):
        return values[rng.integers(len(values))]
    low, high = values
    return float(f"{np.exp(rng.uniform(np.log(low), np.log(high))):.3g}")
