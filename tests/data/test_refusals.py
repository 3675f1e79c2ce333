"""Each argument of the partitions and splits is refused by its name, and its edge is taken."""

import numpy as np
import pytest
import torch
from torch import nan

from fedprompt import data
from refusals import number, refused, refused_and_taken

LABELS, NAMES = [0, 1] * 10, ["art", "photo", "art", "photo"]
HALF = np.full((2, 2), 0.5)
DRAW = np.random.default_rng(0)
FLAG = ["x", 1, None], [True, False]
GENERATOR = [0, None, np.random.RandomState(0), np.random.PCG64(0)], [DRAW, torch.Generator()]
WRONG_LABELS = [
    *([], [0, -1, 2], [0, 1.5], [0, True], ["cat"], "012", 3, np.zeros(3), np.zeros(3, dtype=bool)),
    *(np.zeros((3, 1), dtype=int), torch.zeros(3), torch.tensor(1), [2**70]),
]
SAMPLES = WRONG_LABELS, [LABELS]
MANY = [0.0, -1.0, nan, 1e13, "a", [0.1, 0.2, 0.3], [[0.1], [0.0]], [[1.0, 2.0], [1.0]]]
ALPHA = [*MANY, np.ones(2, bool), None], [1e12, 1, [1.0, 2.0], [[0.5], [1.0]], np.eye(2) + 1]
WRONG_NAMES = ["art", 3, ["art", 3, "art", "art"], np.zeros((2, 2), dtype=int), [0, True]]
DOMAINS = [*WRONG_NAMES, [], [1.5, 2.5]], [NAMES, [1, 2, 1, 1], torch.tensor([3, 1, 3, 3])]
WRONG_SHARES = [[[1.0, 1.0]], np.ones(2), HALF - 0.6, HALF.astype(int), HALF * nan, HALF[:0]]
SHARES = (
    [*WRONG_SHARES, np.array([[0.5, 0.75], [0.5, 0.5]]), HALF + 1e-5],
    [HALF, HALF.astype(np.float32), HALF + 4e-7, HALF / 2],
)
DIRICHLET = {"labels": LABELS, "num_clients": 2, "alpha": 1e12, "generator": DRAW}
test_a_wrong_argument_is_refused_by_its_name_and_its_edge_is_taken = refused_and_taken([
    (data.iid, {"labels": LABELS, "num_clients": 2, "generator": DRAW}, {
        "labels": SAMPLES, "num_clients": number(1, 20), "generator": GENERATOR}),
    (data.dirichlet, DIRICHLET, {
        "labels": SAMPLES, "num_clients": number(1), "alpha": ALPHA, "min_size": number(0, 10),
        "min_per_class": ([-1, nan, 6, 0.6, "a"], [0, 5, 0.5]), "capped": FLAG,
        "generator": GENERATOR}),
    (data.dirichlet_sizes, {"labels": LABELS, "sizes": [4, 4], "alpha": 1, "generator": DRAW}, {
        "labels": SAMPLES, "sizes": ([[], [2**70], [0, 3], [11, 10], [1.5], 3], [[1], [10, 10]]),
        "alpha": ALPHA, "generator": GENERATOR}),
    (data.dirichlet_overlapping, DIRICHLET | {"size": 4}, {
        "labels": SAMPLES, "size": number(1, 20), "num_clients": number(1), "alpha": ALPHA,
        "min_per_class": ([-1, nan, 3, 0.3], [0, 2, 0.2]), "generator": GENERATOR}),
    (data.pathological, {
        "labels": [0, 1, 2, 3] * 5, "num_clients": 4, "classes_per_client": 2, "generator": DRAW}, {
        "labels": SAMPLES, "num_clients": (number(1)[0], [4, 6]),
        "classes_per_client": ([0, 1.0, 5], [1, 4]), "min_size": number(0),
        "generator": GENERATOR}),
    (data.disjoint_classes, {"labels": LABELS, "num_clients": 2, "generator": DRAW}, {
        "labels": SAMPLES, "num_clients": number(1, 2), "rest_last": FLAG, "generator": GENERATOR}),
    (data.by_domain, {"domains": NAMES, "generator": DRAW}, {
        "domains": DOMAINS, "num_clients": ([0, 3, 6, 2.0], [2, 4]),
        "all_domains": ([[], "art", ["art", 3, "photo"]], [NAMES, ["sketch", *NAMES]])}),
    (data.by_domain, {"domains": NAMES, "num_clients": 4, "generator": DRAW}, {
        "generator": GENERATOR}),
    (data.allocate, {"labels": [0, 1] * 4, "shares": HALF, "generator": DRAW}, {
        "labels": ([*WRONG_LABELS, [0, 2]], [[0, 0, 1, 1]]), "shares": SHARES,
        "min_size": number(0, 4), "generator": GENERATOR}),
    (data.iid_shares, {"num_clients": 2, "num_classes": 3}, {
        "num_clients": number(1), "num_classes": number(1)}),
    (data.dirichlet_shares, {
        "num_clients": 2, "num_classes": 2, "alpha": 0.3, "generator": DRAW}, {
        "num_clients": ([0, 1.0], [2]), "num_classes": number(1), "alpha": ALPHA,
        "min_per_class": ([-0.1, 0.51, nan], [0, 0.5]), "generator": GENERATOR}),
    (data.pathological_shares, {
        "num_clients": 4, "num_classes": 10, "classes_per_client": 5, "generator": DRAW}, {
        "num_clients": ([0, -1], [2, 4]), "num_classes": (number(1)[0], [5, 10]),
        "classes_per_client": ([0, 2, 15], [5, 10]), "generator": GENERATOR}),
    (data.class_shares, {"labels": [0, 1], "clients": [[0]], "num_classes": 2}, {
        "labels": ([*WRONG_LABELS, [0, 2]], [[0, 1]]), "num_classes": ([0, 2.0], [2, 9]),
        "clients": ([[[2]], [[0], [0, 1]], [], 3, [[-1]]], [[[0], [1]], [[], [1]]])}),
    (data.study_quiz_split, {"labels": [0, 1], "quiz_size": 1, "generator": DRAW}, {
        "labels": ([[0, -1], "01", 3], [[], [1]]), "quiz_size": number(1), "generator": GENERATOR}),
    (data.few_shot, {"labels": LABELS, "shots": 1, "generator": DRAW}, {
        "labels": SAMPLES, "shots": number(1), "generator": GENERATOR}),
    (data.group_split, {"groups": NAMES, "share": 0.5, "generator": DRAW}, {
        "groups": DOMAINS, "share": ([0.0, 1.1, nan, "a"], [1e-9, 1.0]), "generator": GENERATOR}),
    (data.leave_one_out, {"domains": NAMES}, {"domains": DOMAINS}),
    (data.base_new_split, {"num_classes": 4}, {"num_classes": number(2)}),
])  # fmt: skip
test_what_two_arguments_contradict_names_one_of_them = refused(globals())("""
data.dirichlet([0] * 50 + [1] * 50, 3, alpha=1e-06, min_size=1, generator=DRAW) \
-> ValueError: `min_size` must be at most 0, the best minimum in 1000 draws with this `alpha`
data.dirichlet([0] * 50 + [1] * 50, 4, alpha=1e-06, generator=np.random.default_rng(0)) \
-> ValueError: `min_size` must be 0 to allow empty clients, or in `dirichlet` at least 1 to
data.pathological(LABELS[:4], 8, classes_per_client=1, generator=DRAW) \
-> ValueError: `min_size` must be 0 to allow empty clients,
data.allocate([0, 1], np.eye(2)[:, ::-1] * [[1.0], [0.0]], generator=DRAW) \
-> ValueError: got None, and 1 of 2 clients have no samples: 1
data.disjoint_classes(range(6), 4, rest_last=True, generator=DRAW) \
-> ValueError: `num_clients` must leave classes for the last client, of 6; got 4.
data.group_split(['ann'] * 3, share=0.5, generator=DRAW) -> ValueError: `len(set(groups))` must be
data.leave_one_out(['ann'] * 3) -> ValueError: `len(set(domains))` must be at least 2; got 1
data.by_domain(['x'], all_domains=NAMES) -> ValueError: `domains` must be among `all_domains`;
""")


def test_ten_of_many_empty_clients_are_named():
    with pytest.raises(ValueError, match=r"clients have no samples: (\d+, ){10}\.\.\.\.$"):
        data.dirichlet([0] * 50, 40, alpha=0.1, generator=DRAW)
