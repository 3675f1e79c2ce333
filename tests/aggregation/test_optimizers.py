"""Server optimizers, against Algorithm 2 by loops. Their laws are in tests/laws, too."""

import re
from copy import deepcopy
from functools import partial

import numpy as np
import pytest
import torch

from fedprompt import Weighted, descend
from fedprompt.aggregation import adam, fedopt, yogi
from references import fedopt as reference
from same import assert_identical, assert_same
from tolerance import assert_near

SGD = partial(torch.optim.SGD, lr=0.3, momentum=0.9, weight_decay=0.1)
OPTIONS = {"learning_rate": 0.2, "betas": (0.8, 0.9), "tau": 0.05}


def rounds(generator, *, absent=0.4, dtype=torch.float64):
    """Five rounds over four rows; the rows without evidence hold NaN."""
    means = []
    for _ in range(5):
        weight = torch.where(torch.rand(4, generator=generator) < absent, 0.0, 3.0)
        value = torch.randn(4, 2, generator=generator, dtype=dtype)
        value = torch.where(weight[:, None] > 0, value, torch.nan)
        means.append(Weighted(value, weight))
    return torch.randn(4, 2, generator=generator, dtype=dtype), means


def run(server, value, means):
    state = server.init(value)
    steps = []
    for mean in means:
        value, state = server.step(value, mean, state)
        steps.append((value, state))
    return steps


def column(means, row, number):
    """The means of one number, None in the rounds without evidence."""
    return [mean.value[row, number].item() if mean.weight[row] > 0 else None for mean in means]


@pytest.mark.parametrize(("make", "is_yogi"), [(adam, False), (yogi, True)])
def test_adaptive_updates_are_algorithm_2(make, is_yogi, generator):
    start, means = rounds(generator)
    steps = run(make(**OPTIONS), start, means)
    for row in range(4):
        for number in range(2):
            own = column(means, row, number)
            expected = reference.adaptive(start[row, number].item(), own, yogi=is_yogi, **OPTIONS)
            for (value, state), wanted in zip(steps, expected, strict=True):
                parts = value, state["first"], state["second"]
                actual = [part[row, number].item() for part in parts]
                assert actual == pytest.approx(wanted, rel=1e-12)


def test_a_second_moment_of_yogi_that_equals_the_square_of_a_movement_stays():
    """It begins as the square of `tau`."""
    update = yogi(learning_rate=0.2, betas=(0.5, 0.75), tau=0.5)
    start, mean = torch.zeros(3), Weighted(torch.tensor([0.5, 1.0, 0.0]), torch.ones(3))
    _, state = update.step(start, mean, update.init(start))
    assert state["second"].tolist() == [0.25, 0.25 + 0.25 * 1.0, 0.25]


def test_momentum_of_fedopt_is_fedavgm(generator):
    start, means = rounds(generator)
    options = {"learning_rate": 0.7, "momentum": 0.6}
    steps = run(fedopt(partial(torch.optim.SGD, lr=0.7, momentum=0.6)), start, means)
    for row in range(4):
        for number in range(2):
            own = column(means, row, number)
            expected = reference.momentum(start[row, number].item(), own, **options)
            actual = [value[row, number].item() for value, _ in steps]
            assert actual == pytest.approx([value for value, _ in expected], rel=1e-12)


ADAMW = partial(torch.optim.AdamW, lr=0.01, amsgrad=True)


@pytest.mark.parametrize("make_optimizer", [SGD, ADAMW])
def test_fedopt_is_an_uninterrupted_torch_optimizer_with_the_movement_as_gradient(
    make_optimizer, generator
):
    start, means = rounds(generator, absent=0.0)
    parameter = torch.nn.Parameter(start.clone())
    optimizer, server = make_optimizer([parameter]), fedopt(make_optimizer)
    for (value, _), mean in zip(run(server, start, means), means, strict=True):
        parameter.grad = parameter.detach() - mean.value
        optimizer.step()
        assert_identical(value, parameter.detach())


def test_a_rule_with_another_rate_continues_with_the_moments_and_the_new_rate():
    start, mean = torch.ones(2), Weighted(torch.tensor([3.0, 0.0]), torch.tensor(1.0))
    value, state = fedopt(partial(torch.optim.SGD, lr=1.0, momentum=0.5)).step(
        start, mean, fedopt(partial(torch.optim.SGD, lr=1.0)).init(start)
    )
    slower = fedopt(partial(torch.optim.SGD, lr=0.1, momentum=0.5))
    value, _ = slower.step(value, mean, state)
    assert_near(value, torch.tensor([3 + 0.1 * 0.5 * 2, 0 - 0.1 * 0.5 * 1]))  # the mean is reached


