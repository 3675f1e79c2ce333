"""A reply that is not as asked is dropped with one line in the log, and the round goes on."""

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Error, MetricRecord, RecordDict
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
    plain_method,
    states_of,
    strategy_of,
    without,
)
from small_method import COHORTS, Data, method
from tiny_federations import clip_federation

pytestmark = pytest.mark.flower

CLIENT = 4
"""Client whose reply is damaged. It takes part in rounds 0 and 3."""
MINE = {"fingerprint": lambda client: {"backbone": "mine"}}


def of(client: int, change: Fault, exchange: int = 0) -> Fault:
    """Change the reply of one client in one exchange of training."""
    place = "train", 1000 - 7 * client, str(exchange)

    def fault(reply: Envelope) -> list[Envelope]:
        meta = reply.metadata
        same = (meta.message_type, meta.src_node_id, meta.group_id) == place
        return change(reply) if same else [reply]

    return fault


def saying(content: Any) -> Fault:
    return lambda reply: [again(reply, content)]


def blob_of(reply: Envelope) -> bytes:
    (record,) = reply.content.array_records.values()
    return record["blob"].data


def blob(change: Callable[[bytes], bytes]) -> Fault:
    return lambda reply: saying(RecordDict({"fedprompt": blob_record(change(blob_of(reply)))}))(
        reply
    )


def encoded(change: Callable[[Any], Any] = lambda message: message, **fields: Any) -> Fault:
    """Change the message or the header."""

    def changed(blob: bytes) -> bytes:
        expect = fp.wire.Expected(method().form(CLIENT))
        message, header = fp.wire.decode_payload(blob, expect=expect, max_bytes=MAX_BYTES)
        return fp.wire.encode_payload(change(message), header=header._replace(**fields))

    return blob(changed)


def entries(value: Callable[[Any], Any], weight: Callable[[Any], Any] = lambda w: w) -> Fault:
    return encoded(
        lambda found: {n: fp.Weighted(value(e.value), weight(e.weight)) for n, e in found.items()}
    )


FATES: dict[str, tuple[Fault, str]] = {
    "truncated": (blob(lambda blob: blob[:-3]), "`blob` must"),
    "too long": (blob(lambda blob: blob + bytes(MAX_BYTES)), f"be at most {MAX_BYTES} bytes long"),
    "late": (encoded(server_round=5), "5"),
    "another client's": (encoded(client_id="2"), "'2'"),
    "of another backbone": (encoded(fingerprint={"backbone": "x"}), "same"),
    "of another form": (encoded(lambda message: {"x": torch.ones(3)}), "also ['x']"),
    "of another dtype": (entries(torch.Tensor.double), "F32"),
    "huge": (entries(lambda value: value + 1e17), "is dropped: its largest value is 1e+17"),
    "of a huge weight": (
        entries(lambda v: v, lambda weight: weight + 3e38),
        "is dropped: its largest weight is 3e+38",
    ),
    "an error": (saying(Error(2, "out of\nmemory " * 1000)), "error 2"),
    "foreign": (saying(RecordDict({"fedprompt": MetricRecord({"loss": 1.0})})), "one blob under"),
    "more": (
        lambda r: [again(r, RecordDict({**r.content, "loss": MetricRecord({"loss": 1.0})}))],
        "and nothing else",
    ),
    "silent": (lambda reply: [], "no reply came from clients [4]"),
}


@pytest.mark.parametrize("fate", FATES)
def test_a_message_that_is_not_as_asked_is_dropped_with_one_logged_reason(fate, log):
    change, reason = FATES[fate]
    app = flower.client_app(method(1), Data, max_bytes=MAX_BYTES, **MINE)
    grid, strategy = (
        InProcessGrid(app, CLIENTS, fault=of(CLIENT, change)),
        strategy_of(method(1), **MINE),
    )
    strategy.start(grid, ArrayRecord(), num_rounds=len(COHORTS))
    found = strategy.now._replace(clients=states_of(grid))
    assert_equal(tuple(found), tuple(in_process(without(CLIENT, 0))))
    (line,) = log
    assert line.startswith("round 0: ")
    assert reason in line
    assert "\n" not in line
    assert len(line) < 400


def npy(array: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, np.asarray(array), **options)
    return file.getvalue()


