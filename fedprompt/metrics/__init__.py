"""Accuracy of clients and of classes, summaries over rounds, and rises of local losses."""

from fedprompt.metrics.accuracy import (
    ClientSpread,
    NegativeEffect,
    Summary,
    client_spread,
    global_accuracy,
    last_and_best,
    local_accuracy,
    negative_effect,
    pooled_local_accuracy,
    worst_local_accuracy,
)
from fedprompt.metrics.classes import (
    attack_success,
    balanced_accuracy,
    balanced_weights,
    class_accuracy,
    contingency_table,
    harmonic_mean,
    macro_f1,
    most_frequent_class,
)
from fedprompt.metrics.mechanisms import DistillationTerms, congruence, distillation_terms

__all__ = [
    "ClientSpread",
    "DistillationTerms",
    "NegativeEffect",
    "Summary",
    "attack_success",
    "balanced_accuracy",
    "balanced_weights",
    "class_accuracy",
    "client_spread",
    "congruence",
    "contingency_table",
    "distillation_terms",
    "global_accuracy",
    "harmonic_mean",
    "last_and_best",
    "local_accuracy",
    "macro_f1",
    "most_frequent_class",
    "negative_effect",
    "pooled_local_accuracy",
    "worst_local_accuracy",
]
