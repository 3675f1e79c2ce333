"""Trees between the ranks of one owner, here in a group of one process.

``tests/laws/test_rounds.py`` sends them between two processes.
"""

import pytest
import torch
import torch.distributed as dist

import fedprompt as fp
from fedprompt.wire import gather, gather_trees
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


@pytest.mark.bad_input
def test_a_group_without_this_process_is_refused(alone):
    with pytest.raises(ValueError, match="`group` must contain this process; got a group without"):
        gather_trees(TREE, server_round=0, group=dist.GroupMember.NON_GROUP_MEMBER)


def test_the_error_without_a_process_group_names_the_function_to_call():
    with pytest.raises(ValueError, match=r"must be a process group of .*; got none \(call init_"):
        gather_trees(TREE, server_round=0)
