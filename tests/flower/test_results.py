"""Methods over a Flower grid that serializes messages equal methods in one process."""

import pytest
import torch
from flwr.app import ArrayRecord

import fedprompt as fp
from fedprompt import flower
from fedprompt.codecs import int8
from fedprompt.methods import METHODS
from flower_runs import (
    MAX_BYTES,
    assert_equal,
    grid_of,
    in_process,
    over_grid,
    states_of,
    strategy_of,
)
from method_runs import MAKERS, RUNS
from small_method import COHORTS, Data, method
from tiny_federations import RANDOM, federation_of

pytestmark = pytest.mark.flower


@pytest.mark.parametrize(("name", "family"), RUNS)
def test_every_method_with_a_form_is_bitwise_identical_to_one_process(name, family):
    federation = federation_of(METHODS[name], family, **RANDOM)
    made, cohorts = MAKERS[name](federation), list(federation.cohorts())
    if made.form is None:
        with pytest.raises(TypeError, match=r"`method\.form` must be a function, by which"):
            strategy_of(made)
        return
    found, grid = over_grid(made, cohorts, data=federation.data)
    again = MAKERS[name](federation)
    assert_equal(tuple(found), tuple(in_process(again, cohorts, data=federation.data)))
    assert grid.asked  # nodes were asked for their ids


@pytest.mark.parametrize("exchanges", [1, 3])
def test_exchanges_personal_answers_states_and_missing_payloads(exchanges, log):
    found, grid = over_grid(method(exchanges))
    assert_equal(tuple(found), tuple(in_process(method(exchanges))))
    assert not [line for line in log if "left out" in line or "dropped" in line]
    assert len(grid.asked) == 6  # one query for the partition of each node


def test_a_coded_method_keeps_the_memory_of_its_codec_at_the_node():
    made = fp.rounds.coded(method(), int8())
    found, _ = over_grid(made)
    assert_equal(tuple(found), tuple(in_process(made)))
    assert found.clients["0"].keys() == {"client", "codec"}


def test_an_empty_message_is_legal():
    """Clients that train alone send `{}`, and receive `{}`."""

    def train(data, answer, state):
        return {}, {"met": [*state.get("met", []), *answer, data.server_round]}

    def step(server_round, payloads, state):
        return {"seen": state["seen"] + [f"{server_round}: {payloads}"]}

    server = fp.Server({"seen": []}, lambda client, state: {}, step)
    made = fp.Method(train, server, predict=lambda *all: None, form=lambda client: {})
    ledger = fp.Ledger()
    found, _ = over_grid(made, [[0, 2], [2]], ledger=ledger)
    assert found.server == {"seen": ["0: {0: {}, 2: {}}", "1: {2: {}}"]}
    assert found.clients == {"0": {"met": [0]}, "2": {"met": [0, 1]}}
    assert ledger.total() == 0


def test_the_ledger_records_every_message_with_its_round():
    ledger, expected = fp.Ledger(), fp.Ledger()
    _, grid = over_grid(method(), ledger=ledger)
    list(fp.run_rounds(fp.rounds.counted(method(), expected), Data, COHORTS))
    assert {key: each.num_bytes for key, each in ledger.sent.items()} == {
        key: each.num_bytes for key, each in expected.sent.items()
    }
    assert ledger.total() == expected.total()
    assert ledger.total(framed=True) == sum(length for _, length in grid.sent)


def test_a_plain_loop_over_run_round_needs_no_strategy():
    made, ledger = method(), fp.Ledger()
    grid, state, nodes = grid_of(made), made.server.state, {}
    for server_round, cohort in enumerate(COHORTS):
        nodes = flower.client_nodes(grid, cohort, known=nodes, timeout=0.0)
        state = flower.run_round(
            grid,
            made,
            state,
            cohort,
            server_round=server_round,
            nodes=nodes,
            max_bytes=MAX_BYTES,
            timeout=5.0,
            ledger=ledger,
        )
    expected = in_process(method())
    assert_equal((state, states_of(grid)), (expected.server, expected.clients))
    assert grid.timeouts == [5.0] * 10  # five rounds with clients, of two exchanges
    assert ledger.total(framed=True) == sum(length for _, length in grid.sent)


