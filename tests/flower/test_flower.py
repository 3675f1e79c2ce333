"""Four federations over a Flower grid that serializes messages, and all failures of a reply."""

import doctest
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, MetricRecord, RecordDict
from flwr.app import Message as Envelope
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.task_identity import TaskIdentity

import fedprompt as fp
from federations import (
    FEDERATIONS,
    Answers,
    Federation,
    Outcome,
    assert_bitwise_identical,
    in_process,
)
from fedprompt import flower
from fedprompt.flower.records import remember, remembered
from flower_grid import Fault, InProcessGrid

pytestmark = pytest.mark.flower
MAX_BYTES = 100_000


@pytest.fixture(autouse=True)
def _identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the sender, as Flower's launchers do for a process."""
    for part in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, part, 1)


@pytest.fixture
def log() -> Iterator[list[str]]:
    """Return the list to which the lines of the adapter's log are appended."""
    lines: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("flwr.fedprompt")
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


def downward(federation: Federation) -> Callable[[int], fp.wire.Expected]:
    return lambda client: fp.wire.Expected(
        federation.broadcast_form(client), federation.fingerprint
    )


def upward(federation: Federation) -> Callable[[int], fp.wire.Expected]:
    return lambda client: fp.wire.Expected(federation.payload_form(client), federation.fingerprint)


def grid_of(federation: Federation, **options: Any) -> InProcessGrid:
    app = flower.client_app(federation.client, expect=downward(federation), max_bytes=MAX_BYTES)
    return InProcessGrid(app, range(federation.num_clients), **options)


def strategy_of(federation: Federation, **options: Any) -> flower.ServerStrategy:
    wire = {
        "cohort": federation.cohort,
        "expect": upward(federation),
        "max_bytes": MAX_BYTES,
        "patience": 0.0,
    }
    return flower.ServerStrategy(federation.server, **wire | options)


def flower_grid(
    federation: Federation, *, fault: Fault = lambda reply: [reply], **options: Any
) -> tuple[Outcome, InProcessGrid]:
    """Run Flower's loop over a grid that serializes every message."""
    grid, strategy = grid_of(federation, fault=fault), strategy_of(federation, **options)
    strategy.start(grid, ArrayRecord(), num_rounds=federation.rounds)
    states = {
        client: remembered(grid.context(node).state)["after"]
        for client, node in strategy.nodes.items()
    }
    return Outcome(strategy.answers, strategy.state, states), grid


@pytest.fixture(scope="module", params=FEDERATIONS)
def federation(request: pytest.FixtureRequest) -> Federation:
    return FEDERATIONS[request.param]()


@pytest.fixture(scope="module")
def fedotp() -> Federation:
    return FEDERATIONS["fedotp"]()


# Results and bytes


def test_every_federation_is_bitwise_identical_to_a_plain_loop(federation):
    outcome, grid = flower_grid(federation)
    assert_bitwise_identical(outcome, in_process(federation))
    assert len(grid.asked) == federation.num_clients  # one query for the partition of each node


def test_the_ledger_records_every_message(federation):
    ledger = fp.Ledger()
    _, grid = flower_grid(federation, ledger=ledger)
    for direction in ("up", "down"):
        sent = [length for way, length in grid.sent if way == direction]
        assert len(sent) == sum(
            len(federation.cohort(server_round)) for server_round in range(federation.rounds)
        )
        assert ledger.total(direction=direction, framed=True) == sum(sent)
        assert ledger.total(direction=direction) < sum(sent)


def test_each_client_receives_its_answer():
    federation, got = FEDERATIONS["fedhpl"](), {}

    def listening(
        client: int, server_round: int, broadcast: fp.interfaces.Message, state: Any
    ) -> tuple[fp.interfaces.Message, Any]:
        got[client, server_round] = broadcast
        return federation.client(client, server_round, broadcast, state)

    flower_grid(federation._replace(client=listening))
    assert [got[client, 1]["head.weight"].shape[1] for client in range(3)] == [32, 64, 32]
    assert not torch.equal(got[0, 1]["logits"].value, got[1, 1]["logits"].value)
    assert_bitwise_identical(got[0, 1], got[2, 1])