def zipped() -> bytes:
    file = io.BytesIO()
    np.savez(file, a=np.zeros(3))
    return file.getvalue()


BOMB = npy([1.0, 2, 3]).replace(b"(3,), }" + b" " * 7, b"(99999999,), }")
BYTES = {
    b"": "be an array of NumPy",
    npy([1.0, 2, 3])[:-3]: "have 24 bytes; got 21",
    npy([1.0, 2, 3]) + b"more": "have 24 bytes; got 28",
    zipped(): "be an array of NumPy",
    BOMB: "have shape (3,); got (99999999,)",
    b"\x80\x04K\x01.": "be an array of NumPy",
    npy([{}, 1, 2], allow_pickle=True): "have a dtype of PyTorch; got object",
    npy([1j, 2, 3]): "have a dtype of PyTorch; got complex128",
    npy(["a", "b", "c"]): "have a dtype of PyTorch; got <U1",
    npy(np.zeros(3, ">f4")): "have a dtype of PyTorch; got >f4",
    npy([1.0, 2]): "have shape (3,); got (2,)",
    npy([np.nan, 2, 3]): "be finite",
    npy([1e300, 2, 3]): "be finite",
    npy([1e17, 2, 3]): "its largest value is 1e+17",
}
METRICS = [("num-examples", number) for number in (-1.0, float("nan"), float("inf"), 1e300)]
METRICS += [("loss", [1.0, 2.0]), ("others", 2)]


def plain(data: bytes | None = None, **metrics: Any) -> Fault:
    """Change the bytes of an array, or the metrics."""

    def change(reply: Envelope) -> list[Envelope]:
        arrays, own = reply.content["arrays"], reply.content["metrics"]
        changed = {} if data is None else {"b": Array("", (), "numpy.ndarray", data)}
        figures = MetricRecord(metrics if "others" in metrics else {**own, **metrics})
        return saying(
            RecordDict({"arrays": ArrayRecord({**arrays, **changed}), "metrics": figures})
        )(reply)

    return change


HOSTILE = [(plain(data), reason) for data, reason in BYTES.items()]
HOSTILE += [(plain(**{name: value}), "`metrics` must have") for name, value in METRICS]
HOSTILE += [(saying(RecordDict({"arrays": ArrayRecord()})), "have arrays and metrics")]


@pytest.mark.parametrize("place", range(len(HOSTILE)))
def test_a_hostile_array_of_flower_is_dropped_and_allocates_nothing(place, log):
    change, reason = HOSTILE[place]
    made = plain_method()
    app = flower.client_app(made, lambda client, _: client, max_bytes=MAX_BYTES, plain=True)
    strategy = strategy_of(made, [[0, 1]] * 2, plain=True)
    strategy.start(InProcessGrid(app, [0, 1], fault=of(1, change)), ArrayRecord(), num_rounds=2)
    *_, expected = fp.run_rounds(made, lambda client, _: client, [[0], [0, 1]])
    assert_equal(strategy.now.server, expected.server)
    (line,) = log
    assert reason in line


def test_only_the_first_of_two_replies_is_used(log):
    other = entries(lambda value: value + 1)

    def twice(reply: Envelope) -> list[Envelope]:
        if reply.metadata.message_type != "train":
            return [reply]
        return [reply, reply, *(other(reply) if reply.content.array_records else [])]

    found, _ = over_grid(method(), fault=twice)
    assert_equal(tuple(found), tuple(in_process(method())))
    others = sum(len(cohort) for cohort in COHORTS) - 1  # without client 5, who sends no payload
    assert sum("asked, once" in line for line in log) == others + 1  # a line a node and a round


def test_a_message_of_an_earlier_exchange_is_dropped(log):
    """Client 0 repeats in the second exchange of round 0 its payload of the first."""
    kept: list[RecordDict] = []

    def replay(reply: Envelope) -> list[Envelope]:
        of(0, lambda first: kept.append(first.content) or [])(reply)
        return of(0, lambda second: [again(second, kept[0])], exchange=1)(reply)

    found, _ = over_grid(method(), [[0, 1]], fault=replay)
    made, exchanges = method(), iter(range(2))
    server = made.server._replace(
        step=lambda server_round, payloads, state: made.server.step(
            server_round, {c: payloads[c] for c in [0, 1][next(exchanges) :]}, state
        )
    )
    assert_equal(tuple(found), tuple(in_process(made._replace(server=server), [[0, 1]])))
    (line,) = log
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


