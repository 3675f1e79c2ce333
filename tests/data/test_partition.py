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
    iid,
    iid_shares,
    pathological,
    study_quiz_split,
)
from references.partition import capped_dirichlet, class_counts
from refusals import refused

LABELS = (
    np.random.default_rng(7).permutation(np.repeat(np.arange(6), [40, 31, 52, 8, 27, 42])).tolist()
)


def of(partition: Callable, **options: object) -> Callable:
    return lambda labels, generator: partition(labels, generator=generator, **options)


# Partition functions of labels and a generator in which each sample has exactly one owner.
DISJOINT: dict[str, Callable] = {
    "allocate": of(allocate, shares=iid_shares(4, 6)),
    "by_domain": lambda labels, generator: by_domain(labels),
    "by_domain, two clients each": of(by_domain, num_clients=12),
    "dirichlet": of(dirichlet, num_clients=5, alpha=0.3),
    "dirichlet, capped": of(dirichlet, num_clients=5, alpha=0.3, capped=True),
    "dirichlet, a minimum": of(dirichlet, num_clients=5, alpha=0.3, min_per_class=1),
    "dirichlet_sizes": of(dirichlet_sizes, sizes=[90, 20, 90], alpha=0.3),
    "iid": of(iid, num_clients=7),
    "pathological": of(pathological, num_clients=9, classes_per_client=2),
    "study_quiz_split": of(study_quiz_split, quiz_size=16),
}
ALL = DISJOINT | {
    "dirichlet_overlapping": of(dirichlet_overlapping, num_clients=4, alpha=0.3, size=90)
}
DOMAINS = ("by_domain", "by_domain, two clients each")


def same(left: list[np.ndarray], right: list[np.ndarray]) -> bool:
    return len(left) == len(right) and all(
        np.array_equal(mine, yours) for mine, yours in zip(left, right, strict=True)
    )


def test_every_public_partition_is_in_the_table() -> None:
    found = set()
    for name in data.__all__:
        returned = inspect.signature(getattr(data, name)).return_annotation
        if isinstance(returned, GenericAlias) and returned.__origin__ is list:
            found.add(name)
    assert found == {label.split(",")[0] for label in ALL} - {"study_quiz_split"}  # has two parts


@pytest.mark.parametrize("name", ALL)
def test_indices_are_int64_ascending_and_distinct(name: str) -> None:
    for client in ALL[name](LABELS, np.random.default_rng(0)):
        assert client.dtype == np.int64
        assert (np.diff(client) > 0).all()


@pytest.mark.parametrize("name", DISJOINT)
def test_every_sample_has_exactly_one_owner(name: str) -> None:
    for seed in range(5):
        owned = np.concatenate(DISJOINT[name](LABELS, np.random.default_rng(seed)))
        np.testing.assert_array_equal(np.sort(owned), np.arange(len(LABELS)))


@pytest.mark.parametrize("name", ALL)
def test_equal_seeds_give_equal_partitions(name: str) -> None:
    first, again, other = (ALL[name](LABELS, np.random.default_rng(seed)) for seed in (0, 0, 1))
    assert same(first, again)
    assert same(first, other) == (name == "by_domain"), "another seed must give another partition"


