"""All failures of a reply: it is dropped with a logged reason, and the round goes on."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Error, MetricRecord, RecordDict
from flwr.app import Message as Envelope

import fedprompt as fp
from fedprompt import flower
from fedprompt.flower import _rounds
from fedprompt.methods import promptfl
from flower_grid import Fault, InProcessGrid
from flower_runs import (
    CLIENTS,
    MAX_BYTES,
    again,
    assert_equal,
    blob_record,
    in_process,
    over_grid,
    states_of,
    strategy_of,
    without,
)
from small_method import COHORTS, Data, method
from tiny_federations import clip_federation

pytestmark = pytest.mark.flower

CLIENT = 4
"""Client whose reply is damaged. It takes part in rounds 0 and 3."""


def spoil(client: int, change: Callable[[bytes], bytes], server_round: int = 0) -> Fault:
    """Change the blob of one client in one round."""

    def fault(reply: Envelope) -> list[Envelope]:
        if reply.metadata.message_type == "train" and concerns(reply, client, server_round):
            (record,) = reply.content.array_records.values()
            return [replying(reply, change(record["blob"].data))]
        return [reply]

    return fault


def concerns(reply: Envelope, client: int, server_round: int) -> bool:
    return (reply.metadata.src_node_id, reply.metadata.group_id) == (
        1000 - 7 * client,
        str(server_round),
    )


def replying(reply: Envelope, blob: bytes) -> Envelope:
    return again(reply, RecordDict({"fedprompt": blob_record(blob)}))


def reheaded(blob: bytes, **fields: Any) -> bytes:
    expect = fp.wire.Expected(method().form(CLIENT))
    message, header = fp.wire.decode_payload(blob, expect=expect, max_bytes=MAX_BYTES)
    return fp.wire.encode_payload(message, header=header._replace(**fields))


def other_form(blob: bytes) -> bytes:
    header = fp.wire.Header({"backbone": "mine"}, 0, str(CLIENT))
    return fp.wire.encode_payload({"x": torch.ones(3)}, header=header)


SPOILT: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "truncated": (lambda blob: blob[:-3], "`blob` must"),
    "too long": (
        lambda blob: blob + bytes(MAX_BYTES),
        f"`blob` must be at most {MAX_BYTES} bytes long",
    ),
    "late": (partial(reheaded, server_round=5), "5"),
    "another client's": (partial(reheaded, client_id="2"), "'2'"),
    "of another backbone": (partial(reheaded, fingerprint={"backbone": "x"}), "same"),
    "of another form": (other_form, "also ['x']"),
}


@pytest.mark.parametrize("fate", SPOILT)
def test_a_corrupt_message_is_dropped_with_a_logged_reason(fate, log):
    change, reason = SPOILT[fate]
    mine = {"fingerprint": lambda client: {"backbone": "mine"}}
    grid = InProcessGrid(
        flower.client_app(method(1), Data, max_bytes=MAX_BYTES, **mine),
        CLIENTS,
        fault=spoil(CLIENT, change),
    )
    strategy = strategy_of(method(1), **mine)
    strategy.start(grid, ArrayRecord(), num_rounds=len(COHORTS))
    found = strategy.now._replace(clients=states_of(grid))
    assert_equal(tuple(found), tuple(in_process(without(CLIENT, 0))))
    (line,) = (line for line in log if "left out" in line)
    assert line.startswith(f"round 0: a reply of node {1000 - 7 * CLIENT} is left out: `")
    assert reason in line


def test_a_client_that_sends_more_rows_than_its_size_has_is_dropped(log):
    made = clip_federation()
    small = promptfl(made, sizes={1: 2})

    def larger(blob: bytes) -> bytes:
        expect = fp.wire.Expected(small.form(1))
        _, header = fp.wire.decode_payload(blob, expect=expect, max_bytes=MAX_BYTES)
        whole = {n: e._replace(weight=e.weight + 1) for n, e in small.form(0).items()}
        return fp.wire.encode_payload(whole, header=header)

    found, _ = over_grid(small, [[0, 1]], data=made.data, fault=spoil(1, larger))
    assert_equal(found.server, in_process(small, [[0]], data=made.data).server)
    (line,) = (line for line in log if "left out" in line)
    assert "(1, 1, 2, 16); got (1, 1, 4, 16)" in line


@pytest.mark.parametrize(
    "content",
    [Error(2, "out of\nmemory " * 1000), RecordDict({"fedprompt": MetricRecord({"loss": 1.0})})],
)
def test_errors_and_foreign_records_are_left_out(content, log):
    def fault(reply: Envelope) -> list[Envelope]:
        return [again(reply, content) if concerns(reply, CLIENT, 0) else reply]

    found, _ = over_grid(method(1), fault=fault)
    assert_equal(tuple(found), tuple(in_process(without(CLIENT, 0))))
    (line,) = (line for line in log if "left out" in line)
    assert "\n" not in line  # a reason is one line, even if the sender's text is not
    assert len(line) < 400


def test_only_the_first_of_two_replies_is_used(log):
    def twice(reply: Envelope) -> list[Envelope]:
        if reply.metadata.message_type != "train" or not reply.content.array_records:
            return [reply, reply] if reply.metadata.message_type == "train" else [reply]
        (record,) = reply.content.array_records.values()
        expect = fp.wire.Expected(method().form(0))
        payload, header = fp.wire.decode_payload(
            record["blob"].data, expect=expect, max_bytes=MAX_BYTES
        )
        payload = {name: entry._replace(value=entry.value + 1) for name, entry in payload.items()}
        return [reply, reply, replying(reply, fp.wire.encode_payload(payload, header=header))]

    found, _ = over_grid(method(), fault=twice)
    assert_equal(tuple(found), tuple(in_process(method())))
    others = sum(len(cohort) for cohort in COHORTS) - 1  # without client 5, who sends no payload
    assert sum("asked, once" in line for line in log) == others + 1  # a line a node and a round


def test_a_message_of_an_earlier_exchange_is_dropped(log):
    """Client 0 repeats in the second exchange of round 0 its payload of the first."""
    kept: list[RecordDict] = []

    def replay(reply: Envelope) -> list[Envelope]:
        if reply.metadata.message_type == "train" and concerns(reply, 0, 0):
            kept.append(reply.content)
        return [again(reply, kept[0]) if concerns(reply, 0, 1) else reply]

    found, _ = over_grid(method(), [[0, 1]], fault=replay)
    made, exchanges = method(), iter(range(2))
    server = made.server._replace(
        step=lambda server_round, payloads, state: made.server.step(
            server_round, {c: payloads[c] for c in [0, 1][next(exchanges) :]}, state
        )
    )
    assert_equal(tuple(found), tuple(in_process(made._replace(server=server), [[0, 1]])))
    (line,) = (line for line in log if "left out" in line)
    assert line.startswith("round 0: a reply of node 1000 is left out: `blob` must be of round 1")


def test_a_message_of_an_unknown_node_is_dropped(log):
    """Node 1000 - 7 * 9 was never asked, and replies with a copy of another reply."""

    def stranger(reply: Envelope) -> list[Envelope]:
        if reply.metadata.message_type != "train":
            return [reply]
        copy = again(reply, reply.content)
        copy.metadata.__dict__["_src_node_id"] = 1000 - 7 * 9
        return [copy, reply]

    found, _ = over_grid(method(1), fault=stranger)
    assert_equal(tuple(found), tuple(in_process(method(1))))
    assert sum("left out" in line for line in log) == sum(map(bool, COHORTS))  # one a round


def test_a_round_without_messages_changes_nothing():
    found, _ = over_grid(
        method(1),
        [[0, 1], [1, 2]],
        fault=lambda reply: [] if reply.metadata.group_id == "0" else [reply],
    )
    made = method(1)

    def step(server_round, payloads, state):
        return made.server.step(server_round, payloads, state) if server_round else state

    expected = in_process(made._replace(server=made.server._replace(step=step)), [[0, 1], [1, 2]])
    assert_equal(tuple(found), tuple(expected))  # clients did train, and kept their states


def sending(largest: float) -> fp.Method:
    """Return a method of which client 0 sends a large number in round 1."""

    def train(data, answer, state):
        large = (data.id, data.server_round) == (0, 1)
        value = torch.full((2,), largest if large else float(data.id + data.server_round))
        return {"head": fp.Weighted(value, torch.ones(()))}, state

    server = fp.averaging_server({"head": torch.zeros(2)}, fp.aggregation.adam(learning_rate=0.1))
    return fp.Method(
        train, server, lambda *all: None, form=lambda client: train(Data(0, 0), {}, {})[0]
    )


def test_a_client_that_alone_overflows_an_adaptive_rule_is_dropped(log):
    """Client 0 sends 3e38 in round 1, and client 1 is unaffected."""
    found, _ = over_grid(sending(3e38), [[0, 1]] * 3, max_abs=3.4e38)
    *_, expected = fp.run_rounds(sending(0.0), Data, [[0, 1], [1], [0, 1]])
    assert_equal(found.server, expected.server)
    (line,) = (line for line in log if "dropped" in line)
    assert line.startswith("round 1: clients [0] are dropped: ")
    assert line.endswith("Largest magnitude of each client: 0: 3e+38, 1: 2")


def test_a_round_that_the_server_refuses_with_every_client_is_dropped(log):
    found, _ = over_grid(sending(3e38), [[0, 1], [0], [0, 1]], max_abs=3.4e38)
    *_, expected = fp.run_rounds(sending(0.0), Data, [[0, 1], [], [0, 1]])
    assert_equal(found.server, expected.server)
    (line,) = (line for line in log if "dropped" in line)
    assert line.startswith("round 1: round is dropped: ")


@pytest.mark.parametrize(
    ("limits", "reason"), [({"max_abs": 100.0}, "of magnitude 100 or less"),
                           ({"max_weight": 0.5}, "`payload['head'].weight` must be at most 0.5")]
)  # fmt: skip
def test_a_value_or_a_weight_above_its_limit_costs_only_its_client_the_round(limits, reason, log):
    method = sending(3e38)

    def train(data, answer, state):
        payload, state = method.client(data, answer, state)
        large = payload["head"].value[0] > 1e30
        weight = torch.tensor(1.0 if large else 0.25)
        return {"head": payload["head"]._replace(weight=weight)}, state

    found, _ = over_grid(method._replace(client=train), [[0, 1]] * 3, **limits)
    *_, expected = fp.run_rounds(sending(0.0), Data, [[0, 1], [1], [0, 1]])
    assert_equal(found.server, expected.server)
    (line,) = (line for line in log if "left out" in line)
    assert reason in line


def test_many_replies_of_a_node_are_one_line_in_the_log(log):
    made = sending(0.0)
    wire = _rounds.Wire(made, MAX_BYTES, _rounds.unchecked, None, None, None)
    reply = Envelope(RecordDict(), 1, "train")
    for exchange in (0, 0, 1):
        wire.accept(exchange, [reply] * 50, {})
    assert sum("left out" in line for line in log) == 2


def answering(answer: Callable[..., Any]) -> fp.Method:
    made = method(1)
    return made._replace(server=made.server._replace(answer=answer))


LARGER = {"x": torch.zeros(4)}


@pytest.mark.parametrize(
    ("made", "options", "reason"),
    [
        (method(1), {"fingerprint": lambda client: {"backbone": "x"}}, "same backbone"),
        (method(1), {"max_bytes": 100}, "at most 100 bytes long"),
        (answering(lambda client, state: LARGER), {}, "in the shape"),
        (answering(lambda client, state: {"y": torch.zeros(3)}), {}, "no other tensors"),
    ],
)
def test_a_client_that_refuses_its_answer_keeps_its_state_and_is_left_out(
    made, options, reason, log
):
    """The reply is an error with the reason, and nothing is trained."""
    app = flower.client_app(method(1), Data, **{"max_bytes": MAX_BYTES} | options)
    grid, strategy = InProcessGrid(app, range(3)), strategy_of(made, [[0, 2]])
    result = strategy.start(grid, ArrayRecord(), num_rounds=1)
    assert result.train_metrics_clientapp[1]["accepted"] == 0
    assert not any(grid.context(node).state for node in grid.contexts)
    assert_equal(strategy.now.server, made.server.state)
    refused = [line for line in log if "left out" in line]
    assert all("error 2" in line and reason in line for line in refused)
    assert len(refused) == 2


def test_a_client_whose_state_is_no_tree_is_left_out(log):
    made = method(1)

    def train(data, answer, state):
        payload, state = made.client(data, answer, state)
        return payload, {"own": object()} if data.id == 0 else state

    found, _ = over_grid(made._replace(client=train), [[0, 1]])
    assert_equal(tuple(found), tuple(in_process(method(1), [[1]])))
    (line,) = (line for line in log if "left out" in line)
    assert "be a dict, list" in line
