"""The four federations depend only on their arguments, so any engine may run them."""

from copy import deepcopy

import pytest
import torch
from safetensors.torch import load as from_bytes
from safetensors.torch import save as to_bytes

from federations import (
    FEDERATIONS,
    Federation,
    Outcome,
    assert_bitwise_identical,
    in_process,
    parts,
)
from fedprompt import Weighted


@pytest.fixture(scope="module", params=FEDERATIONS)
def make(request):
    return FEDERATIONS[request.param]


@pytest.fixture(scope="module")
def expected(make):
    """Run once for all tests; no argument is mutated, as one of them shows."""
    return in_process(make())


def scrambled(state):
    """Discard all but the state: change the random numbers, and decode tensors from bytes."""
    torch.rand(int.from_bytes(to_bytes(state)[-1:]) + 1 if state else 1)
    return from_bytes(to_bytes(state)) if state else {}


def rebuilt_for_each_message(make) -> Outcome:
    """Run with a fresh federation for each client's message and each step, late payloads first."""
    first = make()
    answers, server_state = first.server.init()
    states = {client: {} for client in range(first.num_clients)}
    for server_round in range(first.rounds):
        payloads = {}
        for client in reversed(first.cohort(server_round)):
            payloads[client], kept = make().client(
                client, server_round, deepcopy(answers[client]), scrambled(states[client])
            )
            states[client] = scrambled(kept)
        answers, server_state = make().server.step(deepcopy(payloads), deepcopy(server_state))
    return Outcome(answers, server_state, states)


def test_a_run_is_reproducible_and_does_not_use_the_global_random_stream(make, expected):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert_bitwise_identical(in_process(make()), expected)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_client_rebuilt_for_each_message_gives_identical_results(make, expected):
    assert_bitwise_identical(rebuilt_for_each_message(make), expected)


def test_no_argument_is_mutated(make):
    federation = make()
    answers, server_state = federation.server.init()
    cohort = federation.cohort(0)
    sent = {client: federation.client(client, 0, answers[client], {}) for client in cohort}
    payloads = {client: payload for client, (payload, _) in sent.items()}
    handed = (
        answers,
        server_state,
        payloads,
        {client: state for client, (_, state) in sent.items()},
    )
    before = deepcopy(handed)
    for client in cohort:
        federation.client(client, 1, answers[client], sent[client][1])
    federation.server.step(payloads, server_state)
    assert_bitwise_identical(handed, before)


def test_servers_add_in_the_order_of_client_ids():
    """The float64 sums of three clients do not depend on the order, so it is tested separately."""
    assert parts.by_id({2: "late", 0: "early", 1: "between"}) == ["early", "between", "late"]


def same(one, other):
    try:
        assert_bitwise_identical(one, other)
    except AssertionError:
        return False
    return True


def test_every_name_of_every_answer_changes_and_all_states_differ(make, expected):
    start, _ = make().server.init()
    assert not [
        (client, name)
        for client in start
        for name in start[client]
        if same(expected.answers[client][name], start[client][name])
    ]
    states = [state for state in expected.clients.values() if state]
    assert not any(
        same(one, other) for position, one in enumerate(states) for other in states[:position]
    )


def test_states_and_earlier_rounds_matter(make, expected):
    """A run without client states, or with the first broadcast each time, ends differently."""
    whole = make()
    forgetful = whole._replace(
        client=lambda client, server_round, broadcast, state: whole.client(
            client, server_round, broadcast, {}
        )
    )
    assert same(in_process(forgetful), expected) == (not any(expected.clients.values()))
    first, _ = whole.server.init()
    deaf = whole._replace(
        client=lambda client, server_round, broadcast, state: whole.client(
            client, server_round, first[client], state
        )
    )
    assert not same(in_process(deaf), expected)


