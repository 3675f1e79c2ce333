"""Folders of images, and the partition of labels over clients: an index array for each client."""

from fedprompt.data.doubts import Doubt
from fedprompt.data.folders import Folder, read_folder
from fedprompt.data.labels import labels_of
from fedprompt.data.overlapping import dirichlet_overlapping, dirichlet_sizes
from fedprompt.data.partition import by_domain, dirichlet, iid, pathological, quantity_skew
from fedprompt.data.readings import Reading, examine
from fedprompt.data.saved_shards import load_shards, save_shards
from fedprompt.data.shares import (
    allocate,
    class_shares,
    dirichlet_shares,
    iid_shares,
    pathological_shares,
)
from fedprompt.data.splits import (
    base_new_split,
    few_shot,
    group_split,
    leave_one_out,
    study_quiz_split,
)

__all__ = [
    "Doubt",
    "Folder",
    "Reading",
    "allocate",
    "base_new_split",
    "by_domain",
    "class_shares",
    "dirichlet",
    "dirichlet_overlapping",
    "dirichlet_shares",
    "dirichlet_sizes",
    "examine",
    "few_shot",
    "group_split",
    "iid",
    "iid_shares",
    "labels_of",
    "leave_one_out",
    "load_shards",
    "pathological",
    "pathological_shares",
    "quantity_skew",
    "read_folder",
    "save_shards",
    "study_quiz_split",
]
