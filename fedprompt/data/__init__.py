"""Who holds which samples: labels in, one index array per client out; and frozen features, computed once."""

from fedprompt.data.allocation import allocate
from fedprompt.data.features import precompute
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
    "precompute",
    "study_quiz_split",
]
