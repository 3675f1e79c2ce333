"""Accuracies of clients with known predictions, by hand, and the number of backward passes."""

import pytest
import torch
import torch.nn as nn

import fedprompt as fp
from fedprompt.methods import Federation, Setting, counted_passes, evaluate
from refusals import check_refused, refusals

LABELS = torch.tensor([0, 0, 1, 2])
TESTS = nn.functional.one_hot(LABELS, 3).float()  # so the identity predicts all classes
TRAIN = torch.tensor([0, 0, 0, 1, 1, 2, 0, 1, 1, 2, 2])
SHARDS = {0: torch.arange(4), 1: torch.arange(4, 6), 2: torch.arange(6, 11)}
SERVER = fp.averaging_server({})
NOW = fp.Round(0, SERVER.state, {"1": {"trained": 1}})


def federation(**changes):
    """Two clients and a newcomer, with classes 0001, 12 and 01122."""
    common = {"clients": range(2), "num_classes": 3, "rounds": 1, "steps": 2, "cohort_size": 1}
    common |= {"batch_size": 4, "seed": 0, "public": TESTS[:0]}
    return Federation(
        Setting(**common | changes), nn.functional.one_hot(TRAIN, 3).float(), TRAIN, SHARDS
    )


def of(predict):
    return fp.Method(lambda *all: ({}, {}), SERVER, predict)


def right_if_trained(data, answer, state):
    """A client without a state predicts class 0."""
    return lambda inputs: inputs if state else torch.eye(3)[[0]].expand(len(inputs), -1)


def test_figures_of_a_client_that_is_right_and_one_that_predicts_class_0():
    found = evaluate(of(right_if_trained), federation(), NOW, TESTS, LABELS)
    assert found == pytest.approx(
        {
            "full": (2 / 4 + 1) / 2,
            "lowest": 2 / 4,
            "highest": 1,
            "own": (3 / 4 + 1) / 2,  # three of the four inputs of client 0 have class 0
            "worst": 3 / 4,
            "balanced": (1 / 3 + 1) / 2,
            "macro_f1": (2 * (1 / 2) / (1 / 2 + 1) / 3 + 1) / 2,  # precision 1/2, recall 1
            "received": 1 / 5,  # one of the five inputs of the newcomer has class 0
            "trained": 0,
        }
    )


def test_a_class_without_test_inputs_is_neither_right_nor_wrong():
    """Without class 1, the newcomer has class 0 once and class 2 twice."""
    labels = torch.tensor([0, 2])
    found = evaluate(of(right_if_trained), federation(), NOW, TESTS[[0, 3]], labels)
    assert (found["own"], found["received"]) == (1, 1 / 3)


def test_an_input_with_nan_among_its_logits_is_an_error():
    """Class 1 is right; the others have NaN, also where the largest logit would be right."""
    logits = TESTS.where(LABELS[:, None] == 1, torch.tensor([torch.nan, 0, 1]))
    found = evaluate(of(lambda *all: lambda inputs: logits), federation(), NOW, TESTS, LABELS)
    assert (found["full"], found["balanced"]) == (1 / 4, 1 / 3)
    assert found["macro_f1"] == pytest.approx(1 / 3)


def test_figures_of_newcomers_are_means_over_them():
    """No input of client 1 has class 0, and one of the five of client 2."""
    untrained = NOW._replace(clients={}, stateful=())
    found = evaluate(of(right_if_trained), federation(clients=range(1)), untrained, TESTS, LABELS)
    assert found["received"] == (0 + 1 / 5) / 2


def test_some_clients_are_tested():
    found = evaluate(of(right_if_trained), federation(), NOW, TESTS, LABELS, clients=[1])
    assert found["lowest"] == found["worst"] == 1


def test_cells_are_domains_and_classes_and_a_mix_has_shares_of_them():
    method, cells = of(right_if_trained), torch.tensor([0, 3, 1, 5])  # 2 domains of 3 classes
    mixes = {0: torch.tensor([1.0, 0, 0, 2, 0, 1]), 1: torch.tensor([0.0, 1, 0, 0, 0, 1])}
    found = evaluate(
        method,
        federation(),
        NOW,
        TESTS,
        LABELS,
        cells=cells,
        mixes=mixes,
        newcomers=(),
        domains={"photos": [0], "both": [0, 1]},
    )
    assert (found["own"], found["worst"]) == ((3 / 4 + 1) / 2, 3 / 4)
    assert (found["photos"], found["both"]) == (3 / 4, (3 / 4 + 1) / 2)
    assert "received" not in found


def test_one_model_of_all_clients_is_made_once():
    made = []

    def predict(data, answer, state):
        made.append(data.id)
        return lambda inputs: inputs

    found = evaluate(of(predict), federation(), NOW, TESTS, LABELS, shared=True, newcomers=())
    assert made == [0]
    assert (found["full"], found["own"], found["balanced"]) == (1, 1, 1)


