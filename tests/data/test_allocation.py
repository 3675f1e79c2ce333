"""Allocation: from shares to whole samples."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedprompt.data import allocate, iid_shares
from fedprompt.data._counts import client_counts
from references.partition import class_counts, largest_remainders
from refusals import refused


@st.composite
def weighted_classes(draw: st.DrawFn) -> tuple[list[list[int]], list[int]]:
    """Draw integer weights (classes, clients + 1), the last unassigned, and class sizes."""
    num_clients, num_classes = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    columns = st.lists(
        st.integers(0, 9), min_size=num_clients + 1, max_size=num_clients + 1
    ).filter(any)
    weights = draw(st.lists(columns, min_size=num_classes, max_size=num_classes))
    sizes = draw(
        st.lists(st.integers(0, 30), min_size=num_classes, max_size=num_classes).filter(any)
    )
    return weights, sizes


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


def test_remainders_that_tie_are_assigned_at_random() -> None:
    # 1000 classes of four samples over three clients: each gets one of every class, and the fourth
    # goes to a client at random. So a client gets 1000 + 1000 / 3 samples, within 5 sqrt(1000 * 2 /
    # 9) = 75.
    clients = allocate(
        np.arange(4000) % 1000, iid_shares(3, 1000), generator=np.random.default_rng(0)
    )
    np.testing.assert_allclose([len(client) for client in clients], 1333.3, rtol=0, atol=75)


def test_each_sample_of_a_class_is_drawn_equally_often() -> None:
    # Client 0 gets 5 of 20 samples: each of them with probability 1/4, over 800 draws 200 times,
    # within 5 sqrt(800 * 3 / 16) = 61.
    shares = np.array([[0.25], [0.75]])
    drawn = [
        allocate([0] * 20, shares, generator=np.random.default_rng(seed))[0] for seed in range(800)
    ]
    np.testing.assert_allclose(
        np.bincount(np.concatenate(drawn), minlength=20), 200, rtol=0, atol=61
    )


def test_a_class_can_have_no_samples_or_no_owner() -> None:
    shares = np.array([[0.5, 1.0, 0.0], [0.5, 0.0, 0.0]])
    clients = allocate([0, 0, 2, 2, 2], shares, generator=np.random.default_rng(0))
    assert sorted(np.concatenate(clients).tolist()) == [0, 1]
    assert [len(client) for client in clients] == [1, 1]


def test_shares_that_sum_to_one_up_to_rounding_are_divided_by_their_sum() -> None:
    """A class has so many samples that the excess is a whole one."""
    shares, sizes = np.full((2, 1), 0.5 * (1 + 9e-7)), np.array([2**30])
    counts = client_counts(sizes, shares, np.random.default_rng(0))
    assert counts[:, 0].tolist() == [2**29, 2**29, 0]


def test_min_size_holds_or_is_refused() -> None:
    shares = np.array([[0.75], [0.25]])
    clients = allocate([0] * 8, shares, min_size=2, generator=np.random.default_rng(0))
    assert [len(client) for client in clients] == [6, 2]
    with pytest.raises(ValueError, match=r"`min_size` must be at most 2, the size of .*; got 3"):
        allocate([0] * 8, shares, min_size=3, generator=np.random.default_rng(0))


DRAW = np.random.default_rng(0)
test_wrong_calls_are_refused_by_name = refused(globals())("""
allocate([], np.full((2, 2), 0.5), generator=DRAW) -> ValueError: `labels` must hold at least one
allocate([0, 2], np.full((2, 2), 0.5), generator=DRAW) -> ValueError: `labels` must lie in [0, 2);
allocate([0, 1], [[1.0, 1.0]], generator=DRAW) -> TypeError: `shares` must be a floating-point array
allocate([0, 1], np.ones(2), generator=DRAW) -> ValueError: `shares` must have shape (clients,
allocate([0, 1], np.array([[0.5, -0.25]]), generator=DRAW) -> ValueError: `shares` must be finite
allocate([0, 1], np.array([[0.5, 0.75], [0.5, 0.5]]), generator=DRAW) \
-> ValueError: `shares` must sum to at most 1 in every column; got 1.25 for class 1
allocate([0, 1], np.eye(2)[:, ::-1] * [[1.0], [0.0]], generator=DRAW) \
-> ValueError: `min_size` must be 0 to allow empty clients,
allocate([0, 1], np.full((2, 2), 0.5), generator=DRAW, min_size=-1) \
-> ValueError: `min_size` must be at least 0; got -1
allocate([0, 1], np.full((2, 2), 0.5), generator=0) -> TypeError: `generator` must be a
""")
