"""Accuracies of clients with known predictions, by hand, and the number of backward passes."""

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn as nn

import fedprompt as fp
import tiny_federations as tiny
from fedprompt.methods import (
    METHODS,
    Federation,
    Figures,
    HeldOut,
    Setting,
    counted_passes,
    evaluate,
    promptfl,
    register,
)
from functions import Function
from method_runs import RUNS
from refusals import refused

LABELS = torch.tensor([0, 0, 1, 2])
TESTS = nn.functional.one_hot(LABELS, 3).float()  # so the identity predicts all classes
TRAIN = torch.tensor([0, 0, 0, 1, 1, 2, 0, 1, 1, 2, 2])
SHARDS = {0: torch.arange(4), 1: torch.arange(4, 6), 2: torch.arange(6, 11)}
SERVER = fp.averaging_server({})
NOW = fp.Round(0, SERVER.state, {"1": {"trained": 1}})
MIXED = HeldOut(TESTS, LABELS, mixes="classes")


def setting(**changes):
    """Two clients and a newcomer, with classes 0001, 12 and 01122."""
    common = {"clients": range(2), "num_classes": 3, "rounds": 1, "steps": 2, "cohort_size": 1}
    common |= {"batch_size": 4, "seed": 0, "public": TESTS[:0]}
    return Setting(**common | changes)


FEDERATION = Federation(nn.functional.one_hot(TRAIN, 3).float(), TRAIN, SHARDS)


def of(predict, **changes):
    made = setting(**changes)
    return fp.Method(lambda *all: ({}, {}), SERVER, predict, setting=made)


def right_if_trained(data, answer, state):
    """A client without a state predicts class 0."""
    first = torch.eye(3)[[0]]
    return Function(lambda inputs: inputs if state else first.expand(len(inputs), -1))


def guessing(*rows):
    """Client c predicts the classes of row c for the four test inputs, whatever they contain."""
    return of(lambda data, *rest: Function(lambda inputs: torch.eye(3)[list(rows[data.id])]))


GUESSES = [[0, 0, 0, 0], [0, 1, 1, 2], [2, 0, 1, 1]]  # of labels 0, 0, 1, 2


def test_clients_with_unlike_tests_have_the_figures_of_their_own_tests_by_hand():
    bytes_of = torch.tensor([0, 2, 3], dtype=torch.uint8)
    own = {0: np.array([0, 1, 2]), 1: torch.tensor([1]), 2: bytes_of}
    found = evaluate(guessing(*GUESSES), FEDERATION, NOW, HeldOut(TESTS, LABELS, own=own))
    assert found["own"] == pytest.approx((2 / 3 + 0 / 1) / 2)
    assert (found["worst"], found["pooled"]) == (0, (2 + 0) / (3 + 1))
    assert (found["full"], found["lowest"], found["highest"]) == ((2 / 4 + 3 / 4) / 2, 2 / 4, 3 / 4)
    assert (found["received"], found["participated"]) == (pytest.approx(1 / 3), 1)
    assert (type(found), list(found.clients)) == (Figures, [0, 1, 2])
    first, second, newcomer = found.clients.values()
    assert (first["full"], first["own"], first["size"]) == (2 / 4, pytest.approx(2 / 3), 3)
    assert (second["full"], second["own"], second["size"]) == (3 / 4, 0, 1)
    assert (first["participated"], second["participated"]) == (0, 1)
    assert (first["balanced"], second["balanced"]) == pytest.approx((1 / 3, (1 / 2 + 1 + 1) / 3))
    assert newcomer == {"received": pytest.approx(1 / 3)}


def test_without_own_tests_or_mixes_there_is_no_figure_of_own_tests():
    found = evaluate(guessing(*GUESSES), FEDERATION, NOW, HeldOut(TESTS, LABELS))
    assert not {"own", "worst", "pooled", "received"} & found.keys()
    assert (found["full"], list(found.clients)) == ((2 / 4 + 3 / 4) / 2, [0, 1])


def test_figures_of_a_client_that_is_right_and_one_that_predicts_class_0():
    found = evaluate(of(right_if_trained), FEDERATION, NOW, MIXED)
    assert found == pytest.approx(
        {
            "full": (2 / 4 + 1) / 2,
            "lowest": 2 / 4,
            "highest": 1,
            "own": (3 / 4 + 1) / 2,  # three of the four inputs of client 0 have class 0
            "worst": 3 / 4,
            "pooled": (4 * 3 / 4 + 2) / 6,
            "balanced": (1 / 3 + 1) / 2,
            "macro_f1": (2 * (1 / 2) / (1 / 2 + 1) / 3 + 1) / 2,  # precision 1/2, recall 1
            "received": 1 / 5,  # one of the five inputs of the newcomer has class 0
            "trained": 0,
            "participated": 1,
        }
    )


