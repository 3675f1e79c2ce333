"""The change of a client since the broadcast."""

import re
from functools import partial

import pytest
import torch
import torch.nn as nn

from fedprompt import Weighted, collect, delta, descend, overwrite, snapshot, weighted_mean
from same import assert_identical, assert_same
from tolerance import assert_near


def moved(generator):
    """A broadcast, and payloads of three clients after training."""
    model = nn.Linear(3, 2)
    values = snapshot(model)
    payloads = []
    for client in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator))
        payloads.append(collect(model, weight=client + 1))
    return values, payloads


def test_values_are_subtracted_by_name_and_weights_are_kept():
    payload = {"head": Weighted(torch.tensor([[3.0, 5.0], [1.0, 1.0]]), torch.tensor([4.0, 2.0]))}
    values = {"other": torch.zeros(7), "head": torch.tensor([[1.0, 6.0], [0.5, 3.0]])}
    change = delta(payload, values)
    assert list(change) == ["head"]
    assert change["head"].value.tolist() == [[2.0, -1.0], [0.5, -2.0]]
    assert_identical(change["head"].weight, payload["head"].weight)


def adds_up(subtract, generator):
    """The broadcast plus the mean change is the mean."""
    values, payloads = moved(generator)
    mean = weighted_mean([subtract(payload, values) for payload in payloads])
    add = descend(partial(torch.optim.SGD, lr=1.0, maximize=True))
    sums, _ = add.step(values, mean, add.init(values))
    expected, _ = overwrite().step(values, weighted_mean(payloads), {name: {} for name in values})
    for name in values:
        assert_near(sums[name], expected[name])


def reversed_sign(payload, values):
    return {
        name: Weighted(-value, weight) for name, (value, weight) in delta(payload, values).items()
    }


def times_the_weight(payload, values):
    return {
        name: Weighted(weight * value, weight)
        for name, (value, weight) in delta(payload, values).items()
    }


def test_the_broadcast_plus_the_mean_change_is_the_mean(generator):
    adds_up(delta, generator)


@pytest.mark.parametrize("wrong", [reversed_sign, times_the_weight])
def test_known_wrong_changes_do_not_add_up(wrong, generator):
    with pytest.raises(AssertionError):
        adds_up(wrong, generator)


def test_unknown_rows_are_zero_and_nothing_is_changed_in_place():
    payload = {"keys": Weighted(torch.tensor([2.0, torch.nan]), torch.tensor([1.0, 0.0]))}
    values = {"keys": torch.tensor([0.5, 0.5])}
    change = delta(payload, values)
    assert change["keys"].value.tolist() == [1.5, 0.0]
    change["keys"].weight.fill_(9)
    assert payload["keys"].weight.tolist() == [1.0, 0.0]
    assert_same(values, {"keys": torch.tensor([0.5, 0.5])})


ONE = {"head": Weighted(torch.ones(2), torch.tensor(1.0))}


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("payload", "values", "error", "message"),
    [
        (ONE, {}, ValueError, "`values` must have the name 'head'; got []."),
        (ONE, [torch.ones(2)], TypeError, "`values` must map names to tensors; got"),
        (ONE, {"head": torch.ones(3)}, ValueError, "`values['head']` must have the shape of the"),
        (ONE, {"head": torch.ones(2).double()}, TypeError, "`values['head']` must be a tensor"),
        (ONE["head"], {"head": torch.ones(2)}, TypeError, "`payload` must map names to Weighted"),
        (
            {"head": Weighted(torch.full((2,), 3e38), torch.tensor(1.0))},
            {"head": torch.full((2,), -3e38)},
            ValueError,
            "`payload['head'] minus values['head']` must be finite; got 2 entries of 2",
        ),
        (
            {"head": Weighted(torch.full((2,), torch.nan), torch.tensor(1.0))},
            {"head": torch.ones(2)},
            ValueError,
            "`payload['head'].value` must be finite wherever its weight is positive",
        ),
    ],
)
def test_bad_arguments_are_refused_by_name(payload, values, error, message):
    with pytest.raises(error, match=re.escape(message)):
        delta(payload, values)