def moments_of(state):
    """The moments of a state by name, those of a torch optimizer too."""
    parts = state["state"].get(0, {}) if "state" in state else state
    return {name: part for name, part in parts.items() if part.ndim}


@pytest.mark.parametrize(
    "server",
    [
        adam(**OPTIONS),
        yogi(**OPTIONS),
        fedopt(SGD),
        descend(SGD),
        fedopt(partial(torch.optim.RMSprop, lr=0.1, weight_decay=0.1)),
        fedopt(partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.5)),
    ],
)
def test_a_round_without_evidence_leaves_no_trace_in_a_row(server, generator):
    """A row has the value and the moments of a run over those rounds in which it is known."""
    start, means = rounds(generator)
    assert all(0 < sum(mean.weight[row] > 0 for mean in means) < 5 for row in range(3))
    value, state = run(server, start, means)[-1]
    for row in range(3):
        known = [Weighted(m.value[row], m.weight[row]) for m in means if m.weight[row] > 0]
        expected, alone = run(server, start[row], known)[-1]
        assert_identical(value[row], expected)
        for name, moment in moments_of(alone).items():
            assert_identical(moments_of(state)[name][row], moment)


@pytest.mark.parametrize(("max_norm", "factor"), [(None, 1.0), (5.0, 1.0), (1.0, 0.2)])
def test_fedopt_clips_the_movement(max_norm, factor):
    # The movement is (3, 4) of norm 5; the third row is unknown.
    mean = Weighted(torch.tensor([[4.0], [5.0], [torch.nan]]), torch.tensor([1.0, 2.0, 0.0]))
    server = fedopt(partial(torch.optim.SGD, lr=1.0), max_norm=max_norm)
    value, _ = server.step(torch.ones(3, 1), mean, server.init(torch.ones(3, 1)))
    assert_near(value, torch.tensor([[1 + 3 * factor], [1 + 4 * factor], [1.0]]))


@pytest.mark.parametrize(
    ("server", "broken"),
    [
        (adam(**OPTIONS), "second"),
        (yogi(**OPTIONS), "second"),
        (fedopt(partial(torch.optim.Adam, lr=0.1)), "exp_avg_sq"),
        (descend(partial(torch.optim.SGD, lr=10.0)), "value"),
    ],
)
def test_a_step_that_would_overflow_is_refused_and_changes_nothing(server, broken, generator):
    start, means = rounds(generator, absent=0.0, dtype=torch.float32)
    value, state = run(server, start, means)[-1]
    before = deepcopy((value, state))
    hostile = Weighted(torch.full((4, 2), 3e38), torch.tensor([1.0, 1.0, 1.0, 0.0]))
    with pytest.raises(ValueError, match=re.escape("finite; got entries up to 3e+38")) as caught:
        server.step(value, hostile, state)
    assert broken in str(caught.value)
    assert_same((value, state), before)


@pytest.mark.bad_input  # against the annotations, but right
def test_the_square_of_a_narrow_tau_does_not_vanish():
    tau = np.float16(1e-4)  # its square is 0 in float16
    (second,) = adam(learning_rate=0.1, tau=tau).init(torch.zeros(1))["second"]
    assert second == pytest.approx(float(tau) ** 2)


def test_moments_of_half_precision_values_are_in_float32():
    value = torch.zeros(3, dtype=torch.bfloat16)
    mean = Weighted(torch.ones(3, dtype=torch.bfloat16), torch.tensor(1.0))
    server = adam(learning_rate=0.1)
    new, state = server.step(value, mean, server.init(value))
    assert new.dtype == torch.bfloat16
    assert {part.dtype for part in state.values()} == {torch.float32}


def test_running_statistics_take_the_mean_and_other_names_of_them_are_said():
    """Momentum moves a parameter on, and would make a variance negative."""
    make, first = partial(torch.optim.SGD, lr=1.0, momentum=0.9), torch.ones(())
    for options, name in (({}, "norm.running_var"), ({"statistics": ["scale"]}, "scale")):
        rule = fedopt(make, **options)
        values = {"weight": first, name: first}
        state = rule.init(values)
        for mean in (0.5, 0.25):
            means = dict.fromkeys(values, Weighted(torch.tensor(mean), first))
            values, state = rule.step(values, means, state)
        assert values[name].item() == 0.25
        assert values["weight"].item() == pytest.approx(0.5 - (0.25 + 0.9 * 0.5))