def test_every_name_of_a_broadcast_is_read(make, expected):
    federation, cohort = make(), make().cohort(0)
    for client in cohort:
        broadcast = expected.answers[client]
        payload, _ = federation.client(client, 0, broadcast, {})
        for name, entry in broadcast.items():
            value = entry.value if isinstance(entry, Weighted) else entry
            other = (3 - value).abs().flip(-1)  # counts stay counts
            changed = {
                **broadcast,
                name: entry._replace(value=other) if isinstance(entry, Weighted) else other,
            }
            assert not same(federation.client(client, 0, changed, {})[0], payload), (client, name)


def test_the_federations_cover_all_features_of_an_engine():
    runs = {
        name: (federation := make(), in_process(federation)) for name, make in FEDERATIONS.items()
    }
    assert (
        sum(len(federation.cohort(0)) < federation.num_clients for federation, _ in runs.values())
        == 2
    )
    assert all(
        {k for r in range(f.rounds) for k in f.cohort(r)} == set(range(f.num_clients))
        for f, _ in runs.values()
    )
    federation, outcome = runs["fedhpl"]
    shapes = [federation.payload_form(client)["head.weight"].value.shape for client in range(3)]
    assert shapes[0] == shapes[2] != shapes[1]
    assert isinstance(outcome.answers[0]["logits"], Weighted)
    assert not same(outcome.answers[0]["logits"], outcome.answers[1]["logits"])
    federation, outcome = runs["sgpt"]
    assert outcome.answers[0]["usage"].dtype == torch.int64
    assert outcome.answers[0]["usage"].sum() > 0
    assert not any(outcome.clients.values())
    federation, outcome = runs["fedl2g"]
    assert federation.broadcast_form(0)["guides"].dtype == torch.bfloat16
    assert outcome.clients[1]["2.num_batches_tracked"].item() == 4  # two rounds of two steps; int64
    assert outcome.clients[0].keys() != outcome.clients[1].keys()
    federation, outcome = runs["fedotp"]
    assert (
        outcome.answers[0].keys()
        == federation.payload_form(0).keys()
        == outcome.clients[0].keys()
        == {"context"}
    )
    assert not same(outcome.clients[0], outcome.answers[0])


def counting(federation: Federation) -> Federation:
    """Make a client with a hidden counter of its calls."""
    calls = []

    def client(client, server_round, broadcast, state):
        calls.append(client)
        payload, state = federation.client(client, server_round, broadcast, state)
        name = next(iter(payload))
        return {
            **payload,
            name: payload[name]._replace(weight=payload[name].weight * len(calls)),
        }, state

    return federation._replace(client=client)


def dicing(federation: Federation) -> Federation:
    """Make a client that draws from the global random stream."""

    def client(client, server_round, broadcast, state):
        payload, state = federation.client(client, server_round, broadcast, state)
        name = next(iter(payload))
        return {
            **payload,
            name: payload[name]._replace(weight=payload[name].weight * (0.5 + torch.rand(()))),
        }, state

    return federation._replace(client=client)


@pytest.mark.parametrize("spoil", [counting, dicing])
def test_hidden_states_are_detected(make, spoil):
    with pytest.raises(AssertionError):
        assert_bitwise_identical(
            rebuilt_for_each_message(lambda: spoil(make())), in_process(spoil(make()))
        )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor(0.0), torch.tensor(-0.0)),
        (torch.tensor(1.0), torch.tensor(1.0).double()),
        (torch.zeros(1, 2), torch.zeros(2, 1)),
        ({"a": torch.ones(1)}, {"b": torch.ones(1)}),
        ({"a": torch.ones(1)}, {}),
        (Weighted(torch.ones(1), torch.ones(1)), (torch.ones(1), torch.ones(1))),
        ([1, 2], [1, 2, 3]),
        (1, True),
        (0.1, 0.2),
    ],
)
def test_every_difference_is_detected(one, other):
    assert same(one, deepcopy(one))
    assert not same(one, other)
    assert not same(other, one)
