"""Uploads in, one upload out; and what the server makes of it."""

from fedprompt.aggregation.heterogeneous import heterogeneous_means
from fedprompt.aggregation.krum import krum, multi_krum
from fedprompt.aggregation.means import weighted_mean
from fedprompt.aggregation.naming import per_name, per_name_update
from fedprompt.aggregation.robust import trimmed_mean, weighted_median
from fedprompt.aggregation.server import descend, ema, overwrite

__all__ = [
    "descend",
    "ema",
    "heterogeneous_means",
    "krum",
    "multi_krum",
    "overwrite",
    "per_name",
    "per_name_update",
    "trimmed_mean",
    "weighted_mean",
    "weighted_median",
]