def test_a_class_without_test_inputs_is_neither_right_nor_wrong():
    """Without class 1, the newcomer has class 0 once and class 2 twice."""
    labels = torch.tensor([0, 2])
    held_out = HeldOut(TESTS[[0, 3]], labels, mixes="classes")
    found = evaluate(of(right_if_trained), FEDERATION, NOW, held_out)
    assert (found["own"], found["received"]) == (1, 1 / 3)


def test_an_input_with_nan_among_its_logits_is_an_error():
    """Class 1 is right; the others have NaN, also where the largest logit would be right."""
    logits = TESTS.where(LABELS[:, None] == 1, torch.tensor([torch.nan, 0, 1]))
    found = evaluate(of(lambda *all: Function(lambda inputs: logits)), FEDERATION, NOW, MIXED)
    assert (found["full"], found["balanced"]) == (1 / 4, 1 / 3)
    assert found["macro_f1"] == pytest.approx(1 / 3)


def test_figures_of_newcomers_are_means_over_them():
    """No input of client 1 has class 0, and one of the five of client 2."""
    untrained = fp.Round(NOW.server_round, NOW.server, {})
    found = evaluate(of(right_if_trained, clients=range(1)), FEDERATION, untrained, MIXED)
    assert found["received"] == (0 + 1 / 5) / 2


def test_some_clients_are_tested():
    found = evaluate(of(right_if_trained), FEDERATION, NOW, MIXED, clients=[1])
    assert found["lowest"] == found["worst"] == 1


def test_cells_are_domains_and_classes_and_a_mix_has_shares_of_them():
    method, cells = of(right_if_trained), torch.tensor([0, 3, 1, 5])  # 2 domains of 3 classes
    mixes = {0: torch.tensor([1.0, 0, 0, 2, 0, 1]), 1: torch.tensor([0.0, 1, 0, 0, 0, 1])}
    held_out = HeldOut(TESTS, LABELS, cells=cells, mixes=mixes)
    domains = {"photos": [0], "both": [0, 1]}
    found = evaluate(method, FEDERATION, NOW, held_out, newcomers=(), domains=domains)
    assert (found["own"], found["worst"]) == ((3 / 4 + 1) / 2, 3 / 4)
    assert (found["photos"], found["both"]) == (3 / 4, (3 / 4 + 1) / 2)
    assert "received" not in found


def test_one_model_of_all_clients_is_made_once():
    made = []

    def predict(data, answer, state):
        made.append(data.id)
        return nn.Identity()

    found = evaluate(of(predict), FEDERATION, NOW, MIXED, shared=True, newcomers=())
    assert made == [0]
    assert (found["full"], found["own"], found["balanced"]) == (1, 1, 1)


def test_a_newcomer_trains_on_its_own_batches_for_the_figure_after():
    """SGD from zero: each step adds to the row of a class the mean gradient of its inputs.

    The rate is the given one, whatever the setting makes of a client's rate.
    """
    model, rates, trained = nn.Linear(3, 3, bias=False), [], []

    def predict(data, answer, state):
        nn.init.zeros_(model.weight)
        return model

    def sgd(parameters, lr):
        rates.append(lr)
        trained[:] = parameters
        return torch.optim.SGD(parameters, lr)

    never = {"schedule": lambda progress: 0.0}
    method = of(predict, make_optimizer=sgd, batch_size=5, **never)
    evaluate(method, FEDERATION, NOW, MIXED, clients=(), steps=1)
    found = evaluate(method, FEDERATION, NOW, MIXED, clients=(), steps=3, learning_rate=0.1)
    assert found == {"received": 1 / 5, "after": 1.0}  # equal logits are class 0
    expected = torch.zeros(3, 3)
    inputs, labels = FEDERATION.data(method.setting, 2, 0).own()
    for _ in range(3):
        slope = (inputs @ expected.T).softmax(1) - nn.functional.one_hot(labels, 3)
        expected -= 0.1 * slope.T @ inputs / 5
    torch.testing.assert_close(trained[0].detach(), expected)
    assert not model.weight.any()  # the trained model is a copy
    assert rates == [1e-2, 0.1]


def test_models_are_tested_without_dropout_and_a_frozen_part_stays_as_it_is():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.frozen = nn.Dropout(0.9), nn.Dropout(0.9)
            self.frozen.eval()
            self.weight = nn.Parameter(torch.ones(7))

        def forward(self, inputs):
            return self.frozen(self.drop(inputs))

    model = Half()
    found = evaluate(of(lambda *all: model), FEDERATION, NOW, MIXED)
    assert (found["full"], found["trained"]) == (1, 7)
    assert [part.training for part in model.modules()] == [True, True, False]
    with pytest.raises(ValueError, match=r"`predictions` must have shape \(4, 3\); got \(4, 2\)"):
        evaluate(of(lambda *all: model), FEDERATION, NOW, HeldOut(TESTS[:, :2], LABELS))
    assert model.training


