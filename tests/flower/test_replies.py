"""All failures of a reply: it is dropped with a logged reason, and the round goes on."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, Error, MetricRecord, RecordDict
from flwr.app import Message as Envelope

import fedprompt as fp
from federations import Federation, assert_bitwise_identical, in_process
from fedprompt import flower
from flower_grid import Fault, InProcessGrid
from flower_runs import MAX_BYTES, again, cohort_member, flower_grid, strategy_of, upward, without

pytestmark = pytest.mark.flower


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


def test_a_round_that_overflows_an_adaptive_rule_is_dropped(log):
    """Client 0 sends 3e38 in round 1. The run ends as one without this round."""

    def value(client, server_round):
        return 3e38 if (client, server_round) == (0, 1) else float(client + server_round)

    def payload(client, server_round):
        return {"head": fp.Weighted(torch.full((2,), value(client, server_round)), torch.ones(()))}

    server = fp.averaging(
        {"head": torch.zeros(2)}, clients=range(2), update=fp.fedadam(learning_rate=0.1)
    )
    form = fp.wire.Expected({"head": torch.zeros(2)})
    app = flower.client_app(
        lambda client, server_round, answer, state: (payload(client, server_round), state),
        expect=lambda client: form,
        max_bytes=MAX_BYTES,
    )
    strategy = flower.ServerStrategy(
        server,
        cohort=lambda server_round: range(2),
        expect=lambda client: fp.wire.Expected(payload(0, 0)),
        max_bytes=MAX_BYTES,
    )
    strategy.start(InProcessGrid(app, range(2)), ArrayRecord(), num_rounds=3)
    answers, state = server.init()
    for server_round in (0, 2):
        messages = {client: payload(client, server_round) for client in range(2)}
        answers, state = server.step(messages, state)
    assert_bitwise_identical((strategy.answers, strategy.state), (answers, state))
    (line,) = (line for line in log if "dropped" in line)
    assert line.startswith("round 1 is dropped: ")
    assert line.endswith("Largest magnitude of each client: 0: 3e+38, 1: 2")


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
