"""Prompt selection for each sample: learnable keys, selection rules, and figures of key usage."""

from fedprompt.selection.agreement import clustering_accuracy
from fedprompt.selection.balanced import select_balanced
from fedprompt.selection.centering import CenteredQueries, query_mean
from fedprompt.selection.health import selection_health
from fedprompt.selection.keys import SelectionKeys, key_loss, orthogonal_keys
from fedprompt.selection.nearest import select_nearest

__all__ = [
    "CenteredQueries",
    "SelectionKeys",
    "clustering_accuracy",
    "key_loss",
    "orthogonal_keys",
    "query_mean",
    "select_balanced",
    "select_nearest",
    "selection_health",
]
