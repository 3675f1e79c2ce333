"""Laws that every partition function obeys, and the properties of each function."""

import inspect
import random
from collections.abc import Callable
from types import GenericAlias

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedprompt import data
from fedprompt.data import (
    allocate,
    by_domain,
    dirichlet,
    dirichlet_overlapping,
    dirichlet_sizes,
    disjoint_classes,
    iid,
    iid_shares,
    pathological,
    study_quiz_split,
)
from references.partition import capped_dirichlet, class_counts

SIZES = [40, 31, 52, 8, 27, 42]
LABELS = np.random.default_rng(7).permutation(np.repeat(np.arange(6), SIZES)).tolist()
NAMES = ["sketch", "art", "photo", "art", "sketch", "art", "art", "sketch", "photo", "art"]


def of(partition: Callable, **options: object) -> Callable:
    return lambda labels, generator: partition(labels, generator=generator, **options)


# Functions of labels and a generator. Each sample has one owner, but for the last function.
ALL: dict[str, Callable] = {
    "allocate": of(allocate, shares=iid_shares(4, 6)),
    "by_domain": lambda labels, generator: by_domain(labels),
    "by_domain, two clients each": of(by_domain, num_clients=12),
    "dirichlet": of(dirichlet, num_clients=5, alpha=0.3),
    "dirichlet, capped": of(dirichlet, num_clients=5, alpha=0.3, capped=True),
    "dirichlet, a minimum": of(dirichlet, num_clients=5, alpha=0.3, min_per_class=1),
    "dirichlet_sizes": of(dirichlet_sizes, sizes=[90, 20, 90], alpha=0.3),
    "disjoint_classes": of(disjoint_classes, num_clients=4),
    "disjoint_classes, the rest last": of(disjoint_classes, num_clients=5, rest_last=True),
    "iid": of(iid, num_clients=7),
    "pathological": of(pathological, num_clients=9, classes_per_client=2),
    "study_quiz_split": of(study_quiz_split, quiz_size=16),
    "dirichlet_overlapping": of(dirichlet_overlapping, num_clients=4, alpha=0.3, size=90),
}


def made(name: str, labels: object = LABELS, seed: object = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed) if not isinstance(seed, torch.Generator) else seed
    clients = ALL[name](labels, generator)
    assert all(client.dtype == np.int64 for client in clients)
    return [client.tolist() for client in clients]


def test_every_public_partition_is_in_the_table() -> None:
    returned = {
        name: inspect.signature(getattr(data, name), eval_str=True).return_annotation
        for name in data.__all__
    }
    lists = {n for n, r in returned.items() if isinstance(r, GenericAlias) and r.__origin__ is list}
    assert lists == {label.split(",")[0] for label in ALL} - {"study_quiz_split"}  # has two parts


@pytest.mark.parametrize("name", ALL)
def test_positions_are_ascending_and_of_one_owner_and_follow_from_the_seed(name: str) -> None:
    for seed in range(5):
        clients = made(name, seed=seed)
        assert all(sorted({*client}) == client for client in clients)
        owned = sorted(place for client in clients for place in client)
        assert owned == [*range(len(LABELS))] or name == "dirichlet_overlapping"
        assert clients == made(name, seed=seed)
    assert (clients == made(name)) == (name == "by_domain"), "another seed, another partition"


