"""States of clients, kept between rounds and over a crash."""

from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, MetricRecord, RecordDict

import fedprompt as fp
from federations import FEDERATIONS, assert_bitwise_identical, in_process
from fedprompt import flower
from fedprompt.flower.records import remember, remembered
from flower_grid import InProcessGrid
from flower_runs import MAX_BYTES, downward, grid_of, strategy_of, upward

pytestmark = pytest.mark.flower


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
