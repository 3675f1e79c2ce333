"""Clients of a folder by a word, their test images, and what is refused."""

from pathlib import Path

import numpy as np
import pytest

from fedprompt import data
from fedprompt.data import Folder
from fedprompt.data.divisions import divide, held_out


def folder(labels, domains=None, split=None, names=("",)):
    """Make a folder without files."""
    count = len(labels)
    paths = tuple(Path(f"{k}.png") for k in range(count))
    labels, domains = np.asarray(labels), np.zeros(count, int) if domains is None else domains
    split = np.array(["train"] * count) if split is None else np.asarray(split)
    classes = tuple("abcdef"[: labels.max() + 1])
    return Folder(Path("photos"), "x", paths, labels, np.asarray(domains), split, classes, names)


def divided(given, clients, seed=0):
    return divide(given, clients, generator=np.random.default_rng(seed))


def counts(given, parts):
    classes = len(given.class_names)
    return [np.bincount(given.labels[part], minlength=classes).tolist() for part in parts]


def test_domains_keep_their_own_test_images():
    split = ["train", "train", "val", "test"] * 3
    given = folder([0, 1, 0, 1] * 3, np.arange(12) // 4, split, names=("x", "y", "z"))
    found = divided(given, "folders")
    assert str(found).startswith("  x: train 2, test 1\n")
    assert [part.tolist() for part in found.train] == [[0, 1], [4, 5], [8, 9]]
    assert [part.tolist() for part in found.own] == [[3], [7], [11]]
    without = given.at(given.split != "test")  # then `val` is for testing
    assert [part.tolist() for part in divided(without, "domains").own] == [[2], [5], [8]]


NUMBERS = {"iid:4": 4, "dirichlet:0.5:5": 5, "pathological:2:6": 6}


@pytest.mark.parametrize("clients", NUMBERS)
def test_images_are_divided_over_so_many_clients(clients):
    given = folder(np.arange(240) % 3, split=["train"] * 180 + ["test"] * 60)
    found = divided(given, clients)
    assert found.names == tuple(map(str, range(NUMBERS[clients])))
    owned = np.concatenate(found.train + found.own)
    assert sorted(owned) == list(range(240))
    tested = np.array(counts(given, found.own))
    trained = np.array(counts(given, found.train))
    assert np.concatenate(found.own).min() == 180
    assert np.abs(tested - trained / 3).max() <= 1  # its share of each class, to one image
    if clients.startswith("pathological"):
        assert ((trained > 0).sum(1) == 2).all()


@pytest.mark.parametrize("clients", ["iid:4", "dirichlet:0.5:5", "pathological:2:6"])
def test_the_division_is_that_of_the_functions_of_the_data_module(clients):
    """Training and test images alternate, so that positions and places differ."""
    split = np.array(["train", "test", "train", "train"] * 60)
    given, draw = folder(np.arange(240) % 7 % 3, split=split), np.random.default_rng(2)
    train, test = np.flatnonzero(split == "train"), np.flatnonzero(split == "test")
    labels, more = given.labels[train], {"generator": draw}
    if clients == "iid:4":
        shards = data.iid(labels, 4, **more)
    elif clients == "dirichlet:0.5:5":
        shards = data.dirichlet(labels, 5, alpha=0.5, min_size=2, **more)
    else:
        shards = data.pathological(labels, 6, classes_per_client=2, **more)
    shares = data.class_shares(labels, shards, 3)
    tests = data.allocate(given.labels[test], shares, min_size=0, **more)
    found = divided(given, clients, seed=2)
    assert [part.tolist() for part in found.train] == [train[part].tolist() for part in shards]
    assert [part.tolist() for part in found.own] == [test[part].tolist() for part in tests]


def test_test_images_of_a_class_that_nobody_trains_belong_to_no_client():
    given = folder([0, 1, 0, 1, 0, 1, 2], split=["train"] * 4 + ["test"] * 3)
    assert sum(map(len, divided(given, "iid:2").own)) == 2


def test_a_share_of_each_cell_is_held_out():
    cells = np.array([7] * 10 + [0] * 20 + [3] * 2 + [5])
    tested = held_out(cells, 0.2, np.random.default_rng(0))
    assert [int(tested[cells == cell].sum()) for cell in (7, 0, 3, 5)] == [2, 4, 1, 0]
    seeds = [held_out(cells, 0.2, np.random.default_rng(seed)).nonzero()[0] for seed in range(9)]
    assert len({tuple(positions) for positions in seeds}) > 5


def test_shares_are_drawn_again_until_each_client_has_two_images():
    given = folder([0, 1] * 10 + [0, 1], split=["train"] * 20 + ["test"] * 2)
    for seed in range(5):
        found = divided(given, "dirichlet:5:9", seed)  # three for each are not there
        assert min(map(len, found.train)) >= 2


REFUSED = {
    "domain": "must be domains, folders, iid:N, dirichlet:ALPHA:N or pathological:K:N; got",
    "iid": "must be domains",
    "iid:x": "must be domains",
    "iid:2:3": "must be domains",
    "dirichlet:3": "must be domains",
    "pathological:0.5:3": "must be domains",
    "domains": "must divide by numbers, such as dirichlet:0.3:10, since photos has no domains",
    "iid:0": "2 classes; got iid:0: `num_clients` must be at least 1",
    "iid:21": "`num_clients` must be at most 20",
    "dirichlet:-1:2": "2 classes; got dirichlet:-1:2: `alpha` must be",
    "dirichlet:nan:2": "`alpha` must be",
    "dirichlet:0.1:20": "`min_size`",
    "pathological:3:2": "`classes_per_client`",
}


@pytest.mark.parametrize("clients", REFUSED)
def test_refusals_have_flag_rule_and_value(clients):
    with pytest.raises(ValueError, match=r"^`clients") as error:
        divided(folder([0, 1] * 10), clients)
    assert REFUSED[clients] in str(error.value)
    assert clients in str(error.value)


def test_a_client_without_training_images_is_named():
    given = folder([0, 1, 0, 1], [0, 0, 1, 1], ["train"] * 2 + ["test"] * 2, names=("a", "b"))
    with pytest.raises(ValueError, match="must give client b training images; got none"):
        divided(given, "domains")


def test_a_folder_without_two_images_of_a_class_has_none_for_tests():
    given = folder([0, 1, 0, 1], [0, 0, 1, 1], names=("a", "b"))
    with pytest.raises(ValueError, match="must leave some client test images; got none"):
        divided(given, "domains")
