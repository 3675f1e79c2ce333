"""Networks with batch normalization: a client keeps the statistics of its own images."""

from collections import OrderedDict
from copy import deepcopy
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn as nn

import fedprompt as fp
from fedprompt.compare import rows
from fedprompt.methods import METHODS, Federation, Setting, check_messages
from method_runs import together

MIXED = [name for name, entry in METHODS.items() if "mixed models" in entry.families]
WITHOUT_TRUNK = [name for name in MIXED if not name.startswith("fedhpl")]


class Network(nn.Module):
    """Network with batch normalization, and the parts that methods of mixed models use."""

    prompts = None

    def __init__(self, width: int) -> None:
        super().__init__()
        layers = (nn.Flatten(), nn.Linear(12, width), nn.BatchNorm1d(width), nn.ReLU())
        self.network, self.projection = nn.Sequential(*layers), nn.Linear(width, 6)
        self.head = nn.Linear(6, 3)

    def features(self, images):
        return self.projection(self.network(images))

    def forward(self, images):
        return self.head(self.features(images))


@dataclass(kw_only=True)
class NetworkSetting(Setting):
    """Networks that are given to the clients in turn, so that two clients share a module."""

    num_features: int = 6
    num_networks: int = 2

    @property
    def num_backbones(self):
        return self.num_networks

    def new_model(self, client=0):
        return self.seeded(Network, (5, 7)[self.backbone_of(client)])


audited = together(WITHOUT_TRUNK, newcomers=True)


def federation() -> tuple[NetworkSetting, Federation]:
    draw = torch.Generator().manual_seed(0)
    images = torch.randn(60, 3, 2, 2, generator=draw)
    budget = {"rounds": 2, "steps": 2, "cohort_size": 3, "batch_size": 6, "seed": 0}
    public = torch.randn(8, 3, 2, 2, generator=draw)
    setting = NetworkSetting(clients=range(4), num_classes=3, public=public, **budget)
    shards = {client: torch.arange(15) + 15 * client for client in range(4)}
    return setting, Federation(images, torch.randint(3, (60,), generator=draw), shards)


@pytest.mark.slow  # all methods, in processes; `.ci/run` runs them
def test_no_statistics_cross_between_clients_with_one_network():
    setting, made = federation()
    setting = replace(setting, num_networks=1, clients=range(2), steps=1, rounds=1, cohort_size=2)
    pair = {client: made.shards[client] for client in setting.clients}
    check_messages(f"{__file__}:audited", setting, replace(made, shards=pair))


@pytest.mark.parametrize("make", [METHODS["local"].make, rows.longer])
def test_statistics_of_a_client_are_those_of_its_own_batches(make):
    setting, made = federation()
    method = make(setting)
    *_, now = fp.run_rounds(method, made, [[0], [2]])
    model, expected = now.model(method, made, 0), setting.new_model(0)
    assert model.network[2].num_batches_tracked == setting.steps
    assert torch.equal(now.model(method, made, 1).network[2].running_mean, torch.zeros(7))
    assert torch.equal(expected.network[2].running_mean, torch.zeros(5))


@pytest.mark.parametrize("name", WITHOUT_TRUNK)
def test_a_new_process_predicts_with_the_statistics_of_the_client(name):
    (setting, made), (fresh, same) = federation(), federation()
    *_, now = fp.run_rounds(METHODS[name].make(setting), made, [[0, 1], [0, 1]])
    model = now.model(METHODS[name].make(fresh), same, 0)
    found = [
        each for each in getattr(model, "own", model).modules() if isinstance(each, nn.BatchNorm1d)
    ]
    assert found
    assert all(each.num_batches_tracked > 0 and each.running_mean.any() for each in found)


@pytest.mark.parametrize("load", [True, False])
def test_statistics_that_training_changes_are_sent_or_warned_of_once(load):
    """Clients may have new modules in each round, so names decide what is known."""
    name = f"norm of {load}"
    parts = {"first": nn.Linear(2, 2), name: nn.BatchNorm1d(2)}
    model = nn.Sequential(OrderedDict(parts))
    if load:
        fp.load_values(model, fp.snapshot(model))
    fp.collect(model, weight=1)  # nothing changed
    model(torch.ones(3, 2))
    sent = fp.collect(model, weight=1, buffers=True)
    assert torch.equal(sent[f"{name}.running_mean"].value, model[1].running_mean)
    assert f"{name}.num_batches_tracked" not in sent
    again = deepcopy(model)
    with pytest.warns(UserWarning, match=rf"running statistics: \['{name}\.running_mean'\]"):
        fp.collect(model, weight=1)
    fp.collect(model, weight=1)
    fp.collect(again, weight=1)
    fp.load_values(model, fp.snapshot(model, buffers=True))
    model(torch.ones(3, 2))
    fp.collect(model, weight=1)  # the state of the client has them


def test_two_iterators_of_batches_take_turns_under_autocast():
    setting, made = federation()
    data = made.data(replace(setting, autocast=torch.bfloat16), 0, 0)
    assert [
        torch.is_autocast_enabled("cpu")
        for _ in zip(data.batches(), data.at(1).batches(), strict=True)
    ] == [True] * 2
    assert not torch.is_autocast_enabled("cpu")


def test_a_client_that_keeps_its_iterator_leaves_autocast():
    (setting, made), kept, seen = federation(), [], []
    setting = replace(setting, autocast=torch.bfloat16)

    def train(data, answer, state):
        seen.append(torch.is_autocast_enabled("cpu"))
        kept.append(data.batches())
        next(kept[-1])
        seen.append(torch.is_autocast_enabled("cpu"))
        assert not torch.is_autocast_cache_enabled()  # it would keep the weights before a step
        return {}, state

    method = fp.Method(train, fp.averaging_server({}), lambda *all: None, setting=setting)
    for _ in fp.run_rounds(method, made, [[0, 1], [0]]):
        assert not torch.is_autocast_enabled("cpu")
    with made.data(
        setting, 0, 0
    ).autocast():  # the end of an earlier client's iterator changes nothing
        kept.clear()
        assert torch.is_autocast_enabled("cpu")
    assert seen == [False, True] * 3


def test_a_client_outside_of_the_setting_does_not_train_and_predicts():
    setting, made = federation()
    method = METHODS["local"].make(replace(setting, clients=range(2)))
    *_, now = fp.run_rounds(method, made, [[0]])
    now.model(method, made, 3)
    with pytest.raises(ValueError, match=r"`cohorts` must have clients of `setting\.clients`"):
        list(fp.run_rounds(method, made, [[3]]))


def test_buffers_that_a_state_dict_leaves_out_are_not_copied():
    layer = nn.BatchNorm1d(2)
    layer.register_buffer("scratch", torch.zeros(2), persistent=False)
    assert fp.snapshot(layer, buffers=True).keys() == layer.state_dict().keys()
