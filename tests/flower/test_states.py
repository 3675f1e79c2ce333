"""States of clients, kept between rounds and over a crash."""

from itertools import islice

import pytest
import torch
from flwr.app import ArrayRecord, MetricRecord, RecordDict

import fedprompt as fp
from fedprompt import flower
from fedprompt.flower._records import remember, remembered
from fedprompt.flower.client import _beside
from flower_grid import InProcessGrid
from flower_runs import CLIENTS, MAX_BYTES, assert_equal, grid_of, in_process, strategy_of
from small_method import COHORTS, Data, method

pytestmark = pytest.mark.flower


@pytest.mark.parametrize("lost", [None, 0, 3])
def test_a_resumed_run_is_bitwise_identical_even_if_the_server_lost_a_round(tmp_path, lost):
    """Each round has new nodes. Clients repeat a lost round from the state before it."""
    clients, server = tmp_path / "clients", tmp_path / "server"
    killed = False
    while (start := fp.load_checkpoint(server, default=None)) is None or (
        start.server_round < len(COHORTS) - 1
    ):
        app = flower.client_app(method(), Data, max_bytes=MAX_BYTES, directory=clients)
        grid = InProcessGrid(app, CLIENTS)
        strategy = strategy_of(method(), COHORTS, start=start)
        strategy.start(grid, ArrayRecord(), num_rounds=2)  # one round of two exchanges
        assert not any(grid.context(node).state for node in grid.contexts)
        if strategy.now.server_round == lost and not killed:
            killed = True
        else:
            fp.save_checkpoint(strategy.now, server)
    expected = in_process(method())
    assert_equal(start.server, expected.server)
    folders = {each.name: fp.load_checkpoint(each)["after"] for each in clients.iterdir()}
    assert_equal(folders, expected.clients)


def test_a_run_that_ends_within_a_round_continues_from_the_round_before():
    made = method()
    strategy = strategy_of(made)
    strategy.start(grid_of(made), ArrayRecord(), num_rounds=3)
    (expected,) = islice(fp.run_rounds(method(), Data, COHORTS), 1)
    assert_equal(tuple(strategy.now), tuple(expected._replace(clients={})))
    assert strategy.now.stateful == expected.stateful
    with pytest.raises(ValueError, match="must have the state of client 4, which"):
        strategy.now.model(made, Data(4, 0))


@pytest.mark.parametrize("kept", ["in a directory", "in the context"])
def test_a_repeated_answer_is_computed_from_the_previous_state(tmp_path, kept):
    """This holds for clients that change their state in place, and across runs."""

    def train(data, answer, state):
        state.setdefault("seen", []).append(data.server_round)
        return {"seen": torch.tensor([len(state["seen"])])}, state

    def step(server_round, payloads, state):
        return {"seen": payloads[0]["seen"]}

    zero = {"seen": torch.zeros(1, dtype=torch.int64)}
    server = fp.Server(zero, lambda client, state: state, step)
    made = fp.Method(train, server, predict=lambda *all: None, form=lambda client: zero)
    folder = tmp_path if kept == "in a directory" else None
    app = flower.client_app(made, Data, max_bytes=MAX_BYTES, directory=folder)
    grid = InProcessGrid(app, [0])

    def ask(server_round: int, number: int) -> int:
        wire = {"nodes": {0: 1000}, "max_bytes": MAX_BYTES, "server_round": server_round}
        state = {"seen": torch.tensor([number])}
        return int(flower.run_round(grid, made, state, [0], **wire)["seen"])

    assert [ask(0, 5), ask(0, 5), ask(0, 5)] == [1, 1, 1]
    assert [ask(1, 5), ask(1, 5), ask(1, 6)] == [2, 2, 3]
    assert [ask(0, 5), ask(0, 5)] == [4, 4]


def test_a_state_may_be_any_tree_and_other_records_are_kept():
    tree = {
        "step": 3,
        "seen": (True, None, 1.5),
        "nested": {7: [torch.tensor([float("nan"), -0.0], dtype=torch.bfloat16)]},
        "rows": fp.Weighted(torch.ones(2), torch.ones(2)),
    }
    records = RecordDict({"mod": MetricRecord({"loss": 1.0})})
    assert remembered(records) == {}
    remember(tree, records)
    assert_equal(remembered(records), tree)
    remember({}, records)
    assert remembered(records) == {}
    assert records["mod"] == MetricRecord({"loss": 1.0})


def test_an_answer_comes_to_the_device_of_the_method():
    plain, elsewhere = torch.ones(2), torch.ones(2, device="meta")
    assert _beside(plain, elsewhere).is_meta
    moved = _beside(fp.Weighted(plain, plain), fp.Weighted(elsewhere, elsewhere))
    assert moved.value.is_meta
    assert moved.weight.is_meta
