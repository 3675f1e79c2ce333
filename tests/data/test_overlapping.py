"""Partitions of FedHPL, in which clients may share samples."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fedprompt.data import dirichlet_overlapping
from refusals import refused


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
    size = data.draw(st.integers(1, len(labels)))
    clients = dirichlet_overlapping(
        labels, num_clients=3, alpha=alpha, size=size, generator=np.random.default_rng(seed)
    )
    assert [len(set(client.tolist())) for client in clients] == [size] * 3
    assert all(set(client.tolist()) <= set(range(len(labels))) for client in clients)


def test_class_proportions_are_dirichlet_for_any_class_sizes() -> None:
    # No client needs more than 300 of a class, so none is exhausted. Proportions have mean 1/3 and
    # variance (1/3)(2/3) / (3 alpha + 1); over 2000 clients the mean is known to 5 sqrt(variance /
    # 2000) = .033, the variance to 10 %.
    labels = np.repeat([0, 1, 2], [1300, 320, 600])
    alpha = 0.5
    clients = dirichlet_overlapping(
        labels, num_clients=2000, alpha=alpha, size=300, generator=np.random.default_rng(0)
    )
    mix = np.stack([np.bincount(labels[client], minlength=3) for client in clients]) / 300
    np.testing.assert_allclose(mix.mean(axis=0), 1 / 3, rtol=0, atol=0.033)
    np.testing.assert_allclose(mix.var(axis=0), (2 / 9) / (3 * alpha + 1), rtol=0.1)


def test_every_client_has_the_minimum_of_every_class() -> None:
    """A percent of 5000 images of each class of CIFAR-10, as for Dir of FedHPL."""
    labels, draw = np.arange(50_000) % 10, np.random.default_rng(0)
    how = {"alpha": 0.1, "size": 2000, "generator": draw}
    for client in dirichlet_overlapping(labels, 5, min_per_class=0.01, **how):
        counts = np.bincount(labels[client])
        assert (counts.min(), counts.sum()) == (50, 2000)


def test_an_exhausted_class_gives_all_samples_and_the_others_fill_the_remainder() -> None:
    # At alpha 1e12 every client asks for 15 of each of four classes. The last have 5 and 1. The
    # missing 24 come from the others, 12 each.
    labels = np.repeat([0, 1, 2, 3], [100, 100, 5, 1])
    for client in dirichlet_overlapping(
        labels, num_clients=5, alpha=1e12, size=60, generator=np.random.default_rng(0)
    ):
        assert np.bincount(labels[client]).tolist() == [27, 27, 5, 1]


def test_classes_with_a_share_of_0_fill_the_remainder_of_an_exhausted_class() -> None:
    # At alpha 1e-300 one class has the share 1 and the others exactly 0. There are classes of 12, 8
    # and 4 samples, and a client needs 16. The missing 4, 8 or 12 come from the other classes in
    # proportion to their sizes: 2.67 and 1.33, 6 and 2, 7.2 and 4.8.
    labels = np.repeat([0, 1, 2], [12, 8, 4])
    clients = dirichlet_overlapping(
        labels, num_clients=20, alpha=1e-300, size=16, generator=np.random.default_rng(0)
    )
    assert {tuple(np.bincount(labels[client]).tolist()) for client in clients} == {
        (12, 3, 1),
        (6, 8, 2),
        (7, 5, 4),
    }


def test_a_minimum_of_all_samples_gives_all_samples() -> None:
    assert [own.tolist() for own in overlapping(size=4, min_per_class=2)] == [[0, 1, 2, 3]] * 2


def overlapping(**changed):
    options = {"num_clients": 2, "alpha": 0.3, "size": 3, "generator": np.random.default_rng(0)}
    return dirichlet_overlapping([0, 0, 1, 1], **options | changed)


test_wrong_calls_are_refused_by_name = refused(globals())("""
overlapping(size=5) -> ValueError: `size` must be at most 4, the number of labels; got 5
overlapping(size=0) -> ValueError: `size` must be at least 1; got 0
overlapping(num_clients=0) -> ValueError: `num_clients` must be at least 1; got 0
overlapping(min_per_class=2) -> ValueError: `min_per_class` must fit into `size`, 3; got 4 samples
overlapping(alpha=0) -> ValueError: `alpha` must be above 0; got 0
overlapping(alpha=float('inf')) -> ValueError: `alpha` must be finite; got inf
overlapping(alpha=10000000000000.0) -> ValueError: `alpha` must
""")
