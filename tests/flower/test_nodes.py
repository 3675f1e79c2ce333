"""Which node is which client."""

from itertools import count
from typing import Any

import pytest
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from flwr.app import Message as Envelope

from fedprompt import flower
from flower_grid import InProcessGrid
from flower_runs import again, assert_equal, in_process, strategy_of
from flower_runs import grid_of as grid_of_method
from small_method import method

pytestmark = pytest.mark.flower


NODES = {0: 1000, 1: 993, 2: 986}


def grid_of(**options: Any) -> InProcessGrid:
    return grid_of_method(method(exchanges=1), clients=range(3), **options)


@pytest.fixture
def clock(monkeypatch):
    """A clock that only sleeping moves."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    return now


def test_clients_are_found_by_their_partition_and_asked_once():
    grid = grid_of()
    nodes = flower.client_nodes(grid, [1])
    assert nodes == NODES
    assert list(nodes) == [0, 1, 2]
    assert flower.client_nodes(grid, [1], known=nodes) == nodes
    assert sorted(grid.asked) == [986, 993, 1000]


def test_a_client_that_joins_late_is_waited_for(monkeypatch):
    grid = grid_of()
    monkeypatch.setattr("time.sleep", lambda seconds: grid.join(5, node=50))
    assert flower.client_nodes(grid, [0, 5], timeout=60.0)[5] == 50
    assert len(grid.asked) == 4


def test_waiting_for_clients_ends_at_the_timeout(clock):
    grid = grid_of()
    grid.join(-1, node=5)  # has no partition, and is asked only once
    assert list(flower.client_nodes(grid, [0, 5], timeout=7.0)) == [0, 1, 2]
    assert clock[0] == 7.0
    assert len(grid.asked) == 4


def test_a_silent_node_is_not_waited_for_if_all_clients_are_known(clock):
    """A connected node that never replies is waited for only if a client is missing."""
    grid = grid_of()
    grid.join(7, node=5)
    grid.silent.add(5)
    nodes = flower.client_nodes(grid, range(3), timeout=60.0)
    assert (nodes, clock[0]) == (NODES, 0.0)
    assert flower.client_nodes(grid, range(3), known=nodes, timeout=60.0) == nodes
    assert clock[0] == 0.0
    assert len(grid.asked) == 3
    assert flower.client_nodes(grid, range(4), known=nodes, timeout=60.0) == nodes
    assert clock[0] == 60.0
    grid.silent.clear()
    flower.client_nodes(grid, range(3), known=nodes)
    assert len(grid.asked) == 3  # an unknown node is not asked if no client is missing


def test_a_slow_answer_is_waited_for(monkeypatch):
    grid, pull, looks = grid_of(), InProcessGrid.pull_messages, count()
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr(
        grid, "pull_messages", lambda ids: pull(grid, ids) if next(looks) == 3 else []
    )
    assert flower.client_nodes(grid, range(3)) == NODES
    assert len(grid.asked) == 3  # one query, although replies are pulled four times


def test_a_query_that_flower_could_not_send_is_not_waited_for(monkeypatch):
    grid, push, pull = grid_of(), InProcessGrid.push_messages, InProcessGrid.pull_messages
    monkeypatch.setattr(grid, "push_messages", lambda messages: [*push(grid, messages)[:2], None])
    monkeypatch.setattr(grid, "pull_messages", lambda ids: [] if None in ids else pull(grid, ids))
    assert flower.client_nodes(grid, [2], timeout=0.0) == {1: 993, 2: 986}


def test_a_client_that_reconnects_as_another_node_is_found_again():
    grid = grid_of()
    nodes = flower.client_nodes(grid, range(3))
    del grid.contexts[993]
    assert flower.client_nodes(grid, [1], known=nodes, timeout=0.0) == {0: 1000, 2: 986}
    grid.join(1, node=5)
    known = dict(nodes)
    assert flower.client_nodes(grid, [1], known=known) == {0: 1000, 1: 5, 2: 986}
    assert known == nodes  # unchanged


def test_a_second_node_of_a_client_is_left_out(log):
    grid = grid_of()
    nodes = flower.client_nodes(grid, range(3))
    grid.join(1, node=5)
    assert flower.client_nodes(grid, range(4), known=nodes, timeout=0.0) == nodes
    assert log == [
        "node 5 is left out: `partition-id` must be that of one node; got 1 a second time."
    ]


def test_if_two_new_nodes_claim_one_client_the_lower_id_is_used(log):
    """The result does not depend on the order of replies."""
    grid = grid_of()
    for node in (5, 7, 6):
        grid.join(4, node=node)
    assert flower.client_nodes(grid, [4])[4] == 5
    assert [line[:19] for line in log] == ["node 6 is left out:", "node 7 is left out:"]


@pytest.mark.parametrize("node", [None, 50], ids=["twice", "not asked"])
def test_a_second_reply_and_one_of_a_node_that_was_not_asked_are_left_out(node, log):
    def fault(reply: Envelope) -> list[Envelope]:
        copy = again(reply, RecordDict({"client": ConfigRecord({"client": 9})}))
        if node:
            copy.metadata.__dict__["_src_node_id"] = node
        return [reply, copy]

    assert flower.client_nodes(grid_of(fault=fault), [1]) == NODES
    assert len(log) == 3


@pytest.mark.parametrize("claim", [-1, "1", 2.5, True, None])
def test_a_node_without_a_partition_is_left_out(claim, log):
    """Its own app refuses to reply; of an app that replies nevertheless, the reply is refused."""
    content = RecordDict({"client": ConfigRecord({} if claim is None else {"client": claim})})

    def fault(reply: Envelope) -> list[Envelope]:
        return [again(reply, content) if reply.metadata.src_node_id == 1000 else reply]

    grid = grid_of(fault=fault)
    grid.join(-2 if claim is None else claim, node=5)
    assert flower.client_nodes(grid, [1]) == {1: 993, 2: 986}
    assert "have a partition-id, an integer of at least 0; got" in log[0]
    assert "`partition-id` must be an integer of at least 0" in log[1]


@pytest.mark.parametrize(
    ("cohort", "sent"), [([0, 1], 2), ([1, 2], 4)], ids=["away", "in another name"]
)
def test_a_registered_node_cannot_pose_as_another_client(log, cohort, sent):
    """Client 2 poses as client 0, which is not connected."""
    grid, nodes = grid_of(), NODES
    del grid.contexts[1000]
    grid.join(0, node=986)
    strategy = strategy_of(method(exchanges=1), [cohort], nodes=nodes)
    strategy.start(grid, ArrayRecord(), num_rounds=1)
    assert grid.asked == []
    assert strategy.nodes == nodes
    assert len(grid.sent) == sent  # the reply for client 2 has the id of client 0
    assert any("must have the client_id '2'; got '0'" in line for line in log) == (2 in cohort)
    assert_equal(strategy.now.server, in_process(method(exchanges=1), [[1]]).server)


def test_a_client_without_a_node_is_left_out_of_the_round(log):
    grid, strategy = grid_of(), strategy_of(method(exchanges=1), [[0, 1]])
    del grid.contexts[1000]
    strategy.start(grid, ArrayRecord(), num_rounds=1)
    assert_equal(strategy.now.server, in_process(method(exchanges=1), [[1]]).server)
    assert "round 0: client 0 is left out: it has no node" in log