@pytest.mark.parametrize("name", sorted(ALL.keys() - {"by_domain"}))
def test_a_torch_generator_seeds_a_numpy_generator_with_four_words(name: str) -> None:
    """The expected words are computed with Python integers, the low 32 bits first."""
    generator, twin = (torch.Generator().manual_seed(3) for _ in range(2))
    for _ in range(2):  # the second call continues the stream
        drawn = torch.randint(-(2**63), 2**63 - 1, (4,), generator=twin)  # the 64 bits, minus 2^63
        words = [word + 2**63 for word in drawn.tolist()]
        seed = [part for word in words for part in (word % 2**32, word // 2**32)]
        assert made(name, seed=generator) == made(name, seed=seed) != made(name, seed=3)
    assert torch.equal(generator.get_state(), twin.get_state())


@pytest.mark.unhooked  # beartype draws from `random`
@pytest.mark.parametrize("name", ALL)
def test_global_random_state_is_unchanged(name: str) -> None:
    def state() -> list[object]:
        numpy_state = np.random.get_state()[1].tolist()  # noqa: NPY002
        return [random.getstate(), numpy_state, torch.get_rng_state().tolist()]

    before = state()
    made(name)
    assert state() == before


@pytest.mark.parametrize("name", ALL)
def test_labels_can_have_any_container_and_gaps_and_are_not_mutated(name: str) -> None:
    numbers = np.array(LABELS)
    containers = [tuple(LABELS), numbers.astype(np.uint8), numbers, list(numbers)]
    for labels in (*containers, torch.tensor(LABELS, dtype=torch.int32), torch.tensor(LABELS)):
        assert made(name, labels) == made(name), type(labels)
        assert [int(label) for label in labels] == LABELS
    if name not in ("allocate", "by_domain"):
        assert made(name, [10**9 * label for label in LABELS]) == made(name)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 300), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_iid_parts_are_equal_in_size(num_samples: int, num_clients: int, seed: int) -> None:
    num_clients = min(num_clients, num_samples)
    clients = iid([0] * num_samples, num_clients=num_clients, generator=np.random.default_rng(seed))
    sizes = [len(client) for client in clients]
    assert len(sizes) == num_clients
    assert max(sizes) - min(sizes) <= 1
    assert sorted(np.concatenate(clients)) == [*range(num_samples)]


def test_dirichlet_draws_again_until_min_size_is_reached() -> None:
    def smallest(min_size: int) -> int:
        how = [{"min_size": min_size, "generator": np.random.default_rng(k)} for k in range(20)]
        return min(len(own) for each in how for own in dirichlet(LABELS, 5, alpha=0.3, **each))

    assert smallest(0) < 15, "the test is idle unless some first draw falls short"
    assert smallest(15) >= 15
    how = {"alpha": 0.3, "min_size": len(LABELS), "generator": np.random.default_rng(0)}
    assert len(dirichlet(LABELS, 1, **how)[0]) == len(LABELS), "exactly min_size is enough"


def statistics(counts: np.ndarray) -> list[float]:
    """Return the effective number of classes of a client, and the spread of the sizes."""
    mix = counts / counts.sum(1, keepdims=True).clip(1)
    entropy = -(mix * np.log(mix.clip(1e-30))).sum(1)
    return [np.exp(entropy).mean(), counts.sum(1).std() / counts.sum(1).mean()]


def test_the_cap_is_that_of_the_benchmarks() -> None:
    """Ten classes over 20 clients at alpha .1, as CIFAR-10 in FedL2G; means of 50 draws."""
    labels, draw = np.arange(2000) % 10, np.random.default_rng(0)
    found: dict[bool, list[list[float]]] = {True: [], False: []}
    for capped in 50 * [True, False]:
        how = {"alpha": 0.1, "capped": capped, "min_size": 0, "generator": draw}
        counts = np.array(class_counts(labels, dirichlet(labels, 20, **how), 10))
        before = np.cumsum(counts, axis=1)[:, :-1]
        assert (not counts[:, 1:][before >= 100].any()) or not capped
        found[capped].append(statistics(counts))
    wanted = [statistics(capped_dirichlet([200] * 10, 20, 0.1, draw)) for _ in range(50)]
    error = np.sqrt((np.var(wanted, 0) + np.var(found[True], 0)) / 50)
    assert (np.abs(np.mean(wanted, 0) - np.mean(found[True], 0)) < 5 * error).all()
    assert (np.mean(found[False], 0) - np.mean(wanted, 0) > 7 * error).all()
    few = dirichlet([0, 1, 1, 1], 2, alpha=0.1, capped=True, min_size=0, generator=draw)
    assert sorted(np.concatenate(few)) == [0, 1, 2, 3]  # nobody is at the cap before the first


SVHN = (4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659)


def test_every_client_has_the_minimum_of_fedhpl_of_every_class() -> None:
    """At alpha .1 and half a percent, FedHPL names 27 training images of label 7 (App. C.5.4)."""
    labels, smallest = np.repeat(np.arange(10), SVHN), []
    for seed in range(4):
        how = {"alpha": 0.1, "min_per_class": 0.005, "generator": np.random.default_rng(seed)}
        counts = np.array(class_counts(labels, dirichlet(labels, 5, **how), 10))
        assert (counts >= np.floor(0.005 * np.array(SVHN))).all()
        smallest.append((counts[:, 7] == 27).sum())
    assert min(smallest) > 0
    assert max(smallest) == 4  # "across 4 clients"
    labels, how = np.arange(50_000) % 10, {"alpha": 0.1, "generator": np.random.default_rng(0)}
    for client in dirichlet_overlapping(labels, 5, size=2000, min_per_class=0.01, **how):
        counts = np.bincount(labels[client])  # a percent of the 5000 images of a class of CIFAR-10
        assert (counts.min(), counts.sum()) == (50, 2000)
    every = dirichlet_overlapping([0, 0, 1, 1], 2, size=4, min_per_class=2, **how)
    assert [client.tolist() for client in every] == [[0, 1, 2, 3]] * 2


def test_clients_have_given_sizes_and_random_mixes() -> None:
    """The proportions of the first of many clients are Dirichlet, as without disjoint clients."""
    labels, draw = np.arange(1500) % 3, np.random.default_rng(0)
    parts = [dirichlet_sizes(labels, [300, 5], alpha=0.5, generator=draw) for _ in range(200)]
    mix = np.array([class_counts(labels, part, 3)[0] for part in parts]) / 300
    np.testing.assert_allclose(mix.mean(0), 1 / 3, atol=5 * np.sqrt(2 / 9 / 2.5 / 200))
    np.testing.assert_allclose(mix.var(0), 2 / 9 / 2.5, rtol=0.2)
    assert all(len(set(np.concatenate(part))) == 305 for part in parts)
    sizes = [dirichlet([7] * 300, 4, alpha=2.0, min_size=0, generator=draw) for _ in range(300)]
    shares = np.array([[len(client) for client in part] for part in sizes]) / 300
    np.testing.assert_allclose(shares.var(0), (1 / 4) * (3 / 4) / (4 * 2 + 1), rtol=0.2)


def test_pathological_gives_every_client_and_every_class_the_same_number() -> None:
    # 6 classes, 9 clients of 2 classes: every class has 2 * 9 / 6 = 3 owners.
    held = [{LABELS[place] for place in client} for client in made("pathological")]
    assert [len(mine) for mine in held] == [2] * 9
    assert [sum(label in mine for mine in held) for label in range(6)] == [3] * 6


def test_a_class_has_one_client_and_the_numbers_of_classes_are_those_of_the_rule() -> None:
    """Six classes for four clients, and for five, of which the last has the rest."""
    for name, numbers in {"": [2, 2, 1, 1], ", the rest last": [1, 1, 1, 1, 2]}.items():
        clients = made(f"disjoint_classes{name}")
        held = [{LABELS[place] for place in client} for client in clients]
        assert [len(mine) for mine in held] == numbers
        assert len(set.union(*held)) == sum(numbers)


# Clients that may share samples.


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=8).filter(any),
    st.floats(1e-6, 1e6),
    st.integers(0, 2**32 - 1),
    st.data(),
)
def test_every_client_has_exactly_its_size_of_distinct_samples(
    class_sizes: list[int], alpha: float, seed: int, data: st.DataObject
) -> None:
    labels = np.repeat(np.arange(len(class_sizes)), class_sizes)
    size, generator = data.draw(st.integers(1, len(labels))), np.random.default_rng(seed)
    clients = dirichlet_overlapping(labels, 3, alpha=alpha, size=size, generator=generator)
    assert [len(set(client.tolist())) for client in clients] == [size] * 3
    assert all(set(client.tolist()) <= set(range(len(labels))) for client in clients)


