"""Figures of key usage and revival of keys, against SciPy, scikit-learn and loops."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import entropy
from sklearn.metrics import normalized_mutual_info_score
from sklearn.metrics.cluster import contingency_matrix

from fedprompt.metrics import contingency_table
from fedprompt.selection import clustering_accuracy, selection_health
from references.sgpt import cosine


def samples(seed, size, groups=5, classes=7):
    """Draw correlated groups and classes, each of which occurs."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.cat(
        [torch.arange(classes), torch.randint(classes, (size,), generator=generator)]
    )
    noise = torch.randint(groups, (len(labels),), generator=generator)
    indices = torch.where(
        torch.rand(len(labels), generator=generator) < 0.6, labels % groups, noise
    )
    return indices, labels


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**32), size=st.integers(0, 60))
def test_tables_and_their_overlap_against_scikit_learn(seed, size):
    indices, labels = samples(seed, size)
    groups = int(indices.max()) + 2  # the last one is dead
    table = contingency_table(indices, labels, num_groups=groups, num_classes=8)
    expected = contingency_matrix(labels.numpy(), indices.numpy()).T
    assert table[table.sum(1) > 0][:, :7].tolist() == expected.tolist()
    health = selection_health(table)
    assert health["label_overlap"] == pytest.approx(
        normalized_mutual_info_score(labels.numpy(), indices.numpy()), abs=1e-12
    )
    correct = sum(
        max(labels[indices == group].tolist().count(label) for label in range(8))
        for group in range(groups)
    )
    assert health["purity"] == pytest.approx(correct / len(labels), rel=1e-12)


@settings(deadline=None, max_examples=20)
@given(counts=st.lists(st.integers(0, 10**9), min_size=1, max_size=12).filter(any))
def test_the_figures_of_counts_against_scipy(counts):
    health = selection_health(torch.tensor(counts))
    assert [health.pop(f"count/{group}") for group in range(len(counts))] == counts
    assert health.pop("dead_groups") == counts.count(0)
    assert health.pop("largest_share") == pytest.approx(max(counts) / sum(counts), rel=1e-12)
    assert health.pop("entropy") == pytest.approx(entropy(counts), abs=1e-12)
    assert health.pop("effective_groups") == pytest.approx(math.exp(entropy(counts)), rel=1e-9)
    assert health == {}


def test_without_counts_all_groups_are_dead_and_other_figures_are_0():
    health = selection_health(torch.zeros(3, 2))
    assert health.pop("dead_groups") == 3
    assert set(health.values()) == {0.0}


@pytest.mark.parametrize(
    ("table", "purity", "overlap"),
    [
        ([[5, 0], [0, 3]], 1.0, 1.0),  # groups are classes
        ([[4, 4], [2, 2]], 0.5, 0.0),  # groups and classes are independent
        ([[3, 0], [3, 0]], 1.0, 0.0),  # pure, because there is only one class
        ([[3, 5]], 0.625, 0.0),  # one group
    ],
)
def test_purity_and_overlap_by_hand(table, purity, overlap):
    health = selection_health(torch.tensor(table))
    assert health["purity"] == purity
    assert health["label_overlap"] == pytest.approx(overlap, abs=1e-12)


@settings(deadline=None, max_examples=50)
@given(
    seed=st.integers(0, 2**32),
    shape=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    most=st.sampled_from([1, 3, 50]),
)
def test_groups_are_matched_one_to_one_as_by_trying_all_matches(seed, shape, most):
    table = torch.randint(most + 1, shape, generator=torch.Generator().manual_seed(seed))
    wide = table if shape[0] <= shape[1] else table.T
    rows = range(len(wide))
    matches = itertools.permutations(range(wide.shape[1]), len(wide))
    best = max(wide[rows, columns].sum().item() for columns in matches)
    expected = best / (table.sum().item() or 1)
    assert clustering_accuracy(table) == pytest.approx(expected, abs=1e-12)


# The mean cosine of queries.


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**32), batch=st.integers(2, 9))
def test_the_mean_cosine_is_that_of_all_pairs(seed, batch):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, 4, generator=generator, dtype=torch.float64)
    pairs = list(itertools.combinations(query.tolist(), 2))
    expected = sum(cosine(*pair) for pair in pairs) / len(pairs)
    health = selection_health(torch.ones(2), query, max_cosine=1.0)
    assert health["mean_cosine"] == pytest.approx(expected, abs=1e-12)
    assert "mean_cosine" not in selection_health(torch.ones(2))


def test_queries_in_a_narrow_cone_are_warned_of():
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(50, 8, generator=generator)
    narrow = query + 3 * torch.ones(8)  # cosine about 9 / (9 + 1)
    with pytest.warns(UserWarning, match=r"queries is 0\.9\d, above 0\.5.*CenteredQueries"):
        selection_health(torch.ones(2), narrow)
    for quiet in (query, narrow - narrow.mean(0), narrow[:1], narrow[:0]):
        selection_health(torch.ones(2), quiet)
    selection_health(torch.ones(2), narrow, max_cosine=0.95)
    for single in (narrow[:1], narrow[:0], torch.zeros(3, 2)):
        assert selection_health(torch.ones(2), single)["mean_cosine"] == 0
