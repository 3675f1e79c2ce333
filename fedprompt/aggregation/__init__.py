"""Aggregators of entries and payloads, and server updates."""

from fedprompt.aggregation.by_name import aggregate_by_name, update_by_name
from fedprompt.aggregation.heterogeneous import heterogeneous_means
from fedprompt.aggregation.krum import krum, multi_krum
from fedprompt.aggregation.low_rank import low_rank_mean
from fedprompt.aggregation.means import weighted_mean
from fedprompt.aggregation.optimizers import descend, fedadam, fedopt, fedyogi
from fedprompt.aggregation.personal import averaging_server, distances, mixtures
from fedprompt.aggregation.robust import trimmed_mean, weighted_median
from fedprompt.aggregation.server import ema, overwrite

__all__ = [
    "aggregate_by_name",
    "averaging_server",
    "descend",
    "distances",
    "ema",
    "fedadam",
    "fedopt",
    "fedyogi",
    "heterogeneous_means",
    "krum",
    "low_rank_mean",
    "mixtures",
    "multi_krum",
    "overwrite",
    "trimmed_mean",
    "update_by_name",
    "weighted_mean",
    "weighted_median",
]
