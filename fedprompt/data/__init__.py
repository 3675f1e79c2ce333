"""Folders of images, and the partition of labels over clients: an index array for each client."""

from fedprompt.data.doubts import Doubt
from fedprompt.data.folders import Folder, read_folder
from fedprompt.data.overlapping import dirichlet_overlapping, dirichlet_sizes
from fedprompt.data.partition import by_domain, dirichlet, disjoint_classes, iid, pathological
from fedprompt.data.readings import Reading, examine
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
    "disjoint_classes",
    "examine",
    "few_shot",
    "group_split",
    "iid",
    "iid_shares",
    "leave_one_out",
    "pathological",
    "pathological_shares",
    "read_folder",
    "study_quiz_split",
]
