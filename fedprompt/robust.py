"""Robust aggregators, for clients whose messages may be wrong."""

from fedprompt.aggregation import krum, multi_krum, trimmed_mean, weighted_median

__all__ = ["krum", "multi_krum", "trimmed_mean", "weighted_median"]
