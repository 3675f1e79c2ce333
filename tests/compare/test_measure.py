"""Figures of a run, against those of its parts."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import fedprompt as fp
from fedprompt.compare import measure, ranks
from fedprompt.compare.problems import NEWCOMERS
from fedprompt.compare.trials import Trial
from fedprompt.methods import Federation, HeldOut, Setting, evaluate

ROUNDS = 4
INPUTS = torch.randn(20, 4, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(20) % 2
OWN = [torch.arange(7), torch.arange(5, 9), torch.arange(3, 12), torch.arange(0)]
NAMES = ("a", "b", "new", "without tests")


def passes(count):
    for _ in range(count):
        torch.ones(1, requires_grad=True).sum().backward()


class Model(nn.Module):
    """Five parameters, with other values in each round."""

    def __init__(self, client, direction):
        super().__init__()
        self.head = nn.Linear(4, 1)
        fp.load_values(self, {"head.weight": direction[None, :4], "head.bias": direction[4:]})
        self.client = client
        self.dropout = nn.Dropout(0)

    def forward(self, inputs):
        score = self.dropout(self.head(inputs)) * (1 + self.client)
        return torch.cat([score, -score], 1)


def method():
    """A client takes one backward pass, the server two in a round, and a prediction three."""

    def client(data, answer, state):
        passes(1)
        return {"sent": fp.Weighted(torch.zeros(3), torch.tensor(1.0))}, {}

    def step(server_round, payloads, state):
        passes(2)
        draw = torch.Generator().manual_seed(server_round)
        return {"direction": torch.randn(5, generator=draw)}

    def predict(data, answer, state):
        passes(3)
        return Model(data.id, answer["direction"])

    start = {"direction": torch.zeros(5)}
    return fp.Method(client, fp.Server(start, lambda client, state: state, step), predict)


def trial(cohort_size=2, **changes):
    setting = Setting(num_classes=2, rounds=ROUNDS, clients=range(2), cohort_size=cohort_size)
    federation = Federation(setting, INPUTS, LABELS, dict(enumerate(torch.arange(20).split(5))))
    mixes = torch.tensor([[3, 2], [2, 3], [3, 2], [2, 3]])
    given = {"newcomers": (2, 3), "own": OWN, "names": NAMES} | changes
    return Trial(setting, federation, INPUTS[:12], LABELS[:12], mixes, **given)


@pytest.mark.parametrize("cohort_size", [1, None])
@pytest.mark.parametrize("world", [1, 2])
def test_costs_are_those_of_one_client_in_one_round(cohort_size, world, monkeypatch):
    """The other rank has clients with the same costs, and each rank runs the server."""
    monkeypatch.setattr(
        ranks, "summed", lambda numbers: {name: world * each for name, each in numbers.items()}
    )
    done = []
    found = measure.run(method(), trial(cohort_size), shared=False, progress=done.append)
    turns = ROUNDS * (cohort_size or 2)
    assert (found["bytes_up"], found["bytes_down"]) == (world * 4 * (3 + 1), world * 4 * 5)
    tested = 2 * 3  # of two clients, after the last round alone
    assert found["backward"] == (world * (turns + tested) + 2 * ROUNDS) / turns
    assert done == [1 / ROUNDS] * ROUNDS
    assert found["trained"] == 5


@pytest.mark.parametrize("own", [OWN, None])
def test_figures_are_those_of_evaluate_after_the_last_round_and_named_after_clients(own):
    kept = []
    mixes = torch.eye(4, dtype=torch.long)[[0, 3] * 2]  # of two domains of two classes
    cells = {"test_cells": LABELS[:12] + torch.arange(12) // 6 * 2, "mixes": mixes}
    given = trial(own=own, domain_names=("art", "photo"))._replace(**cells)
    found = measure.run(method(), given, shared=False, finished=lambda *run: kept.append(run))
    ((same, made, now),) = kept
    assert same is given
    assert now.server_round == ROUNDS - 1
    tests = {"mixes": dict(enumerate(given.mixes)), "cells": given.test_cells}
    if own is not None:
        tests = {"own": dict(enumerate(OWN[:3]))}
    new = [2] if own is not None else [2, 3]
    options = {"newcomers": new, "steps": 10, "domains": {"art": [0], "photo": [1]}}
    expected = evaluate(
        made, given.federation, now, HeldOut(INPUTS[:12], LABELS[:12], **tests), **options
    )
    assert NEWCOMERS["after"] == f"after {measure.OWN_STEPS} steps"
    costs = {"bytes_up", "bytes_down", "backward"}
    assert found.keys() == {*expected, "clients"} | costs
    assert {name: found[name] for name in expected} == expected
    of = dict.fromkeys((0, 1), ("full", "own")) | dict.fromkeys(new, ("received", "after"))
    assert found["clients"] == {
        NAMES[client]: {name: expected.clients[client][name] for name in names}
        for client, names in of.items()
    }


def test_the_rise_is_the_largest_over_the_lowest_training_loss_before():
    """It is computed without dropout, and models train again afterwards."""
    made, seen, losses = method(), [], []

    def predict(data, answer, state):
        seen.append(made.predict(data, answer, state))
        seen[-1].dropout.p = 0.9
        return seen[-1]

    plain, given = made._replace(predict=predict), trial(names=())
    found = measure.run(plain, given, shared=False, rise=True)
    for at in range(ROUNDS):  # two clients are measured after each round
        for client, model in enumerate(seen[2 * at : 2 * at + 2]):
            assert model.training
            part = slice(5 * client, 5 * client + 5)
            losses.append(F.cross_entropy(model.eval()(INPUTS[part]), LABELS[part]).item())
    table = np.array(losses).reshape(ROUNDS, 2)
    rises = np.max([table[at] - table[:at].min(0) for at in range(1, ROUNDS)], 0).clip(min=0)
    assert rises.max() > 0
    assert found["rise"] == pytest.approx(rises.mean(), rel=1e-5)
    assert "clients" not in found  # they have no names


@pytest.mark.parametrize("rank", [0, 1])
def test_further_figures_are_computed_by_the_first_rank(rank, monkeypatch):
    monkeypatch.setattr(ranks, "rank", lambda: rank)
    asked = []
    found = measure.run(
        method(), trial(), shared=False, causes=lambda *run: asked.append(run) or {"noise": 3.0}
    )
    assert "rise" not in found
    assert found.get("noise") == (3.0 if rank == 0 else None)
    assert [now.server_round for _, _, now in asked] == [ROUNDS - 1] * (rank == 0)


def test_ranks_share_clients_and_have_the_same_figures(monkeypatch):
    alone, asked, run_rounds = measure.run(method(), trial(), shared=False), [], fp.run_rounds
    monkeypatch.setattr(
        fp, "run_rounds", lambda *run, **how: asked.append(how) or run_rounds(*run, **how)
    )
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found = measure.run(method(), trial(), shared=False, rise=True)
        assert asked == [{"group": dist.group.WORLD, "share": True}]
    finally:
        dist.destroy_process_group()
    assert found == alone  # the rise is not measured on ranks
