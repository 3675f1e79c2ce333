"""Which node is which client."""

from itertools import count

import pytest
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from flwr.app import Message as Envelope

from federations import assert_bitwise_identical, in_process
from fedprompt import flower
from flower_grid import InProcessGrid
from flower_runs import again, cohort_member, grid_of, strategy_of, without

pytestmark = pytest.mark.flower


def test_clients_are_found_by_their_partition_and_asked_once(fedotp):
    grid = grid_of(fedotp)
    nodes = flower.client_nodes(grid, [1])
    assert nodes == {0: 1000, 1: 993, 2: 986}
    assert list(nodes) == [0, 1, 2]
    assert flower.client_nodes(grid, [1], known=nodes) == nodes
    assert sorted(grid.asked) == [986, 993, 1000]


def test_a_client_that_joins_late_is_waited_for(fedotp, monkeypatch):
    grid = grid_of(fedotp)
    monkeypatch.setattr("time.sleep", lambda seconds: grid.join(5, node=50))
    assert flower.client_nodes(grid, [0, 5], timeout=60.0)[5] == 50
    assert len(grid.asked) == 4


def test_waiting_for_clients_ends_at_the_timeout(fedotp, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    grid = grid_of(fedotp)
    grid.join(-1, node=5)  # has no partition, and is asked only once
    assert list(flower.client_nodes(grid, [0, 5], timeout=7.0)) == [0, 1, 2]
    assert now[0] == 7.0
    assert len(grid.asked) == 4


def test_a_silent_node_is_not_waited_for_if_all_clients_are_known(fedotp, monkeypatch):
    """A connected node that never replies is waited for only if a client is missing."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    grid = grid_of(fedotp)
    grid.join(7, node=5)
    grid.silent.add(5)
    nodes = flower.client_nodes(grid, range(3), timeout=60.0)
    assert (nodes, now[0]) == ({0: 1000, 1: 993, 2: 986}, 0.0)
    assert flower.client_nodes(grid, range(3), known=nodes, timeout=60.0) == nodes
    assert now[0] == 0.0
    assert len(grid.asked) == 3
    assert flower.client_nodes(grid, range(4), known=nodes, timeout=60.0) == nodes
    assert now[0] == 60.0
    grid.silent.clear()
    flower.client_nodes(grid, range(3), known=nodes)
    assert len(grid.asked) == 3  # an unknown node is not asked if no client is missing


def test_a_slow_answer_is_waited_for(fedotp, monkeypatch):
    grid, pull, looks = grid_of(fedotp), InProcessGrid.pull_messages, count()
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr(
        grid, "pull_messages", lambda ids: pull(grid, ids) if next(looks) == 3 else []
    )
    assert flower.client_nodes(grid, range(3)) == {0: 1000, 1: 993, 2: 986}
    assert len(grid.asked) == 3  # one query, although replies are pulled four times


def test_a_query_that_flower_could_not_send_is_not_waited_for(fedotp, monkeypatch):
    grid, push, pull = grid_of(fedotp), InProcessGrid.push_messages, InProcessGrid.pull_messages
    monkeypatch.setattr(grid, "push_messages", lambda messages: [*push(grid, messages)[:2], None])
    monkeypatch.setattr(grid, "pull_messages", lambda ids: [] if None in ids else pull(grid, ids))
    assert flower.client_nodes(grid, [2], timeout=0.0) == {1: 993, 2: 986}


def test_a_client_that_reconnects_as_another_node_is_found_again(fedotp):
    grid = grid_of(fedotp)
    nodes = flower.client_nodes(grid, range(3))
    del grid.contexts[993]
    assert flower.client_nodes(grid, [1], known=nodes, timeout=0.0) == {0: 1000, 2: 986}
    grid.join(1, node=5)
    known = dict(nodes)
    assert flower.client_nodes(grid, [1], known=known) == {0: 1000, 1: 5, 2: 986}
    assert known == nodes  # unchanged


def test_a_second_node_of_a_client_is_left_out(fedotp, log):
    grid = grid_of(fedotp)
    nodes = flower.client_nodes(grid, range(3))
    grid.join(1, node=5)
    assert flower.client_nodes(grid, range(4), known=nodes, timeout=0.0) == nodes
    assert log == [
        "node 5 is left out: `partition-id` must be that of one node; got 1 a second time."
    ]


def test_if_two_new_nodes_claim_one_client_the_lower_id_is_used(fedotp, log):
    """The result does not depend on the order of replies."""
    grid = grid_of(fedotp)
    for node in (5, 7, 6):
        grid.join(4, node=node)
    assert flower.client_nodes(grid, [4])[4] == 5
    assert [line[:19] for line in log] == ["node 6 is left out:", "node 7 is left out:"]


def test_a_node_is_one_client_even_if_it_replies_twice(fedotp, log):
    def fault(reply: Envelope) -> list[Envelope]:
        return [reply, again(reply, RecordDict({"client": ConfigRecord({"client": 9})}))]

    assert flower.client_nodes(grid_of(fedotp, fault=fault), range(3)) == {0: 1000, 1: 993, 2: 986}
    assert len(log) == 3


def test_an_answer_of_a_node_that_was_not_asked_is_left_out(fedotp, log):
    def fault(reply: Envelope) -> list[Envelope]:
        copy = again(reply, RecordDict({"client": ConfigRecord({"client": 9})}))
        copy.metadata.__dict__["_src_node_id"] = 50
        return [reply, copy]

    assert flower.client_nodes(grid_of(fedotp, fault=fault), [1]) == {0: 1000, 1: 993, 2: 986}
    assert len(log) == 3


@pytest.mark.parametrize(
    "claim", [{"client": -1}, {"client": "1"}, {"client": 1.0}, {"client": True}, {}]
)
def test_a_node_without_a_partition_is_left_out(fedotp, claim, log):
    def fault(reply: Envelope) -> list[Envelope]:
        return [
            again(reply, RecordDict({"client": ConfigRecord(claim)}))
            if reply.metadata.src_node_id == 1000
            else reply
        ]

    assert flower.client_nodes(grid_of(fedotp, fault=fault), [1]) == {1: 993, 2: 986}
    assert "`partition-id` must be an integer of at least 0" in log[0]


@pytest.mark.parametrize("number", ["1", -1, 2.5, True])
def test_a_client_without_a_partition_replies_with_an_error(fedotp, number, log):
    grid = grid_of(fedotp)
    grid.join(number, node=5)
    assert flower.client_nodes(grid, [1]) == {0: 1000, 1: 993, 2: 986}
    assert "have a partition-id, an integer of at least 0; got" in log[0]


@pytest.mark.parametrize(
    ("cohort", "sent"), [([0, 1], 2), ([1, 2], 4)], ids=["away", "in another name"]
)
def test_a_registered_node_cannot_pose_as_another_client(fedotp, log, cohort, sent):
    """Client 2 poses as client 0, which is not connected."""
    grid, nodes = grid_of(fedotp), {0: 1000, 1: 993, 2: 986}
    del grid.contexts[1000]
    grid.join(0, node=986)
    strategy = strategy_of(fedotp, nodes=nodes, cohort=lambda server_round: cohort)
    strategy.start(grid, ArrayRecord(), num_rounds=1)
    assert grid.asked == []
    assert strategy.nodes == nodes
    assert len(grid.sent) == sent  # the reply for client 2 has the id of client 0
    assert any("must have the client_id '2'; got '0'" in line for line in log) == (2 in cohort)
    assert_bitwise_identical(
        strategy.answers,
        in_process(fedotp._replace(cohort=lambda server_round: [1], rounds=1)).answers,
    )


def test_a_client_without_a_node_is_left_out_of_the_round(fedotp, log):
    client = cohort_member(fedotp)
    grid, strategy = grid_of(fedotp), strategy_of(fedotp)
    del grid.contexts[1000 - 7 * client]
    strategy.start(grid, ArrayRecord(), num_rounds=1)
    expected = in_process(without(fedotp, client, 0)._replace(rounds=1))
    assert_bitwise_identical((strategy.answers, strategy.state), expected[:2])
    assert f"round 0: client {client} is left out: it has no node" in log