def test_passes_of_training_and_of_predictions_are_counted():
    weight = torch.ones(3, requires_grad=True)

    def predict(data, answer, state):
        (slope,) = torch.autograd.grad(weight.sum(), weight)
        return Function(lambda inputs: inputs * slope)

    with counted_passes() as passes:
        weight.sum().backward()
        evaluate(of(predict), FEDERATION, NOW, MIXED)
    weight.sum().backward()
    assert dict(passes) == {"backward": 1, "grad": 3}


def test_a_pass_under_a_default_device_is_counted_once():
    """PyTorch then calls `grad` again from within itself."""
    x = torch.ones(3, requires_grad=True)
    with torch.device("cpu"), counted_passes() as passes:
        torch.autograd.grad(x.sum(), x)
        x.sum().backward()
    assert dict(passes) == {"grad": 1, "backward": 1}


def test_an_error_ends_the_count():
    x, kept = torch.ones(3, requires_grad=True), torch.autograd.backward
    with counted_passes() as passes:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="scalar"):
                x.backward()
    assert passes["backward"] == 2
    with pytest.raises(ZeroDivisionError), counted_passes():
        raise ZeroDivisionError
    assert torch.autograd.backward is kept


def shapes(method, given):
    """Return the shapes of all that a new model may learn."""
    model = fp.Round(-1, method.server.state, {}).model(method, given.data(0, 0))
    return isinstance(model, nn.Module) and {n: v.shape for n, v in model.named_parameters()}


def of_tensors(given):
    return Federation(given.inputs, given.labels, given.shards)


@pytest.mark.parametrize("name", [name for name, family in RUNS if family == "CLIP"])
def test_other_classes_are_those_of_a_second_setting_or_the_method_is_class_specific(name):
    """The second setting is made by hand. The first one has as many classes as the last names."""
    entry = METHODS[name]
    given = tiny.federation_of(entry, "CLIP", clients=[0, 1], rounds=1)
    method = entry.make(given)
    *_, now = fp.run_rounds(method, given.data, [[1]])
    tested = {"clients": [1], "newcomers": [5]}

    def held_out(names):
        own = {1: torch.arange(5), 5: torch.arange(2, 5)}
        return HeldOut(given.inputs[:5], torch.arange(5) % len(names), own=own)

    def call(names):
        tests = held_out(names)
        return evaluate(method, of_tensors(given), now, tests, class_names=names, **tested)

    if shapes(method, given) != shapes(entry.make(given.renamed(tiny.NAMES[:5])), given):
        for names in (tiny.NAMES[5:9], tiny.NAMES[4:7]):
            with pytest.raises(ValueError, match="`class_names` must be None for a method that"):
                call(names)
        return
    names = tiny.NAMES[5:9]
    found, second = call(names), replace(given, class_names=names, num_classes=len(names))
    again = fp.Round(*now)  # does not say whose it is
    expected = evaluate(entry.make(second), of_tensors(second), again, held_out(names), **tested)
    assert (found, found.clients) == (expected, expected.clients)


@pytest.mark.bad_input
def test_no_domain_replaces_a_figure():
    for name in call(steps=1):
        with pytest.raises(ValueError, match="`domains` must have other names than the figures"):
            call(domains={name: [0]})


MIX = torch.ones(3)


RIGHT = of(right_if_trained)


def call(method=RIGHT, own=FEDERATION, now=NOW, held_out=MIXED, **more):
    return evaluate(method, own, now, held_out, **more)


def held(**more):
    return HeldOut(TESTS, LABELS, **more)


def mixed(*mixes, **more):
    return held(mixes=dict(enumerate(mixes)), **more)


def owned(*positions):
    return held(own=dict(enumerate(map(torch.tensor, positions))))


def idle(data, answer, state):
    return None, state


def trains_to_predict(given):
    def predict(data, answer, state):
        return [*data.batches()]

    name = "trained for predictions"
    with patch.dict(METHODS):
        make = register(name, families=("CLIP",))(lambda of: fp.Method(idle, SERVER, predict))
    return make(given)


def clip(predict=None, make=promptfl, held_out=None, **more):
    """Predict three other classes with a tiny CLIP."""
    given = tiny.clip_federation(clients=[0, 1])
    method = make(given)
    method = method if predict is None else method._replace(predict=predict)
    now, more = fp.Round(0, method.server.state, {}), {"class_names": tiny.NAMES[3:6]} | more
    held_out = held_out or HeldOut(given.inputs[:3], torch.arange(3))
    return evaluate(method, of_tensors(given), now, held_out, **more)


