"""Aggregators of entries and payloads, and server rules."""

from fedprompt.aggregation.by_name import update_by_name
from fedprompt.aggregation.heterogeneous import heterogeneous_means
from fedprompt.aggregation.low_rank import low_rank_mean
from fedprompt.aggregation.means import weighted_mean
from fedprompt.aggregation.optimizers import adam, descend, fedopt, yogi
from fedprompt.aggregation.personal import distances, mixtures
from fedprompt.aggregation.servers import averaging_server, ema, overwrite
from fedprompt.aggregation.unlike import leading, padded

__all__ = [
    "adam",
    "averaging_server",
    "descend",
    "distances",
    "ema",
    "fedopt",
    "heterogeneous_means",
    "leading",
    "low_rank_mean",
    "mixtures",
    "overwrite",
    "padded",
    "update_by_name",
    "weighted_mean",
    "yogi",
]
