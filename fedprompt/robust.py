"""Robust aggregators, for clients whose messages may be wrong, and one for each name."""

from fedprompt.aggregation.by_name import aggregate_by_name
from fedprompt.aggregation.krum import krum, multi_krum
from fedprompt.aggregation.order_statistics import trimmed_mean, weighted_median

__all__ = ["aggregate_by_name", "krum", "multi_krum", "trimmed_mean", "weighted_median"]
