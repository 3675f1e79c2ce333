"""Shares of the classes among the clients, and whole samples that follow from them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedprompt.data import allocate, class_shares, dirichlet_shares, iid_shares, pathological_shares
from fedprompt.data._counts import client_counts
from references.partition import class_counts, is_fair_picking, largest_remainders, least


def seeded(seed: int = 0) -> dict[str, np.random.Generator]:
    return {"generator": np.random.default_rng(seed)}


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**32 - 1), st.data())
def test_pathological_shares_have_the_documented_properties(
    classes: int, clients: int, seed: int, data: st.DataObject
) -> None:
    fitting = [s for s in range(1, classes + 1) if s * clients % classes == 0]
    each = data.draw(st.sampled_from(fitting))
    shares = pathological_shares(clients, classes, classes_per_client=each, **seeded(seed))
    slots = each * clients // classes
    assert shares.shape == (clients, classes)
    assert (np.count_nonzero(shares, axis=1) == each).all()
    assert (np.count_nonzero(shares, axis=0) == slots).all()
    np.testing.assert_allclose(shares.sum(axis=0), 1, rtol=0, atol=1e-12)
    assert is_fair_picking([np.flatnonzero(row).tolist() for row in shares], classes, slots)
    # Portions from U(.4, .6): none is more than 1.5 times another of its class.
    smallest = np.where(shares > 0, shares, np.inf).min(axis=0)
    assert (shares.max(axis=0) <= 1.5 * smallest + 1e-12).all()


def test_iid_shares_are_equal() -> None:
    np.testing.assert_array_equal(iid_shares(4, 3), [[0.25, 0.25, 0.25]] * 4)


@pytest.mark.parametrize("minimum", [0.01, 0.1, 0.19, 0.2])
def test_small_shares_are_raised_and_the_others_keep_their_ratios(minimum: float) -> None:
    drawn, raised = (
        dirichlet_shares(5, 40, alpha=0.3, min_per_class=each, **seeded()) for each in (0, minimum)
    )
    wanted = np.stack([least(column, minimum) for column in drawn.T], axis=1)
    np.testing.assert_allclose(raised, wanted, rtol=0, atol=1e-12)


def test_each_client_and_class_can_have_its_concentration() -> None:
    # Shares have mean alpha / total, .1 and .9 for even classes, .5 and .5 for odd ones.
    alpha = np.array([[0.2, 3.0], [1.8, 3.0]]).repeat(3000, axis=1)
    shares = dirichlet_shares(2, 6000, alpha=alpha, **seeded())
    np.testing.assert_allclose(shares[0, :3000].mean(), 0.1, atol=0.02)
    np.testing.assert_allclose(shares[0, :3000].var(), 0.1 * 0.9 / 3, rtol=0.15)
    np.testing.assert_allclose(shares[0, 3000:].var(), 0.25 / 7, rtol=0.15)


def test_shares_of_a_partition_give_it_again() -> None:
    labels = np.arange(60) % 5
    shares = dirichlet_shares(3, 6, alpha=0.5, **seeded())  # the last class has no samples
    clients = allocate(labels, 0.8 * shares, min_size=0, **seeded(1))
    again = allocate(labels, class_shares(labels, clients, 6), min_size=0, **seeded(2))
    assert class_counts(labels, again, 6) == class_counts(labels, clients, 6)


@st.composite
def weighted_classes(draw: st.DrawFn) -> tuple[list[list[int]], list[int]]:
    """Draw integer weights (classes, clients + 1), the last unassigned, and class sizes."""
    num_clients, num_classes = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    column = st.lists(st.integers(0, 9), min_size=num_clients + 1, max_size=num_clients + 1)
    exactly = {"min_size": num_classes, "max_size": num_classes}
    weights = draw(st.lists(column.filter(any), **exactly))
    return weights, draw(st.lists(st.integers(0, 30), **exactly).filter(any))


@settings(max_examples=60, deadline=None)
@given(weighted_classes(), st.integers(0, 2**32 - 1))
def test_allocation_follows_the_largest_remainders(
    problem: tuple[list[list[int]], list[int]], seed: int
) -> None:
    weights, sizes = problem
    generator = np.random.default_rng(seed)
    labels = generator.permutation(np.repeat(np.arange(len(sizes)), sizes)).tolist()
    shares = np.array([[weight / sum(column) for weight in column[:-1]] for column in weights]).T
    clients = allocate(labels, shares, min_size=0, generator=generator)
    assert len(clients) == len(shares)
    everything = np.concatenate(clients)
    assert len(set(everything.tolist())) == len(everything), "clients must be disjoint"
    unassigned = np.setdiff1d(np.arange(len(labels)), everything)
    counts = class_counts(labels, [*clients, unassigned], len(sizes))
    for label, (column, size) in enumerate(zip(weights, sizes, strict=True)):
        for holder, allowed in enumerate(largest_remainders(column, size)):
            assert counts[holder][label] in allowed


def test_ties_and_samples_are_drawn_at_random() -> None:
    """Bounds are five standard deviations of a binomial."""
    # 1000 classes of four samples over three clients: each gets one of every class, and the fourth
    # goes to a client at random.
    clients = allocate(np.arange(4000) % 1000, iid_shares(3, 1000), **seeded())
    np.testing.assert_allclose([len(client) for client in clients], 1333.3, rtol=0, atol=75)
    # Client 0 gets 5 of 20 samples: each of them with probability 1/4.
    shares = np.array([[0.25], [0.75]])
    drawn = [allocate([0] * 20, shares, **seeded(seed))[0] for seed in range(800)]
    found = np.bincount(np.concatenate(drawn), minlength=20)
    np.testing.assert_allclose(found, 200, rtol=0, atol=61)
    # The first client picks one of five classes.
    picks = [pathological_shares(5, 5, classes_per_client=1, **seeded(k))[0] for k in range(2000)]
    found = np.bincount(np.argmax(picks, axis=1), minlength=5)
    np.testing.assert_allclose(found, 400, rtol=0, atol=89)


def test_a_class_can_have_no_samples_or_no_owner() -> None:
    shares = np.array([[0.5, 1.0, 0.0], [0.5, 0.0, 0.0]])
    clients = allocate([0, 0, 2, 2, 2], shares, **seeded())
    assert sorted(np.concatenate(clients).tolist()) == [0, 1]
    assert [len(client) for client in clients] == [1, 1]


def test_shares_that_sum_to_one_up_to_rounding_are_divided_by_their_sum() -> None:
    """A class has so many samples that the excess is a whole one."""
    shares, sizes = np.full((2, 1), 0.5 * (1 + 9e-7)), np.array([2**30])
    counts = client_counts(sizes, shares, np.random.default_rng(0))
    assert counts[:, 0].tolist() == [2**29, 2**29, 0]


def test_min_size_holds() -> None:
    clients = allocate([0] * 8, np.array([[0.75], [0.25]]), min_size=2, **seeded())
    assert [len(client) for client in clients] == [6, 2]
