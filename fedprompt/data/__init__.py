"""Labels of a data set, and its partition over clients: an index array for each client."""

from fedprompt.data.allocation import allocate
from fedprompt.data.labels import labels_of
from fedprompt.data.overlapping import dirichlet_overlapping
from fedprompt.data.partition import by_domain, dirichlet, iid, pathological
from fedprompt.data.shares import dirichlet_shares, iid_shares, pathological_shares
from fedprompt.data.splits import base_new_split, few_shot, study_quiz_split

__all__ = [
    "allocate",
    "base_new_split",
    "by_domain",
    "dirichlet",
    "dirichlet_overlapping",
    "dirichlet_shares",
    "few_shot",
    "iid",
    "iid_shares",
    "labels_of",
    "pathological",
    "pathological_shares",
    "study_quiz_split",
]