def test_class_proportions_are_dirichlet_for_any_class_sizes() -> None:
    # No client needs more than 300 of a class, so none is exhausted. Proportions have mean 1/3 and
    # variance (1/3)(2/3) / (3 alpha + 1); over 2000 clients the mean is known to 5 sqrt(variance /
    # 2000) = .033, the variance to 10 %.
    labels = np.repeat([0, 1, 2], [1300, 320, 600])
    how = {"alpha": 0.5, "size": 300, "generator": np.random.default_rng(0)}
    clients = dirichlet_overlapping(labels, 2000, **how)
    mix = np.array(class_counts(labels, clients, 3)) / 300
    np.testing.assert_allclose(mix.mean(axis=0), 1 / 3, rtol=0, atol=0.033)
    np.testing.assert_allclose(mix.var(axis=0), (2 / 9) / (3 * 0.5 + 1), rtol=0.1)


@pytest.mark.parametrize(
    ("sizes", "alpha", "size", "expected"),
    [
        # At alpha 1e12 every client asks for 15 of each of four classes. The last have 5 and 1. The
        # missing 24 come from the others, 12 each.
        ([100, 100, 5, 1], 1e12, 60, {(27, 27, 5, 1)}),
        # At alpha 1e-300 one class has the share 1 and the others exactly 0. The missing 4, 8 or 12
        # come from the other classes in proportion to their sizes: 2.67 and 1.33, 6 and 2, 7.2 and
        # 4.8.
        ([12, 8, 4], 1e-300, 16, {(12, 3, 1), (6, 8, 2), (7, 5, 4)}),
    ],
)
def test_an_exhausted_class_gives_all_samples_and_the_others_fill(
    sizes: list[int], alpha: float, size: int, expected: set[tuple[int, ...]]
) -> None:
    labels = np.repeat(range(len(sizes)), sizes)
    how = {"alpha": alpha, "size": size, "generator": np.random.default_rng(0)}
    clients = dirichlet_overlapping(labels, 20, **how)
    assert {*map(tuple, class_counts(labels, clients, len(sizes)))} == expected


