"""Four federations over a Flower grid that serializes messages equal a plain loop."""

from typing import Any

import pytest
import torch

import fedprompt as fp
from federations import FEDERATIONS, assert_bitwise_identical, in_process
from fedprompt import flower
from flower_runs import MAX_BYTES, flower_grid, grid_of, upward

pytestmark = pytest.mark.flower


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
