"""Shares of the classes among the clients."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedprompt.data import allocate, class_shares, dirichlet_shares, iid_shares, pathological_shares
from references.partition import class_counts, is_fair_picking, least
from refusals import refused


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**32 - 1), st.data())
def test_pathological_shares_have_the_documented_properties(
    num_classes: int, num_clients: int, seed: int, data: st.DataObject
) -> None:
    fitting = [s for s in range(1, num_classes + 1) if s * num_clients % num_classes == 0]
    classes_per_client = data.draw(st.sampled_from(fitting))
    shares = pathological_shares(
        num_clients,
        num_classes,
        classes_per_client=classes_per_client,
        generator=np.random.default_rng(seed),
    )
    slots = classes_per_client * num_clients // num_classes
    assert shares.shape == (num_clients, num_classes)
    assert (np.count_nonzero(shares, axis=1) == classes_per_client).all()
    assert (np.count_nonzero(shares, axis=0) == slots).all()
    np.testing.assert_allclose(shares.sum(axis=0), 1, rtol=0, atol=1e-12)
    assert is_fair_picking([np.flatnonzero(row).tolist() for row in shares], num_classes, slots)
    # Portions from U(.4, .6): none is more than 1.5 times another of its class.
    smallest = np.where(shares > 0, shares, np.inf).min(axis=0)
    assert (shares.max(axis=0) <= 1.5 * smallest + 1e-12).all()


def test_pathological_ties_are_broken_at_random() -> None:
    # The first client picks one of five classes: 2000 / 5 = 400 times each, within 5 sqrt(2000 * .2
    # * .8) = 89.
    picks = [
        pathological_shares(5, 5, classes_per_client=1, generator=np.random.default_rng(seed))[
            0
        ].argmax()
        for seed in range(2000)
    ]
    np.testing.assert_allclose(np.bincount(picks, minlength=5), 400, rtol=0, atol=89)


def test_iid_shares_are_equal() -> None:
    np.testing.assert_array_equal(iid_shares(4, 3), [[0.25, 0.25, 0.25]] * 4)


@pytest.mark.parametrize("minimum", [0.01, 0.1, 0.19, 0.2])
def test_small_shares_are_raised_and_the_others_keep_their_ratios(minimum: float) -> None:
    drawn, raised = (
        dirichlet_shares(
            5, 40, alpha=0.3, min_per_class=least_share, generator=np.random.default_rng(0)
        )
        for least_share in (0.0, minimum)
    )
    wanted = np.stack([least(column, minimum) for column in drawn.T], axis=1)
    np.testing.assert_allclose(raised, wanted, rtol=0, atol=1e-12)


def test_each_client_and_class_can_have_its_concentration() -> None:
    # Shares have mean alpha / total, .1 and .9 for even classes, .5 and .5 for odd ones.
    alpha = np.array([[0.2, 3.0], [1.8, 3.0]]).repeat(3000, axis=1)
    shares = dirichlet_shares(2, 6000, alpha=alpha, generator=np.random.default_rng(0))
    np.testing.assert_allclose(shares[0, :3000].mean(), 0.1, atol=0.02)
    np.testing.assert_allclose(shares[0, :3000].var(), 0.1 * 0.9 / 3, rtol=0.15)
    np.testing.assert_allclose(shares[0, 3000:].var(), 0.25 / 7, rtol=0.15)


def test_shares_of_a_partition_give_it_again() -> None:
    labels, draw = np.arange(60) % 5, np.random.default_rng(0)
    shares = dirichlet_shares(3, 6, alpha=0.5, generator=draw)  # the last class has no samples
    clients = allocate(labels, 0.8 * shares, min_size=0, generator=draw)
    again = allocate(labels, class_shares(labels, clients, 6), min_size=0, generator=draw)
    assert class_counts(labels, again, 6) == class_counts(labels, clients, 6)


def dirichlet(**changed):
    options = {"num_classes": 3, "num_clients": 2, "alpha": 0.3, "generator": DRAW}
    return dirichlet_shares(**options | changed)


def pathological(**changed):
    options = {"num_classes": 10, "num_clients": 4, "classes_per_client": 5, "generator": DRAW}
    return pathological_shares(**options | changed)


DRAW = np.random.default_rng(0)
test_wrong_calls_are_refused_by_name = refused(globals())("""
dirichlet(num_classes=0) -> ValueError: `num_classes` must be at least 1; got 0
dirichlet(num_clients=0) -> ValueError: `num_clients` must be at least 1; got 0
dirichlet(alpha=0.0) -> ValueError: `alpha` must be above 0; got 0.0
dirichlet(alpha=float('nan')) -> ValueError: `alpha` must be finite; got nan
dirichlet(alpha=1e+308) -> ValueError: `alpha` must be at most 1e+12; got 1e+308
dirichlet(alpha=[[1.0, 2.0]]) -> ValueError: `alpha` must be a number, or broadcast to (clients, cl
dirichlet(min_per_class=0.6) -> ValueError: `min_per_class` must be at most 0.5; got 0.6
class_shares([0, 1], [[2]], 2) -> ValueError: `clients[0]` must lie in [0, 2), the positions in
class_shares([0, 1], [[0], [0, 1]], 2) -> ValueError: `clients` must hold each sample at most once
class_shares([0, 1], [], 2) -> ValueError: `clients` must have at least one client; got none
class_shares([0, 1], 3, 2) -> TypeError: `clients` must be an iterable of index arrays; got 3
class_shares([0, 1], [[0]], 1) -> ValueError: `labels` must lie in [0, 1); got
dirichlet(generator=0) -> TypeError: `generator` must be a torch.Generator or a numpy Generator
pathological(classes_per_client=2) -> ValueError: `classes_per_client` must be a multiple of 5
pathological(classes_per_client=0) -> ValueError: `classes_per_client` must be at least 1; got 0
pathological(num_classes=0) -> ValueError: `num_classes` must be at least 1; got 0
class_shares([0], [[0]], 0) -> ValueError: `num_classes` must be at least 1; got 0
pathological(num_clients=-1) -> ValueError: `num_clients` must be at least 1; got -1
iid_shares(2, 0) -> ValueError: `num_classes` must be at least 1; got 0
iid_shares(0, 3) -> ValueError: `num_clients` must be at least 1; got 0
""")
