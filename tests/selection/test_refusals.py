"""Arguments of selection are refused by name, and their edges are taken."""

from functools import partial

import pytest
import torch
from torch import eye, full, nan, ones, tensor, zeros

from fedprompt.selection import (
    CenteredQueries,
    SelectionKeys,
    clustering_accuracy,
    key_loss,
    orthogonal_keys,
    query_mean,
    select_balanced,
    select_nearest,
    selection_health,
)
from fedprompt.transport import exact, sinkhorn
from refusals import number, refused_and_taken

GOOD = {"query": ones(2, 3), "keys": eye(3)[:2]}
NARROW = [None, ones(3), ones(2, 3).long(), full((2, 3), nan), ones(2, 3, device="meta")]
QUERY = [*NARROW, ones(2, 4)], [zeros(0, 3), ones(5, 3)]
KEYS = [None, ones(3), zeros(0, 3), zeros(2, 0), full((2, 3), nan)], [ones(1, 3)]
USAGE = [ones(3), ones(2, 1), tensor(1.0), tensor([1, -2]), tensor([1, nan]),
         ones(2).bool(), ones(2, device="meta"), ones(2).to_sparse(), [1, 2]], [
    zeros(2), tensor([0, 5])]  # fmt: skip
COUNTS = [[1, 2], tensor(3), zeros(0), tensor([[1, -1]]), tensor([nan]), ones(2).bool()]


def started(usage):
    """Start a round with counts; an error leaves the old ones."""
    selector = SelectionKeys(2, 3)
    selector.start_round(tensor([4, 5]))
    selector(GOOD["query"])
    before = selector.counts.clone()
    try:
        selector.start_round(usage)
    except (TypeError, ValueError):
        assert selector.usage.tolist() == [4, 5]
        assert torch.equal(selector.counts, before)
        raise


def chosen(selector):
    return SelectionKeys(2, 3, selector=selector)(GOOD["query"])


def centered(query=GOOD["query"], dim=3, center=None):
    return CenteredQueries(dim, center=center)(query)


INDICES = [tensor([0, 2]), tensor([-1, 0]), tensor([0]), ones(2), zeros(2, 1).long(), [0, 1],
           tensor([0, 1], device="meta")], [tensor([0, 1]), tensor([1, 1]).int()]  # fmt: skip
test_wrong_arguments_are_refused_by_name_and_edges_are_taken = refused_and_taken([
    *((select, GOOD, {"query": QUERY, "keys": KEYS, "usage": USAGE})
      for select in (select_nearest, partial(select_balanced, solver=sinkhorn))),
    (select_nearest, GOOD, {"offset": ([0.0, -1, nan, "1", 1e39], [1e-30, 3.4e38])}),
    (select_balanced, GOOD, {"solver": ([None, "exact", lambda *_: 1], [exact])}),
    (key_loss, GOOD | {"indices": tensor([0, 1])}, {
        "indices": INDICES, "query": (QUERY[0], []), "keys": (KEYS[0], [])}),
    (orthogonal_keys, {"num_groups": 2, "dim": 2}, {
        "num_groups": number(1, 2), "dim": ([0, 1.0], [2, 3])}),
    (started, {}, {"usage": USAGE}),
    (chosen, {}, {"selector": ([5, select_balanced, lambda query, keys: 1, lambda *_, usage: 1], [
        partial(select_balanced, solver=exact)])}),
    (clustering_accuracy, {}, {"counts": ([*COUNTS, ones(3)], [zeros(1, 1)])}),
    (selection_health, {"counts": ones(2)}, {
        "counts": (COUNTS, [zeros(2), ones(2, 3).int()]),
        "query": (NARROW[1:], [zeros(0, 2), None]),
        "max_cosine": ([-1.5, 1.5, nan, "1"], [-1, 1])}),
    (query_mean, {}, {"query": (NARROW, [zeros(0, 3)])}),
    (partial(centered, center=zeros(3)), {}, {"query": QUERY, "dim": (number(1)[0], [])}),
    (centered, {}, {"center": ([zeros(2), full((3,), nan), [0.0] * 3, None], [zeros(3)])}),
])  # fmt: skip


@pytest.mark.bad_input
def test_a_refused_query_is_not_counted():
    selector = SelectionKeys(2, 3)
    for wrong in (tensor([[1.0, 2, 3], [4, 5, nan]]), ones(2, 4)):
        for training in (True, False):
            with pytest.raises(ValueError, match="`query` must"):
                selector.train(training)(wrong)
    assert selector.counts.tolist() == [0, 0]


@pytest.mark.unhooked  # the hook refuses a function without a signature
def test_a_selector_without_a_signature_is_accepted():
    assert SelectionKeys(2, 8, selector=min).selector is min