def test_a_plain_loop_over_run_round_needs_no_strategy(federation):
    grid, ledger = grid_of(federation), fp.Ledger()
    answers, state = federation.server.init()
    nodes: dict[int, int] = {}
    for server_round in range(federation.rounds):
        drawn = federation.cohort(server_round)
        nodes = flower.client_nodes(grid, drawn, known=nodes, timeout=0.0)
        wire = {"expect": upward(federation), "max_bytes": MAX_BYTES, "ledger": ledger}
        payloads = flower.run_round(
            grid, {k: answers[k] for k in drawn}, nodes=nodes, server_round=server_round, **wire
        )
        assert list(payloads) == drawn
        answers, state = federation.server.step(payloads, state)
    expected = in_process(federation)
    assert_bitwise_identical((answers, state), (expected.answers, expected.server))
    assert len(grid.asked) == federation.num_clients  # one query for each node in the whole run
    assert ledger.total(framed=True) == sum(length for _, length in grid.sent)


def test_equal_answers_share_one_content_and_another_fingerprint_makes_another(
    fedotp, monkeypatch, tmp_path
):
    """Flower sends an object once, even if several envelopes contain it."""
    grid, contents = grid_of(fedotp), []
    monkeypatch.setattr(
        grid,
        "send_and_receive",
        lambda messages, timeout: contents.extend(message.content for message in messages) or [],
    )
    answers, nodes = dict(fedotp.server.init()[0]), {0: 1000, 1: 993, 2: 986}
    wire = {"nodes": nodes, "server_round": 0, "max_bytes": MAX_BYTES}
    flower.run_round(grid, answers, expect=upward(fedotp), **wire)
    assert contents[0] is contents[1] is contents[2]
    contents.clear()
    fp.save_checkpoint(answers, tmp_path)
    # The answers are an equal copy.
    flower.run_round(grid, fp.load_checkpoint(tmp_path), expect=upward(fedotp), **wire)
    assert contents[0] is contents[1] is contents[2]
    contents.clear()
    answers[2] = {name: torch.nextafter(tensor, tensor + 1) for name, tensor in answers[2].items()}
    flower.run_round(grid, answers, expect=upward(fedotp), **wire)
    assert contents[0] is contents[1] is not contents[2]
    answers[2] = answers[0]
    contents.clear()
    flower.run_round(
        grid,
        answers,
        expect=lambda client: fp.wire.Expected(
            fedotp.payload_form(client), {"seat": str(client // 2)}
        ),
        **wire,
    )
    assert contents[0] is contents[1] is not contents[2]
    headers = [
        flower.unpack(each, expect=fp.wire.Expected(fedotp.broadcast_form(0)), max_bytes=MAX_BYTES)[
            1
        ]
        for each in contents
    ]
    assert [header.fingerprint["seat"] for header in headers] == ["0", "0", "1"]


# Replies that fail


def spoil(client: int, change: Callable[[bytes], bytes], server_round: int = 0) -> Fault:
    """Change the blob of one client in one round."""

    def fault(reply: Envelope) -> list[Envelope]:
        if reply.metadata.message_type == "train" and concerns(reply, client, server_round):
            (record,) = reply.content.values()
            return [replying(reply, change(record["blob"].data))]
        return [reply]

    return fault


def concerns(reply: Envelope, client: int, server_round: int) -> bool:
    return (reply.metadata.src_node_id, reply.metadata.group_id) == (
        1000 - 7 * client,
        str(server_round),
    )


def replying(reply: Envelope, blob: bytes) -> Envelope:
    record = ArrayRecord({"blob": Array("uint8", (len(blob),), "safetensors", blob)})
    return again(reply, RecordDict({"fedprompt": record}))


def again(reply: Envelope, content: RecordDict | Error) -> Envelope:
    which = {"content": content} if isinstance(content, RecordDict) else {"error": content}
    return Envelope(**which, metadata=deepcopy(reply.metadata))


def without(federation: Federation, client: int, server_round: int) -> Federation:
    """Drop the message of one client in one round, after the client has trained."""
    rounds = count()

    def step(payloads: Mapping[int, fp.interfaces.Message], state: Any) -> tuple[Answers, Any]:
        now = next(rounds)
        return federation.server.step(
            {
                each: payload
                for each, payload in payloads.items()
                if (each, now) != (client, server_round)
            },
            state,
        )

    return federation._replace(server=federation.server._replace(step=step))


def flip(position: int, blob: bytes) -> bytes:
    changed = bytearray(blob)
    changed[position] ^= 1
    return bytes(changed)


def reheaded(blob: bytes, federation: Federation, **fields: Any) -> bytes:
    message, header = fp.wire.decode_payload(
        blob, expect=upward(federation)(0), max_bytes=MAX_BYTES
    )
    return fp.wire.encode_payload(message, header=header._replace(**fields))


SPOILT: dict[str, tuple[Callable[[Federation], Callable[[bytes], bytes]], str]] = {
    "truncated": (lambda federation: lambda blob: blob[:-3], "`blob` must"),
    "emptied": (lambda federation: lambda blob: b"", "`blob` must start with the length"),
    "flipped in the header": (lambda federation: partial(flip, 30), "`blob` must"),
    "too long": (
        lambda federation: lambda blob: blob + bytes(MAX_BYTES),
        f"`blob` must be at most {MAX_BYTES} bytes long",
    ),
    "late": (lambda federation: partial(reheaded, federation=federation, server_round=5), "5"),
    "another client's": (
        lambda federation: partial(reheaded, federation=federation, client_id="2"),
        "'2'",
    ),
    "of another backbone": (
        lambda federation: partial(reheaded, federation=federation, fingerprint={"backbone": "x"}),
        "same",
    ),
    "flipped in the tensors": (lambda federation: partial(flip, -1), "SHA-256"),
}


def cohort_member(federation: Federation) -> int:
    return federation.cohort(0)[0]


@pytest.mark.parametrize("fate", SPOILT)
def test_a_corrupt_message_is_dropped_with_a_logged_reason(fedotp, fate, log):
    change, reason = SPOILT[fate]
    client = cohort_member(fedotp)
    outcome, _ = flower_grid(fedotp, fault=spoil(client, change(fedotp)))
    expected = in_process(without(fedotp, client, 0))
    assert_bitwise_identical(outcome[:2], expected[:2])
    (line,) = (line for line in log if "left out" in line)
    assert line.startswith(f"round 0: a reply of node {1000 - 7 * client} is left out: `")
    assert reason in line


@pytest.mark.parametrize(
    "content",
    [
        Error(2, "out of\nmemory " * 1000),
        RecordDict(),
        RecordDict({"fedprompt": MetricRecord({"loss": 1.0})}),
    ],
)
def test_errors_and_foreign_records_are_left_out(fedotp, content, log):
    client = cohort_member(fedotp)
    outcome, _ = flower_grid(
        fedotp, fault=lambda reply: [again(reply, content) if concerns(reply, client, 0) else reply]
    )
    assert_bitwise_identical(outcome[:2], in_process(without(fedotp, client, 0))[:2])
    (line,) = (line for line in log if "left out" in line)
    assert "\n" not in line  # a reason is one line, even if the sender's text is not
    assert len(line) < 400


def test_only_the_first_of_two_replies_is_used(fedotp, log):
    def twice(reply: Envelope) -> list[Envelope]:
        if reply.metadata.message_type != "train":
            return [reply]
        (record,) = reply.content.values()
        weight = fp.wire.decode_payload(
            record["blob"].data, expect=upward(fedotp)(0), max_bytes=MAX_BYTES
        )
        payload = {name: entry._replace(value=entry.value + 1) for name, entry in weight[0].items()}
        return [reply, reply, replying(reply, fp.wire.encode_payload(payload, header=weight[1]))]

    outcome, _ = flower_grid(fedotp, fault=twice)
    assert_bitwise_identical(outcome, in_process(fedotp))
    assert sum("asked, once" in line for line in log) == 2 * 2 * 2


def test_a_message_of_an_earlier_round_is_dropped(fedotp, log):
    kept: list[RecordDict] = []

    def replay(reply: Envelope) -> list[Envelope]:
        if reply.metadata.message_type == "train":
            if reply.metadata.group_id == "1" and reply.metadata.src_node_id == kept_from[0]:
                return [again(reply, kept[0])]
            if not kept:
                kept.append(reply.content)
                kept_from.append(reply.metadata.src_node_id)
        return [reply]

    kept_from: list[int] = []
    both = fedotp._replace(cohort=lambda server_round: [0, 1, 2])
    outcome, _ = flower_grid(both, fault=replay)
    late = (1000 - kept_from[0]) // 7
    assert_bitwise_identical(outcome[:2], in_process(without(both, late, 1))[:2])
    assert [line for line in log if "left out" in line and "round 1" in line]


def test_a_message_of_an_unknown_node_is_dropped(fedotp, log):
    """Node 1000 - 7 * 9 was never asked, and replies with a copy of another reply."""

    def stranger(reply: Envelope) -> list[Envelope]:
        if reply.metadata.message_type != "train":
            return [reply]
        copy = again(reply, reply.content)
        copy.metadata.__dict__["_src_node_id"] = 1000 - 7 * 9
        return [copy, reply]

    outcome, _ = flower_grid(fedotp, fault=stranger)
    assert_bitwise_identical(outcome, in_process(fedotp))
    assert sum("left out" in line for line in log) == 4


def test_a_round_without_messages_changes_nothing(fedotp):
    outcome, _ = flower_grid(
        fedotp, fault=lambda reply: [] if reply.metadata.group_id == "0" else [reply]
    )
    answers, state = fedotp.server.init()
    drawn, states = fedotp.cohort(1), {}
    for client in fedotp.cohort(0):  # they did train, and kept their states
        states[client] = fedotp.client(client, 0, answers[client], {})[1]
    payloads = {
        client: fedotp.client(client, 1, answers[client], states.get(client, {}))[0]
        for client in drawn
    }
    assert_bitwise_identical(outcome[:2], fedotp.server.step(payloads, state))


def test_a_client_that_refuses_its_broadcast_keeps_its_state_and_is_left_out(fedotp, log):
    """If the backbones differ, the reply is an error that names both, and nothing is trained."""
    app = flower.client_app(
        fedotp.client,
        expect=lambda client: fp.wire.Expected(fedotp.broadcast_form(client), {"backbone": "x"}),
        max_bytes=MAX_BYTES,
    )
    grid, strategy = InProcessGrid(app, range(3)), strategy_of(fedotp)
    result = strategy.start(grid, ArrayRecord(), num_rounds=1)
    assert result.train_metrics_clientapp == {1: {"asked": 2, "accepted": 0}}
    assert not any(grid.context(node).state for node in grid.contexts)
    assert_bitwise_identical((strategy.answers, strategy.state), fedotp.server.init())
    assert all("error 2" in line and "same backbone" in line for line in log if "left out" in line)
    assert sum("left out" in line for line in log) == 2


# Nodes of clients


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


# States of clients


def test_a_state_in_a_directory_is_kept_after_the_run(tmp_path):
    """Two runs of one round, on nodes that are new each time, end as one run of two."""
    federation = FEDERATIONS["fedhpl"]()
    answers, state = federation.server.init()
    for server_round in range(2):
        app = flower.client_app(
            federation.client, expect=downward(federation), max_bytes=MAX_BYTES, directory=tmp_path
        )
        grid = InProcessGrid(app, range(3))
        nodes = flower.client_nodes(grid, range(3))
        payloads = flower.run_round(
            grid,
            answers,
            nodes=nodes,
            server_round=server_round,
            expect=upward(federation),
            max_bytes=MAX_BYTES,
            timeout=5.0,
        )
        answers, state = federation.server.step(payloads, state)
        assert not any(grid.context(node).state for node in nodes.values())
        assert grid.timeouts[-1] == 5.0
    expected = in_process(federation)
    assert_bitwise_identical((answers, state), expected[:2])
    assert_bitwise_identical(
        {client: fp.load_checkpoint(tmp_path / str(client))["after"] for client in range(3)},
        expected.clients,
    )


@pytest.mark.parametrize("lost", [0, 1])
def test_a_server_killed_before_saving_resumes_bitwise_identically(tmp_path, lost):
    """Clients saved the lost round. They repeat it on new nodes, from the state before it."""
    federation, clients, server = FEDERATIONS["fedhpl"](), tmp_path / "clients", tmp_path / "server"
    answers, state = federation.server.init()
    fp.save_checkpoint({"round": 0, "answers": answers, "state": state}, server)
    for killed in [True, False]:
        grid = InProcessGrid(
            flower.client_app(
                federation.client,
                expect=downward(federation),
                max_bytes=MAX_BYTES,
                directory=clients,
            ),
            range(3),
        )
        nodes, kept = flower.client_nodes(grid, range(3)), fp.load_checkpoint(server)
        answers, state = kept["answers"], kept["state"]
        for now in range(kept["round"], federation.rounds):
            payloads = flower.run_round(
                grid,
                answers,
                nodes=nodes,
                server_round=now,
                expect=upward(federation),
                max_bytes=MAX_BYTES,
            )
            if killed and now == lost:
                break
            answers, state = federation.server.step(payloads, state)
            fp.save_checkpoint({"round": now + 1, "answers": answers, "state": state}, server)
    expected = in_process(federation)
    assert_bitwise_identical((answers, state), expected[:2])
    assert_bitwise_identical(
        {client: fp.load_checkpoint(clients / str(client))["after"] for client in range(3)},
        expected.clients,
    )


@pytest.mark.parametrize("kept", ["in a directory", "in the context"])
def test_a_repeated_broadcast_is_answered_from_the_previous_state(tmp_path, kept):
    """This holds for clients that change their state in place, and across runs."""

    def train(
        client: int, server_round: int, broadcast: fp.interfaces.Message, state: Any
    ) -> tuple[fp.interfaces.Message, Any]:
        state.setdefault("seen", []).append(server_round)
        return {"seen": torch.tensor([len(state["seen"])])}, state

    form = {"seen": torch.zeros(1, dtype=torch.int64)}
    folder = tmp_path if kept == "in a directory" else None
    grid = InProcessGrid(
        flower.client_app(
            train,
            expect=lambda client: fp.wire.Expected(form),
            max_bytes=MAX_BYTES,
            directory=folder,
        ),
        [0],
    )

    def ask(server_round: int, number: int) -> int:
        answers = {0: {"seen": torch.tensor([number])}}
        wire = {"expect": lambda client: fp.wire.Expected(form), "max_bytes": MAX_BYTES}
        return int(
            flower.run_round(grid, answers, nodes={0: 1000}, server_round=server_round, **wire)[0][
                "seen"
            ]
        )

    assert [ask(0, 5), ask(0, 5), ask(0, 5)] == [1, 1, 1]
    assert [ask(1, 5), ask(1, 5), ask(1, 6)] == [2, 2, 3]
    assert [ask(0, 5), ask(0, 5)] == [4, 4]


def test_a_state_may_be_any_tree_and_other_records_are_kept(tmp_path):
    tree = {
        "step": 3,
        "seen": (True, None, 1.5),
        "nested": {7: [torch.tensor([float("nan"), -0.0], dtype=torch.bfloat16)]},
        "rows": fp.Weighted(torch.ones(2), torch.ones(2)),
    }
    records = RecordDict({"mod": MetricRecord({"loss": 1.0})})
    assert remembered(records) == {}
    remember(tree, records)
    assert_bitwise_identical(remembered(records), tree)
    remember({}, records)
    assert remembered(records) == {}
    assert records["mod"] == MetricRecord({"loss": 1.0})


@pytest.mark.bad_input
@pytest.mark.parametrize("cohort", [[0, 7], [7], ["0"]])
def test_a_cohort_of_clients_without_an_answer_is_refused(fedotp, cohort):
    grid, strategy = grid_of(fedotp), strategy_of(fedotp, cohort=lambda server_round: cohort)
    with pytest.raises(
        ValueError,
        match=rf"^`cohort` must name clients that have an answer; got \[{cohort[-1]!r}\]\.",
    ):
        strategy.start(grid, ArrayRecord(), num_rounds=1)
    assert grid.asked == []
    assert_bitwise_identical((strategy.answers, strategy.state), fedotp.server.init())


# Packing

MIXED = {
    "half": torch.tensor([1.5, -0.0], dtype=torch.bfloat16),
    "counts": torch.tensor([2**62 + 1]),
    "seen": torch.tensor([[True], [False]]),
    "rows": fp.Weighted(torch.tensor([[1.0], [float("nan")]]), torch.tensor([2.0, 0.0])),
}


def test_packing_keeps_every_dtype_and_hides_unknown_rows():
    header = fp.wire.Header({"backbone": "x"}, 3, "7", {"note": "ü"})
    records = flower.pack(MIXED, header=header)
    message, arrived = flower.unpack(
        records, expect=fp.wire.Expected(MIXED, {"backbone": "x"}), max_bytes=1000
    )
    known = fp.Weighted(torch.tensor([[1.0], [0.0]]), torch.tensor([2.0, 0.0]))
    assert_bitwise_identical(message, {**MIXED, "rows": known})
    assert arrived == header
    assert records["fedprompt"]["blob"].data == fp.wire.encode_payload(MIXED, header=header)


def test_large_messages_are_sent_in_chunks():
    blob = {"large": torch.arange(3 * 2**20, dtype=torch.int32)}
    sizes = [
        len(each.deflate())
        for each in get_all_nested_objects(flower.pack(blob, header=fp.wire.Header())).values()
    ]
    assert max(sizes) < 2**23
    assert sum(size > 2**20 for size in sizes) == 3  # 12 MiB in chunks of 5


def test_the_strategies_of_flower_refuse_to_average_messages():
    records = flower.pack(MIXED, header=fp.wire.Header())
    replies = []
    for node in (1, 2):
        question = Envelope(RecordDict(), node, "train")
        replies.append(
            Envelope(
                RecordDict({**records, "metrics": MetricRecord({"num-examples": 1})}),
                reply_to=question,
            )
        )
    with pytest.raises(TypeError, match="safetensors"):
        FedAvg().aggregate_train(1, replies)


def blob_record(blob: bytes = b"", stype: str = "safetensors", key: str = "blob") -> ArrayRecord:
    return ArrayRecord({key: Array("uint8", (len(blob),), stype, blob)})


STRANGE = {
    "nothing": RecordDict(),
    "another name": RecordDict({"arrays": blob_record()}),
    "more": RecordDict({"fedprompt": blob_record(), "metrics": MetricRecord({"loss": 1.0})}),
    "a configuration": RecordDict({"fedprompt": ConfigRecord({"blob": b""})}),
    "no array": RecordDict({"fedprompt": ArrayRecord()}),
    "another key": RecordDict({"fedprompt": blob_record(key="weights")}),
    "two arrays": RecordDict(
        {"fedprompt": ArrayRecord({**blob_record(), **blob_record(key="more")})}
    ),
    "numpy": RecordDict({"fedprompt": blob_record(stype="numpy.ndarray")}),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("content", STRANGE)
def test_foreign_records_are_refused(content):
    with pytest.raises(
        ValueError,
        match=r"^`records` must contain one blob under 'fedprompt', and nothing else; got \[",
    ):
        flower.unpack(STRANGE[content], expect=fp.wire.Expected(MIXED), max_bytes=1000)


@pytest.mark.bad_input
def test_messages_that_cannot_be_decoded_are_refused():
    records = flower.pack(MIXED, header=fp.wire.Header({"backbone": "x"}))
    with pytest.raises(ValueError, match="same backbone"):
        flower.unpack(records, expect=fp.wire.Expected(MIXED, {"backbone": "y"}), max_bytes=1000)
    with pytest.raises(ValueError, match="at most 300 bytes long"):
        flower.unpack(records, expect=fp.wire.Expected(MIXED), max_bytes=300)
    with pytest.raises(ValueError, match="finite"):
        flower.pack({"scale": torch.tensor(float("nan"))}, header=fp.wire.Header())


# The documentation


def test_the_blocks_of_the_reference_page_run(capsys):
    """The page has a client app, a plain loop, and the same loop as a strategy."""
    names: dict[str, Any] = {}
    page = Path(__file__).parents[2] / "docs" / "reference" / "flower.md"
    for block in re.findall(r"^```py\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
        exec(compile(block, page, "exec"), names)
    names["main"](InProcessGrid(names["app"], range(3)), None)
    names["main_of_a_strategy"](InProcessGrid(names["app"], range(3)), None)
    draws = [
        fp.stream_generator(0, server_round=server_round, purpose="cohort")
        for server_round in range(2)
    ]
    drawn = [fp.cohort(range(3), size=2, generator=draw) for draw in draws]
    first = sum(10 * (client + 1) for client in drawn[0]) / 20
    weights = {client: 20 if client in drawn[0] else 10 for client in drawn[1]}
    second = first + sum(weight * (client + 1) for client, weight in weights.items()) / sum(
        weights.values()
    )
    shown = f"{torch.full((3,), second)}\n"
    assert capsys.readouterr().out == shown * 2
    assert len(names["ledger"].entries) == 8


def test_the_examples_of_the_docstrings_run():
    names = {name: getattr(fp, name) for name in dir(fp) if name[0].isalpha()}
    names |= {"torch": torch, "RecordDict": RecordDict}
    names |= {"Expected": fp.wire.Expected, "Header": fp.wire.Header}
    names |= {name: getattr(flower, name) for name in flower.__all__}
    for name in flower.__all__:
        for test in doctest.DocTestFinder(recurse=False).find(
            getattr(flower, name), name, globs=names
        ):
            assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test).failed == 0, name
