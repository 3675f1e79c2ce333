"""In one process, payloads are added as they come, with the bits of a step that has them all."""

import weakref
from types import SimpleNamespace

import pytest
import torch

import fedprompt as fp
from fedprompt.codecs import int8, top_k
from same import assert_same

VALUES = {"head": torch.zeros(3, 5), "keys": torch.zeros(4)}


def data(client, server_round):
    return SimpleNamespace(id=client, server_round=server_round)


def method(update=None, aggregate=fp.weighted_mean):
    """Send random rows with random weights; client 3 sends nothing."""

    def train(own, answer, state):
        if own.id == 3:
            return None, state
        rows = {
            n: torch.rand(len(v)).where(torch.rand(len(v)) > 0.3, 0.0) for n, v in answer.items()
        }
        sent = {n: fp.Weighted(v + torch.randn_like(v), rows[n]) for n, v in answer.items()}
        return sent, {"rounds": state.get("rounds", 0) + 1}

    def form(client):
        return {n: fp.Weighted(v, torch.zeros(len(v))) for n, v in VALUES.items()}

    server = fp.averaging_server(VALUES, update, aggregate=aggregate)
    return fp.Method(train, server, lambda *all: None, form=form)


def all_at_once(payloads):
    return fp.weighted_mean(list(payloads))


@pytest.mark.parametrize("update", [None, fp.aggregation.adam(learning_rate=0.1)])
@pytest.mark.parametrize("codec", [None, int8(), top_k(fraction=0.5)])
def test_bits_are_those_of_a_step_with_all_payloads(update, codec):
    def last(aggregate):
        made = method(update, aggregate)
        made = made if codec is None else fp.rounds.coded(made, codec)
        return tuple(list(fp.run_rounds(made, data, [range(6), [3], [1, 4], [5, 0]]))[-1])

    assert_same(last(fp.weighted_mean), last(all_at_once))


@pytest.mark.parametrize("coded", [False, True])
def test_a_round_holds_few_payloads_at_a_time(coded):
    made, sent, most = method(), [], [0]

    def train(own, answer, state):
        payload, state = made.client(own, answer, state)
        most[0] = max(most[0], sum(each() is not None for each in sent))
        sent.extend(weakref.ref(entry.value) for entry in (payload or {}).values())
        return payload, state

    watched = made._replace(client=train)
    watched = fp.rounds.coded(watched, int8()) if coded else watched
    list(fp.run_rounds(fp.rounds.counted(watched, fp.Ledger()), data, [range(40)]))
    assert len(sent) == 2 * 39
    assert most[0] <= 4


def test_an_error_while_adding_keeps_the_round_before_and_names_the_client():
    made = method()

    def train(own, answer, state):
        payload, state = made.client(own, answer, state)
        if (own.id, own.server_round) == (4, 1):
            payload = {n: fp.Weighted(e.value / 0, e.weight + 1) for n, e in payload.items()}
        return payload, state

    rounds = fp.run_rounds(made._replace(client=train), data, [range(6)] * 2)
    now = next(rounds)
    with pytest.raises(
        ValueError, match=r"`payloads\[4\]\['head'\]\.value` must be finite"
    ) as error:
        next(rounds)
    assert error.value.__notes__ == ["server, round 1; payload of client 4"]
    assert now.server_round == 0