test_wrong_calls_are_refused_by_name = refused(globals())("""
call(None) -> TypeError: `method` must be a Method
call(own=SHARDS) -> TypeError: `federation` must be a Federation
call(now={}) -> TypeError: `now` must be a Round
call(held_out=3) -> TypeError: `held_out` must be a HeldOut; got 3
call(fp.Method(idle, SERVER, idle)) -> TypeError: `method.setting` must have a setting
call(held_out=HeldOut(TESTS, LABELS + 1)) -> ValueError: `held_out.labels` must lie in [0, 3)
call(held_out=HeldOut(TESTS[:2], LABELS[:2], mixes="classes")) -> ValueError: none of client 1
call(held_out=mixed(MIX)) -> ValueError: all clients that are tested; got none of [1, 2]
call(held_out=owned([0], [1])) -> ValueError: `held_out` must have tests of all clients
call(held_out=held(), newcomers=[2]) -> ValueError: `own` or `mixes` for `newcomers`
call(held_out=held(), domains={'a': [0]}) -> ValueError: `mixes` for `domains`; got neither
call(clients=3) -> TypeError: `clients` must be an iterable of ids of clients; got 3 (int).
call(clients=[0, 7]) -> ValueError: `clients` must have clients of `federation`; got 7
call(clients=[0, 0]) -> ValueError: `clients` must have a client at most once; got [0]
call(newcomers=[1]) -> ValueError: `newcomers` must be clients that never trained; got [1]
call(method=of(lambda *all: Function(len))) -> TypeError: `predictions` must be a tensor of logits
call(method=of(lambda *all: len)) -> TypeError: `method.predict` must return an nn.Module, whose
call(clients=['a']) -> TypeError: `clients[0]` must be an integer; got 'a'
call(domains=3) -> TypeError: `domains` must map names to ids of clients; got 3
call(domains={'a': 3}) -> TypeError: `domains['a']` must be
call(domains={'a': [2]}) -> ValueError: have some of the clients that are tested, each once; got [2]
call(domains={'a': [0, 0]}) -> ValueError: the clients that are tested, each once; got [0, 0]
call(domains={3: [0]}) -> TypeError: `key of domains` must be a string; got 3
call(shared=1) -> TypeError: `shared` must be True or False
call(steps=-1) -> ValueError: `steps` must be at least 0; got -1
call(learning_rate=0) -> ValueError: `learning_rate` must be above 0; got 0
call(class_names=['a', 'b', 'c'], held_out=held()) -> ValueError: None for a setting without class
clip(class_names=[]) -> ValueError: `class_names` must contain at least one string
clip(class_names=['a', 'b']) -> ValueError: `held_out.labels` must lie in [0, 2)
clip(steps=1) -> ValueError: `steps` must be 0 with `class_names`, which no client has; got 1
clip(held_out=MIXED) -> ValueError: `held_out.mixes` must count other classes; got 'classes'
clip(predict=lambda *all: None) -> ValueError: `method` must be made by a function with `register`
clip(make=trains_to_predict) -> ValueError: got a prediction that reads `data.batches`
HeldOut(3, LABELS) -> TypeError: `inputs` must be a tensor, or return
HeldOut(TESTS, LABELS[:3]) -> ValueError: `labels` must have one entry for each of 4 inputs; got 3
HeldOut(TESTS, LABELS - 1) -> ValueError: `labels` must lie in
HeldOut(TESTS[:0], LABELS[:0]) -> ValueError: `inputs` must have at least one
held(own={0: LABELS}, mixes="classes") -> ValueError: `mixes` must be None if `own` is given
held(mixes="class") -> TypeError: `mixes` must be "classes", or map ids of clients to tensors
held(cells=LABELS) -> ValueError: `mixes` must be numbers of cells if `cells` is given
held(cells=LABELS, mixes="classes") -> ValueError: `mixes` must be numbers of cells if
mixed(MIX, MIX[:2]) -> ValueError: `mixes[1]` must have shape (3,)
mixed(MIX - 1, MIX) -> ValueError: `mixes[0]` must count at least one input
mixed(-MIX) -> ValueError: `mixes[0]` must be finite and at least 0
mixed(MIX, MIX, cells=LABELS[:3]) -> ValueError: `cells` must have one entry for each of 4
mixed(MIX, cells=LABELS + 1) -> ValueError: `cells` must lie in [0, 3); got values from 1 to 3
held(own=[LABELS]) -> TypeError: `own` must map ids of clients to positions
owned([0], [4]) -> ValueError: `own[1]` must lie in [0, 4); got values from 4 to 4
owned([0], [2, 1, 2]) -> ValueError: `own[1]` must have each position once; got a int64 tensor of
held(own={0: LABELS[:0]}) -> ValueError: `own[0]` must have at least one position
held(mixes={'0': MIX}) -> TypeError: `key of mixes` must be an integer; got '0'
held(own={-1: LABELS}) -> ValueError: `key of own` must be at least 0
""")