def test_a_newcomer_trains_on_its_own_batches_for_the_figure_after():
    """SGD from zero: each step adds to the row of a class the mean gradient of its inputs.

    The rate is the given one, whatever the setting makes of a client's rate.
    """
    model = nn.Linear(3, 3, bias=False)

    def predict(data, answer, state):
        nn.init.zeros_(model.weight)
        return model

    never = {"schedule": lambda progress: 0.0}
    own = federation(make_optimizer=torch.optim.SGD, batch_size=5, **never)
    found = evaluate(of(predict), own, NOW, TESTS, LABELS, clients=(), steps=3, learning_rate=0.1)
    assert found == {"received": 1 / 5, "after": 1.0}  # equal logits are class 0
    expected = torch.zeros(3, 3)
    inputs, labels = own.data(2, 0).own()
    for _ in range(3):
        slope = (inputs @ expected.T).softmax(1) - nn.functional.one_hot(labels, 3)
        expected -= 0.1 * slope.T @ inputs / 5
    torch.testing.assert_close(model.weight.detach(), expected)


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
    found = evaluate(of(lambda *all: model), federation(), NOW, TESTS, LABELS)
    assert (found["full"], found["trained"]) == (1, 7)
    assert [part.training for part in model.modules()] == [True, True, False]
    with pytest.raises(ValueError, match=r"`predictions` must have shape \(4, 3\); got \(4, 2\)"):
        evaluate(of(lambda *all: model), federation(), NOW, TESTS[:, :2], LABELS)
    assert model.training


def test_passes_of_training_and_of_predictions_are_counted():
    weight = torch.ones(3, requires_grad=True)

    def predict(data, answer, state):
        (slope,) = torch.autograd.grad(weight.sum(), weight)
        return lambda inputs: inputs * slope

    with counted_passes() as passes:
        weight.sum().backward()
        evaluate(of(predict), federation(), NOW, TESTS, LABELS)
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


@pytest.mark.bad_input
def test_no_domain_replaces_a_figure():
    for name in call(steps=1):
        with pytest.raises(ValueError, match="`domains` must have other names than the figures"):
            call(domains={name: [0]})


MIX = torch.ones(3)


RIGHT, FEDERATION = of(right_if_trained), federation()


def call(method=RIGHT, own=FEDERATION, now=NOW, inputs=TESTS, labels=LABELS, **more):
    return evaluate(method, own, now, inputs, labels, **more)


def mixed(*mixes, cells=LABELS):
    return call(mixes=dict(enumerate(mixes)), cells=cells, newcomers=())


REFUSED = """
call(None) -> TypeError: `method` must be a Method
call(own=SHARDS) -> TypeError: `federation` must be a Federation
call(now={}) -> TypeError: `now` must be a Round
call(inputs=3) -> TypeError: `inputs` must be a tensor, or return
call(labels=LABELS + 1) -> ValueError: `labels` must lie in [0, 3); got values from 1 to 3
call(labels=LABELS[:3]) -> ValueError: for each of `inputs`, and at least one; got 3 for 4
call(inputs=TESTS[:0], labels=LABELS[:0]) -> ValueError: at least one; got 0 for 0
call(inputs=TESTS[:2], labels=LABELS[:2]) -> ValueError: that is tested; got none of client 1
call(clients=[0, 7]) -> ValueError: `clients` must have clients of `federation`; got 7
call(clients=[0, 0]) -> ValueError: `clients` must have a client at most once; got [0]
call(newcomers=[1]) -> ValueError: `newcomers` must be clients that never trained; got [1]
call(cells=LABELS) -> ValueError: `mixes` must be given with `cells`; got None
mixed(MIX) -> ValueError: `mixes` must have all clients that are tested; got none for [1]
mixed(MIX, MIX[:2]) -> ValueError: `mixes[1]` must have 3 cells
mixed(MIX - 1, MIX) -> ValueError: `mixes[0]` must be finite, at least 0 and not all 0
mixed(MIX, MIX, cells=LABELS[:3]) -> ValueError: have one entry for each of 4 inputs; got 3
call(domains={'a': 3}) -> TypeError: `domains['a']` must be
call(domains={'a': [2]}) -> ValueError: must have some of the clients that are tested; got [2]
call(shared=1) -> TypeError: `shared` must be True or False
call(steps=-1) -> ValueError: `steps` must be at least 0; got -1
call(learning_rate=0) -> ValueError: `learning_rate` must be above 0; got 0
"""


@pytest.mark.bad_input
@pytest.mark.parametrize(("call", "error", "message"), refusals(REFUSED))
def test_wrong_calls_are_refused_by_name(call, error, message):
    check_refused(call, error, message, globals())
