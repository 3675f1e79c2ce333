"""Prompt selection for each sample: learnable keys, selection rules, and figures of key usage."""

import sys
import warnings

from fedprompt.selection.agreement import clustering_accuracy
from fedprompt.selection.balanced import select_balanced
from fedprompt.selection.centering import CenteredQueries, query_mean
from fedprompt.selection.health import revive_keys, selection_health
from fedprompt.selection.keys import SelectionKeys, key_loss, orthogonal_keys
from fedprompt.selection.nearest import select_nearest

__all__ = [
    "CenteredQueries",
    "SelectionKeys",
    "clustering_accuracy",
    "key_loss",
    "orthogonal_keys",
    "query_mean",
    "revive_keys",
    "select_balanced",
    "select_nearest",
    "selection_health",
]


def __getattr__(name: str) -> object:
    """Return `contingency_table`, which moved to the metrics."""
    if name != "contingency_table":
        raise AttributeError(f"module 'fedprompt.selection' has no attribute {name!r}")
    text = "`selection.contingency_table` is `metrics.contingency_table` since 0.3."
    warnings.warn(text, FutureWarning, stacklevel=2)
    return sys.modules["fedprompt"].metrics.contingency_table