@pytest.mark.parametrize("name", sorted(ALL.keys() - {"by_domain"}))
def test_a_torch_generator_seeds_a_numpy_generator_with_four_words(name: str) -> None:
    """The expected words are computed with Python integers, the low 32 bits first."""
    generator, twin = (torch.Generator().manual_seed(3) for _ in range(2))
    for _ in range(2):  # the second call continues the stream
        drawn = torch.randint(-(2**63), 2**63 - 1, (4,), generator=twin)  # the 64 bits, minus 2^63
        words = [word + 2**63 for word in drawn.tolist()]
        seed = [part for word in words for part in (word % 2**32, word // 2**32)]
        expected = ALL[name](LABELS, np.random.default_rng(seed))
        assert same(ALL[name](LABELS, generator), expected)
    assert torch.equal(generator.get_state(), twin.get_state())
    assert not same(expected, ALL[name](LABELS, np.random.default_rng(3)))


@pytest.mark.unhooked  # beartype draws from `random`
@pytest.mark.parametrize("name", ALL)
def test_global_random_state_is_unchanged(name: str) -> None:
    numpy_state = np.random.get_state()[1].tolist()  # noqa: NPY002
    before = random.getstate(), numpy_state, torch.get_rng_state()
    ALL[name](LABELS, np.random.default_rng(0))
    numpy_state = np.random.get_state()[1].tolist()  # noqa: NPY002
    after = random.getstate(), numpy_state, torch.get_rng_state()
    assert before[:2] == after[:2]
    assert torch.equal(before[2], after[2])


@pytest.mark.parametrize("name", ALL)
def test_labels_can_have_any_container_and_are_not_mutated(name: str) -> None:
    expected = ALL[name](LABELS, np.random.default_rng(0))
    containers = [
        tuple(LABELS),
        np.array(LABELS, dtype=np.uint8),
        np.array(LABELS, dtype=np.int64),
        torch.tensor(LABELS, dtype=torch.int32),
        torch.tensor(LABELS),
        list(np.array(LABELS)),
    ]
    for labels in containers:
        assert same(ALL[name](labels, np.random.default_rng(0)), expected), type(labels)
        assert [int(label) for label in labels] == LABELS


@pytest.mark.parametrize("name", sorted(ALL.keys() - {"allocate", "by_domain"}))
def test_gaps_in_the_labels_cost_and_change_nothing(name: str) -> None:
    gaps = [10**9 * label for label in LABELS]
    same_seed = (ALL[name](labels, np.random.default_rng(0)) for labels in (LABELS, gaps))
    assert same(*same_seed)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 300), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_iid_parts_are_equal_in_size(num_samples: int, num_clients: int, seed: int) -> None:
    num_clients = min(num_clients, num_samples)
    clients = iid([0] * num_samples, num_clients=num_clients, generator=np.random.default_rng(seed))
    sizes = sorted(len(client) for client in clients)
    assert len(sizes) == num_clients
    assert sizes[-1] - sizes[0] <= 1
    np.testing.assert_array_equal(np.sort(np.concatenate(clients)), np.arange(num_samples))


def test_dirichlet_draws_again_until_min_size_is_reached() -> None:
    def smallest(min_size: int) -> int:
        how = [{"min_size": min_size, "generator": np.random.default_rng(k)} for k in range(20)]
        return min(len(own) for each in how for own in dirichlet(LABELS, 5, alpha=0.3, **each))

    assert smallest(0) < 15, "the test is idle unless some first draw falls short"
    assert smallest(15) >= 15
    only = dirichlet(
        LABELS, num_clients=1, alpha=0.3, min_size=len(LABELS), generator=np.random.default_rng(0)
    )
    assert same(only, [np.arange(len(LABELS))]), "exactly min_size is enough"


def test_dirichlet_names_the_clients_without_samples() -> None:
    # Two classes at alpha 1e-6 have one owner each.
    labels = [0] * 50 + [1] * 50
    options = {"num_clients": 4, "alpha": 1e-6}
    allowed = dirichlet(labels, min_size=0, generator=np.random.default_rng(0), **options)
    empty = [str(client) for client, own in enumerate(allowed) if len(own) == 0]
    with pytest.raises(
        ValueError,
        match="`min_size` must be 0 to allow empty clients, or in `dirichlet` at least 1 to draw "
        f"again; got None, and {len(empty)} of 4 clients have no samples: {', '.join(empty)}",
    ):
        dirichlet(labels, generator=np.random.default_rng(0), **options)
    few = {"alpha": 0.3, "num_clients": 40}
    with pytest.raises(ValueError, match=r"clients have no samples: (\d+, ){10}\.\.\.\.$"):
        dirichlet(labels[45:55], generator=np.random.default_rng(0), **few)


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
    labels = np.repeat(np.arange(10), SVHN)
    smallest = []
    for seed in range(4):
        how = {"alpha": 0.1, "min_per_class": 0.005, "generator": np.random.default_rng(seed)}
        counts = np.array(class_counts(labels, dirichlet(labels, 5, **how), 10))
        assert (counts >= np.floor(0.005 * np.array(SVHN))).all()
        smallest.append((counts[:, 7] == 27).sum())
    assert min(smallest) > 0
    assert max(smallest) == 4  # "across 4 clients"


def test_clients_have_given_sizes_and_random_mixes() -> None:
    """The proportions of the first of many clients are Dirichlet, as without disjoint clients."""
    labels, draw = np.arange(1500) % 3, np.random.default_rng(0)
    parts = [dirichlet_sizes(labels, [300, 5], alpha=0.5, generator=draw) for _ in range(200)]
    mix = np.array([class_counts(labels, part, 3)[0] for part in parts]) / 300
    np.testing.assert_allclose(mix.mean(0), 1 / 3, atol=5 * np.sqrt(2 / 9 / 2.5 / 200))
    np.testing.assert_allclose(mix.var(0), 2 / 9 / 2.5, rtol=0.2)
    assert all(len(set(np.concatenate(part))) == 305 for part in parts)


def test_sizes_have_a_dirichlet_distribution() -> None:
    draw = np.random.default_rng(0)
    parts = [dirichlet([7] * 300, 4, alpha=2.0, min_size=0, generator=draw) for _ in range(300)]
    shares = np.array([[len(client) for client in part] for part in parts]) / 300
    np.testing.assert_allclose(shares.var(0), (1 / 4) * (3 / 4) / (4 * 2 + 1), rtol=0.2)


def test_pathological_gives_every_client_and_every_class_the_same_number() -> None:
    # 6 classes, 9 clients of 2 classes: every class has 2 * 9 / 6 = 3 owners.
    clients = pathological(
        LABELS, num_clients=9, classes_per_client=2, generator=np.random.default_rng(0)
    )
    held = [set(np.array(LABELS)[client].tolist()) for client in clients]
    assert [len(mine) for mine in held] == [2] * 9
    assert [sum(label in mine for mine in held) for label in range(6)] == [3] * 6


def test_domains_become_clients_in_sorted_order() -> None:
    names = ["sketch", "art", "photo", "art", "sketch", "art"]
    expected = [np.array([1, 3, 5]), np.array([2]), np.array([0, 4])]
    assert same(by_domain(names), expected)
    assert same(by_domain(np.array(names)), expected)
    # 10 comes after 9 as a number, and before 9 as a string.
    assert same(by_domain([10, 9, 10]), [np.array([1]), np.array([0, 2])])
    assert same(by_domain(torch.tensor([10, -9, 10])), [np.array([1]), np.array([0, 2])])
    assert same(by_domain(["10", "9", "10"]), [np.array([0, 2]), np.array([1])])


NAMES = ["sketch", "art", "photo", "art", "sketch", "art", "art", "sketch", "photo", "art"]


def test_domains_are_split_over_several_clients() -> None:
    """Clients follow the sorted domains, and the parts of a domain have equal sizes."""
    clients = by_domain(NAMES, 6, generator=np.random.default_rng(5))
    assert [{NAMES[place] for place in client} for client in clients] == [
        {name} for name in sorted(set(NAMES)) for _ in range(2)
    ]
    assert [len(client) for client in clients] == [3, 2, 1, 1, 2, 1]
    draws = [by_domain(NAMES, 6, generator=np.random.default_rng(seed))[0] for seed in range(9)]
    assert {place for draw in draws for place in draw.tolist()} == {1, 3, 5, 6, 9}
    assert same(by_domain(NAMES, 3, generator=np.random.default_rng(0)), by_domain(NAMES))


def test_domains_of_two_sets_have_the_same_clients() -> None:
    """Nobody has test samples of art; unsorted and repeated domains are allowed."""
    assert same(by_domain(["sketch", "photo"], all_domains=NAMES), [[], [1], [0]])
    two = by_domain(["sketch"] * 3, 6, all_domains=NAMES[::-1], generator=np.random.default_rng(0))
    assert [len(client) for client in two] == [0, 0, 0, 0, 2, 1]


BAD_LABELS = [
    ([], ValueError, "`labels` must hold at least one label; got none"),
    ([0, -1, 2], ValueError, "`labels` must be at least 0; got values from -1 to 2"),
    ([0, 1.5], TypeError, r"`labels\[1\]` must be an integer; got 1.5 \(float\)"),
    ([0, True], TypeError, r"`labels\[1\]` must be an integer; got True \(bool\)"),
    (["cat"], TypeError, r"`labels\[0\]` must be an integer; got 'cat' \(str\)"),
    ("012", TypeError, r"`labels` must be an array, a tensor or a sequence; got '012' \(str\)"),
    (3, TypeError, r"`labels` must be an array, a tensor or a sequence; got 3 \(int\)"),
    (np.zeros(3), TypeError, r"`labels\[0\]` must be an integer; got 0.0"),
    (np.zeros(3, dtype=bool), TypeError, r"`labels\[0\]` must be an integer; got False"),
    (np.zeros((3, 1), dtype=int), ValueError, r"`labels` must have shape \(samples,\); got \(3,"),
    (torch.zeros(3), TypeError, r"`labels\[0\]` must be an integer; got 0.0"),
    (torch.tensor(1), ValueError, r"`labels` must have shape \(samples,\); got \(\)"),
]


@pytest.mark.bad_input
@pytest.mark.parametrize("name", sorted(ALL.keys() - {"allocate", *DOMAINS, "study_quiz_split"}))
@pytest.mark.parametrize(("labels", "error", "message"), BAD_LABELS)
def test_bad_labels_are_named(
    name: str, labels: object, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ALL[name](labels, np.random.default_rng(0))


@pytest.mark.bad_input
@pytest.mark.parametrize("name", sorted(ALL.keys() - {"by_domain"}))
@pytest.mark.parametrize("generator", [0, None, np.random.RandomState(0), np.random.PCG64(0)])
def test_anything_but_a_generator_is_refused(name: str, generator: object) -> None:
    with pytest.raises(TypeError, match=r"`generator` must be a torch.Generator or a numpy"):
        ALL[name](LABELS, generator)


DRAW = np.random.default_rng(0)
test_wrong_calls_are_refused_by_name = refused(globals())("""
dirichlet([0] * 50 + [1] * 50, num_clients=3, alpha=1e-06, min_size=1, generator=DRAW) \
-> ValueError: `min_size` must be at most 0, the best minimum in 1000 draws with this `alpha`
dirichlet([0] * 5, num_clients=2, alpha=1.0, min_size=3, generator=DRAW) \
-> ValueError: `min_size` must be at most 2, an equal part of 5 samples; got 3
by_domain(NAMES, 0, generator=DRAW) -> ValueError: `num_clients` must be at least 1; got 0
by_domain(NAMES, 4, generator=DRAW) -> ValueError: `num_clients` must be a multiple of 3, the number
by_domain(NAMES, 9, generator=DRAW) -> ValueError: `num_clients` must be at most 6, because a domain
by_domain(NAMES, 6, generator=None) -> TypeError: `generator` must be a torch.Generator or a numpy
iid(LABELS, num_clients=0, generator=DRAW) -> ValueError: `num_clients` must be at least 1; got 0
iid(LABELS, num_clients=201, generator=DRAW) -> ValueError: `num_clients` must be at most 200, the
pathological(LABELS, num_clients=60, generator=DRAW, classes_per_client=1) \
-> ValueError: `min_size` must be 0 to allow empty clients,
dirichlet(LABELS, num_clients=0, generator=DRAW, alpha=1.0) -> ValueError: `num_clients` must be at
dirichlet(LABELS, num_clients=4, generator=DRAW, alpha=-1.0) -> ValueError: `alpha` must be above 0;
dirichlet(LABELS, num_clients=4, generator=DRAW, alpha=1.0, min_size=-1) \
-> ValueError: `min_size` must be at least 0; got -1
pathological(LABELS, num_clients=4, generator=DRAW, classes_per_client=2) \
-> ValueError: `classes_per_client` must be a multiple of 3 up to 6
by_domain(['x'], all_domains=NAMES) -> ValueError: `domains` must be among `all_domains`; got 'x'
by_domain(['art'], all_domains=[]) -> ValueError: `all_domains` must hold at least one domain; got
by_domain(['art'], all_domains=['art', 3]) -> TypeError: `all_domains[1]` must be a string or an
dirichlet([0] * 9 + [1], 2, alpha=1.0, min_per_class=1, generator=DRAW) \
-> ValueError: `min_per_class` must be small enough for 2 clients and 1 samples of a class; got 1
dirichlet([0] * 9, 2, alpha=1.0, min_per_class=0.6, generator=DRAW) -> ValueError: `min_per_class`
dirichlet(LABELS, 2, alpha=[0.1, 0.2], generator=DRAW) -> ValueError: `alpha` must be a number, or
dirichlet(LABELS, 2, alpha=[[0.1], [0.0]], generator=DRAW) -> ValueError: `alpha` must be above 0
dirichlet(LABELS, 2, alpha=[[1.0, 2.0], [1.0]], generator=DRAW) -> ValueError: `alpha` must be a
dirichlet(LABELS, 2, alpha=np.ones(3, bool), generator=DRAW) -> TypeError: `alpha` must be a number
dirichlet(LABELS, 2, alpha=1.0, capped=1, generator=DRAW) -> TypeError: `capped` must be True or
dirichlet_sizes(LABELS, [2**70], alpha=1.0, generator=DRAW) -> ValueError: `sizes` must be at least
dirichlet_sizes(LABELS, [0, 3], alpha=1.0, generator=DRAW) -> ValueError: got a minimum of 0, a sum
dirichlet_sizes(LABELS, [], alpha=1.0, generator=DRAW) -> ValueError: `sizes` must have the size of
dirichlet(LABELS, 2, alpha=1.0, min_per_class=-1, generator=DRAW) -> ValueError: `min_per_class` mus
by_domain([1, True], all_domains=[1, 2]) -> TypeError: `domains[1]` must be a string or an integer
by_domain(['art', 3]) -> TypeError: `domains[1]` must be a string or an integer, like all entries
by_domain('art') -> TypeError: `domains` must be an array, a tensor or a sequence; got 'art'
by_domain(np.zeros((2, 2), dtype=int)) -> ValueError: `domains` must have shape (samples,); got (2
""")
