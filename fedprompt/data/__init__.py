"""Partitions of a data set over clients: from labels to an index array for each client."""

from fedprompt.data.allocation import allocate
from fedprompt.data.overlapping import dirichlet_overlapping
from fedprompt.data.partition import by_domain, dirichlet, iid, pathological
from fedprompt.data.shares import dirichlet_shares, iid_shares, pathological_shares
from fedprompt.data.splits import study_quiz_split

__all__ = [
    "allocate",
    "by_domain",
    "dirichlet",
    "dirichlet_overlapping",
    "dirichlet_shares",
    "iid",
    "iid_shares",
    "pathological",
    "pathological_shares",
    "study_quiz_split",
]
