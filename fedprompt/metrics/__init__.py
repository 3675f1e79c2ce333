"""Global, local and worst-client accuracy, summaries over rounds, and rises of local losses."""

from fedprompt.metrics.accuracy import (
    ClientSpread,
    Summary,
    client_spread,
    global_accuracy,
    last_and_best,
    local_accuracy,
    pooled_local_accuracy,
    worst_local_accuracy,
)
from fedprompt.metrics.losses import NegativeEffect, negative_effect

__all__ = [
    "ClientSpread",
    "NegativeEffect",
    "Summary",
    "client_spread",
    "global_accuracy",
    "last_and_best",
    "local_accuracy",
    "negative_effect",
    "pooled_local_accuracy",
    "worst_local_accuracy",
]
