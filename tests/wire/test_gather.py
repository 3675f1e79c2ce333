"""Trees between the ranks of one owner, here in a group of one process.

``tests/laws/test_rounds.py`` sends them between two processes.
"""

import pytest
import torch
import torch.distributed as dist

import fedprompt as fp
from fedprompt.wire import gather, gather_trees
from refusals import check_refused, refusals
from same import assert_same

ROWS = fp.Weighted(torch.tensor([[1.0], [torch.nan]]), torch.tensor([2.0, 0.0]))
TREE = {"own": [1.5, None, ({"rows": ROWS, "counts": torch.tensor([2**40])}, True)]}


@pytest.fixture
def alone():
    """A group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("wire", [lambda blob: blob[:-1], lambda blob: blob[:-1] + b"!"])
def test_a_tree_that_arrives_truncated_or_changed_is_refused(alone, monkeypatch, wire):
    assert_same(gather_trees(TREE, server_round=3), [TREE])
    monkeypatch.setattr(gather, "_gather_blobs", lambda blob, *_: [wire(blob)])
    with pytest.raises(ValueError, match="`tree` must arrive as rank 0 sent it; got other bytes"):
        gather_trees(TREE, server_round=3)


def test_what_is_no_tree_is_not_sent(alone):
    with pytest.raises(TypeError, match=r"`tree\['own'\]` must be a dict, list"):
        gather_trees({"own": object()}, server_round=0)


@pytest.mark.parametrize(("world", "who"), [(2, "rank 1"), (3, r"one of the ranks \[1, 2\]")])
def test_the_error_of_a_rank_that_waits_in_vain_names_the_others(alone, monkeypatch, world, who):
    def closed(*_, group):
        raise RuntimeError("connection closed")

    monkeypatch.setattr(dist, "get_world_size", lambda group: world)
    monkeypatch.setattr(dist, "all_gather", closed)
    rule = f"^round 3: rank 0 waited for a tree, and {who} did not .*: connection closed$"
    with pytest.raises(RuntimeError, match=rule):
        gather_trees(TREE, server_round=3)


@pytest.mark.parametrize(
    ("place", "rule"),
    [(0, "^rank 1: no data$"), (2, r"`server_round` must be .* every rank; got \[0, 1\]")],
)
def test_an_error_or_another_round_of_a_rank_is_an_error_here(alone, monkeypatch, place, rule):
    """The row of rank 1 has 1 as its first number after an error, and its round as the third."""
    two = lambda _, row: [row, row.index_fill(0, torch.tensor(place), 1)]  # noqa: E731
    monkeypatch.setattr(gather._Wait, "all_gather", two)
    monkeypatch.setattr(gather, "_gather_blobs", lambda blob, *_: [blob, b"no data"])
    with pytest.raises((RuntimeError, ValueError), match=rule):
        gather_trees(TREE, server_round=0)


REFUSED = """
gather_trees(TREE, server_round=-1) -> ValueError: `server_round` must be at least 0; got -1
gather_trees(TREE, server_round=0, error="no") -> TypeError: `error` must be an exception or None
gather.on_all_ranks(dict, 0, group=3) -> TypeError: `group` must be a process group or None; got 3
gather_trees(TREE, server_round=0, group=3) -> TypeError: `group` must be a process group or None
"""


@pytest.mark.bad_input
@pytest.mark.parametrize(("call", "error", "message"), refusals(REFUSED))
def test_wrong_calls_are_refused_by_name(alone, call, error, message):
    check_refused(call, error, message, globals())


@pytest.mark.bad_input
def test_a_group_without_this_process_is_refused(alone):
    with pytest.raises(ValueError, match="`group` must contain this process; got a group without"):
        gather_trees(TREE, server_round=0, group=dist.GroupMember.NON_GROUP_MEMBER)


def test_the_error_without_a_process_group_names_the_function_to_call():
    with pytest.raises(ValueError, match=r"must be a process group of .*; got none \(call init_"):
        gather_trees(TREE, server_round=0)