# Domains.


def domains(*given: object, **options: object) -> list[list[int]]:
    draw = np.random.default_rng(options.pop("seed", 0))
    return [client.tolist() for client in by_domain(*given, generator=draw, **options)]


def test_domains_become_clients_in_sorted_order() -> None:
    for names in (NAMES[:6], np.array(NAMES[:6])):
        assert domains(names) == [[1, 3, 5], [2], [0, 4]]
    # 10 comes after 9 as a number, and before 9 as a string.
    assert domains([10, 9, 10]) == domains(torch.tensor([10, -9, 10])) == [[1], [0, 2]]
    assert domains(["10", "9", "10"]) == [[0, 2], [1]]


def test_domains_are_split_over_several_clients() -> None:
    """Clients follow the sorted domains, and the parts of a domain have equal sizes."""
    clients = domains(NAMES, 6, seed=5)
    assert [{NAMES[place] for place in client} for client in clients] == [
        {name} for name in sorted(set(NAMES)) for _ in range(2)
    ]
    assert [len(client) for client in clients] == [3, 2, 1, 1, 2, 1]
    assert {place for seed in range(9) for place in domains(NAMES, 6, seed=seed)[0]} == {
        *(1, 3, 5, 6, 9)
    }
    assert domains(NAMES, 3) == domains(NAMES)


def test_domains_of_two_sets_have_the_same_clients() -> None:
    """Nobody has test samples of art; unsorted and repeated domains are allowed."""
    assert domains(["sketch", "photo"], all_domains=NAMES) == [[], [1], [0]]
    two = domains(["sketch"] * 3, 6, all_domains=NAMES[::-1])
    assert [len(client) for client in two] == [0, 0, 0, 0, 2, 1]
