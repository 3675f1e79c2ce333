"""Centered queries: the entry of the mean, the module, a cure for a collapse, and bad input."""

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from errors import raises
from fedprompt import collect, load_values, snapshot, weighted_mean
from fedprompt.metrics import contingency_table
from fedprompt.selection import (
    CenteredQueries,
    SelectionKeys,
    key_loss,
    query_mean,
    select_nearest,
    selection_health,
)
from same import assert_identical
from tolerance import assert_near

QUERY = torch.tensor([[9.0, 1.0, 2.0], [9.0, -2.0, 4.0], [12.0, 1.0, 0.0]])


@pytest.mark.parametrize("sizes", [(1, 2), (3, 0), (2, 0, 1)])
def test_queries_are_centered_by_the_mean_of_all_samples_of_all_clients(sizes):
    means = [{"center": query_mean(own)} for own in QUERY.split(sizes)]
    assert [mean["center"].weight for mean in means] == [*sizes]
    queries = CenteredQueries(3)
    load_values(queries, weighted_mean(means))
    assert_near(queries(QUERY), QUERY - torch.tensor([10.0, 0.0, 2.0]))  # by hand


def test_the_mean_of_half_precision_is_summed_in_float64():
    """4096 + 1 is 4096 in float16, and the sum of 3000 such entries overflows."""
    query = torch.full((3000, 1), 4096.0, dtype=torch.float16)
    query[0] = 7096.0
    mean = query_mean(query)
    assert mean.value.dtype == torch.float32
    assert mean.value.item() == 4097.0


def test_the_mean_is_subtracted_in_float32_at_least():
    """In bfloat16, the numbers near 45 are 0.25 apart, and a narrow cone would be lost."""
    queries = CenteredQueries(1, center=torch.tensor([45.1]))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        out = queries(torch.tensor([[45.0]], dtype=dtype))
        assert out.dtype == torch.float32
        assert out.item() == pytest.approx(-0.1, abs=1e-5)
    assert queries(torch.ones(1, 1, dtype=torch.float64)).dtype == torch.float64


def test_the_mean_belongs_to_the_model_but_is_not_sent_again():
    model = nn.ModuleDict({"queries": CenteredQueries(3), "selector": SelectionKeys(2, 3)})
    load_values(model, {"queries.center": query_mean(QUERY)})
    assert set(snapshot(model)) == set(collect(model, weight=1)) == {"selector.keys"}
    other = nn.ModuleDict({"queries": CenteredQueries(3), "selector": SelectionKeys(2, 3)})
    other.load_state_dict(model.state_dict())
    assert_identical(other["queries"](QUERY), model["queries"](QUERY))
    assert_identical(copy.deepcopy(model)["queries"](QUERY), model["queries"](QUERY))


def test_the_given_mean_is_copied():
    center = QUERY.mean(0)
    queries = CenteredQueries(3, center=center)
    load_values(queries, {"center": torch.zeros(3)})
    assert_identical(center, QUERY.mean(0))
    assert_identical(queries(QUERY), QUERY)
    assert not CenteredQueries(3, center=center.requires_grad_()).center.requires_grad


def cone(generator):
    """Draw four clusters of unit width around a point 9 away from the origin."""
    centers = torch.randn(4, 16, generator=generator)
    labels = torch.arange(200) % 4
    noise = 0.3 * torch.randn(200, 16, generator=generator)
    axis = F.normalize(torch.randn(16, generator=generator), dim=0)
    return centers[labels] + noise + 27 * axis, labels


def train_keys(query, generator):
    """Train four keys for 40 steps of 20 samples; return the groups of all samples."""
    selector = SelectionKeys(4, query.shape[1], generator=generator)
    selector.start_round(torch.zeros(4))
    optimizer = torch.optim.SGD(selector.parameters(), lr=0.5)
    for batch in torch.randperm(200, generator=generator).repeat(4).split(20):
        loss = key_loss(query[batch], selector.keys, selector(query[batch]).indices)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return select_nearest(query, selector.keys.detach()).indices


@pytest.mark.parametrize("seed", range(3))
def test_keys_collapse_in_a_narrow_cone_and_not_with_centered_queries(seed):
    generator = torch.Generator().manual_seed(seed)
    query, labels = cone(generator)
    with pytest.warns(UserWarning, match=r"mean cosine of queries is 0\.9\d, above 0\.5"):
        raw = selection_health(contingency_table(train_keys(query, generator), labels, 4, 4), query)
    centered = CenteredQueries(16, center=query_mean(query).value)(query)
    table = contingency_table(train_keys(centered, generator), labels, 4, 4)
    health = selection_health(table, centered)  # without a warning
    assert raw["effective_groups"] < 2
    assert health["effective_groups"] > 3
    assert abs(health["mean_cosine"]) < 0.1


@pytest.mark.bad_input
def test_queries_are_not_centered_before_the_mean_is_loaded():
    queries = CenteredQueries(3)
    with raises(ValueError, "`center` must be given or loaded before the first call; got NaN."):
        queries(QUERY)
    with pytest.raises(ValueError, match="finite"):
        load_values(queries, {"center": torch.full((3,), torch.nan)})
    load_values(queries, {"center": query_mean(QUERY[:0])})  # no client had an image
    with raises(ValueError, "`center` must be given or loaded before the first call; got NaN."):
        queries(QUERY)