def test_many_replies_of_a_node_are_one_line_in_the_log(log):
    wire = _rounds.Wire(sending(0.0), MAX_BYTES, _rounds.unchecked, None, None, None)
    for exchange in (0, 0, 1):
        wire.accept(exchange, [Envelope(RecordDict(), 1, "train")] * 50, {})
    assert len(log) == 2


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


def sending(largest: float, weight: float = 1.0) -> fp.Method:
    """Return a method of which client 0 sends a large number in round 1, with this weight."""

    def train(data, answer, state):
        large = (data.id, data.server_round) == (0, 1)
        value = torch.full((2,), largest if large else float(data.id + data.server_round))
        return {"head": fp.Weighted(value, torch.tensor(weight if large else 0.25))}, state

    server = fp.averaging_server({"head": torch.zeros(2)}, fp.aggregation.adam(learning_rate=0.1))
    form = {"head": fp.Weighted(torch.zeros(2), torch.ones(()))}
    return fp.Method(train, server, lambda *all: None, form=lambda client: form)


ALL = [0, 1]
LIMITED = [
    (3e38, ALL, {"max_abs": 3.4e38}, "round 1: clients [0] are dropped: "),
    (3e38, [0], {"max_abs": 3.4e38}, "round 1: round is dropped: "),
    (3e38, ALL, {"max_abs": 100.0}, "of magnitude 100 or less"),
    (3e38, ALL, {"max_weight": 0.5}, "`payload['head'].weight` must be at most 0.5"),
    (1e17, ALL, {}, "round 1: client 0 is dropped: its largest value is 1e+17"),
    (-1e17, [0], {}, "round 1: client 0 is dropped: its largest value is 1e+17"),
    (1e5, ALL, {}, "round 1: client 0 is dropped: its largest value is 1e+05"),
]


@pytest.mark.parametrize(("largest", "cohort", "limits", "reason"), LIMITED)
def test_one_huge_reply_does_not_freeze_an_adaptive_rule(largest, cohort, limits, reason, log):
    found, _ = over_grid(sending(largest), [ALL, cohort, ALL], **limits)
    honest = [ALL, [client for client in cohort if client], ALL]
    assert_equal(found.server, in_process(sending(0.0), honest).server)
    (line,) = log
    assert reason in line
    if "clients [0]" in line:
        assert line.endswith("Largest magnitude of each client: 0: 3e+38, 1: 2")


def test_a_client_without_others_may_have_any_number_of_images(log):
    """Its weight takes nothing from others, so it needs no `max_weight`."""
    found, _ = over_grid(sending(5.0, weight=25_000.0), [ALL, [0], ALL])
    assert_equal(found.server, in_process(sending(5.0, weight=25_000.0), [ALL, [0], ALL]).server)
    assert log == []


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
    assert all("error 2" in line and reason in line for line in log)
    assert len(log) == 2


def test_a_client_that_sends_more_rows_than_its_size_has_is_dropped(log):
    made = clip_federation()
    small = promptfl(made, sizes={1: 2})

    def larger(blob: bytes) -> bytes:
        expect = fp.wire.Expected(small.form(1))
        _, header = fp.wire.decode_payload(blob, expect=expect, max_bytes=MAX_BYTES)
        whole = {n: e._replace(weight=e.weight + 1) for n, e in small.form(0).items()}
        return fp.wire.encode_payload(whole, header=header)

    found, _ = over_grid(small, [[0, 1]], data=made.data, fault=of(1, blob(larger)))
    assert_equal(found.server, in_process(small, [[0]], data=made.data).server)
    (line,) = log
    assert "(1, 1, 2, 16); got (1, 1, 4, 16)" in line


def test_a_client_whose_state_is_no_tree_is_left_out(log):
    made = method(1)

    def train(data, answer, state):
        payload, state = made.client(data, answer, state)
        return payload, {"own": object()} if data.id == 0 else state

    found, _ = over_grid(made._replace(client=train), [[0, 1]])
    assert_equal(tuple(found), tuple(in_process(method(1), [[1]])))
    (line,) = log
    assert "be a dict, list" in line