def test_equal_answers_share_one_content_and_another_fingerprint_makes_another(monkeypatch):
    """Flower sends an object once, even if several envelopes contain it."""
    contents = []
    grid = grid_of(method())
    monkeypatch.setattr(
        grid,
        "send_and_receive",
        lambda messages, timeout: contents.extend(message.content for message in messages) or [],
    )

    def shared(numbers, fingerprint=lambda client: {}):
        """Tell which of three clients share their content with client 0."""
        made, nodes = method(exchanges=1), {0: 1000, 1: 993, 2: 986}
        server = made.server._replace(answer=lambda client, state: {"x": numbers[client].clone()})
        made, wire = made._replace(server=server), {"nodes": nodes, "max_bytes": MAX_BYTES}
        contents.clear()
        state = made.server.state
        flower.run_round(
            grid, made, state, [0, 1, 2], server_round=0, fingerprint=fingerprint, **wire
        )
        return [content is contents[0] for content in contents]

    zero, near = torch.zeros(3), torch.zeros(3).nextafter(torch.ones(3))
    assert shared([zero, zero, zero]) == [True, True, True]
    assert shared([zero, near, zero]) == [True, False, True]
    seats = shared([zero] * 3, fingerprint=lambda client: {"seat": str(client // 2)})
    assert seats == [True, True, False]


def test_a_strategy_counts_its_rounds_over_several_starts_and_needs_enough_cohorts():
    strategy = strategy_of(method(exchanges=1), iter(COHORTS[:2]))
    grid = grid_of(method(exchanges=1))
    for _ in range(2):
        strategy.start(grid, ArrayRecord(), num_rounds=1)
    expected = in_process(method(exchanges=1), COHORTS[:2])
    assert_equal(tuple(strategy.now._replace(clients=states_of(grid))), tuple(expected))
    with pytest.raises(ValueError, match="`cohorts` must have a cohort for round 2; got no more"):
        strategy.start(grid, ArrayRecord(), num_rounds=1)


REFUSED = {
    "`method` must be a Method(client, server, predict); got None": lambda: (None, {}),
    "`method.form` must be a function, by which messages are decoded; got None": (
        lambda: (method()._replace(form=None), {})
    ),
    "`start` must be a Round or None; got a tuple": lambda: (method(), {"start": (0, {}, {})}),
    "`cohorts` must be an iterable": lambda: (method(), {"cohorts": 3}),
    "`max_bytes` must be at least 1; got 0": lambda: (method(), {"max_bytes": 0}),
    "`max_abs` must be above 0; got 0": lambda: (method(), {"max_abs": 0}),
    "`fingerprint` must be a function": lambda: (method(), {"fingerprint": {"backbone": "x"}}),
    "`ledger` must be a Ledger or None": lambda: (method(), {"ledger": []}),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("message", REFUSED)
def test_bad_methods_are_refused(message):
    made, options = REFUSED[message]()
    with pytest.raises((TypeError, ValueError)) as error:
        strategy_of(made, **options)
    assert message in str(error.value)
    if not options:
        with pytest.raises((TypeError, ValueError)) as error:
            flower.client_app(made, Data, max_bytes=MAX_BYTES)
        assert message in str(error.value)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("cohort", "text"),
    [
        ([1, 1], r"round 0: `cohorts` must have a client at most once in a round; got \[1\]"),
        (["0"], r"round 0: `cohorts\[0\]\[0\]` must be an integer"),
        ([-1], r"round 0: `cohorts\[0\]\[0\]` must be at least 0; got -1"),
    ],
)
def test_a_wrong_cohort_is_refused_before_any_message(cohort, text):
    grid = grid_of(method())
    with pytest.raises((TypeError, ValueError), match=text):
        strategy_of(method(), [cohort]).start(grid, ArrayRecord(), num_rounds=1)
    assert (grid.asked, grid.sent) == ([], [])


def test_a_client_without_data_is_left_out(log):
    """The node of client 1 has the data of client 0 alone."""

    def data(client, server_round):
        return {0: Data(0, server_round)}[client]

    found, _ = over_grid(method(1), [[0, 1]], data=data)
    assert_equal(tuple(found), tuple(in_process(method(1), [[0]])))
    assert any("a reply of node 993 is left out" in line for line in log)
