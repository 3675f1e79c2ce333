"""Server updates, against loops and torch's optimizers. Their laws are in tests/laws."""

from functools import partial

import pytest
import torch

import fedprompt as fp
from same import assert_identical
from tolerance import assert_near


def known(value, weight=1.0):
    return fp.Weighted(torch.tensor([value]), torch.tensor(weight))


def test_names_that_the_mean_lacks_keep_value_and_state():
    update = fp.descend(partial(torch.optim.SGD, lr=0.5, momentum=0.9))
    values = {"a": torch.tensor([1.0]), "b": torch.tensor([2.0])}
    state = update.init(values)
    first, state = update.step(values, {"a": known(1.0), "b": known(1.0)}, state)
    second, after = update.step(first, {"b": known(1.0)}, state)
    assert_identical(second["a"], first["a"])
    assert after["a"] is state["a"]
    # By hand: momentum 1, then 0.9 + 1 = 1.9, so b is 2 - 0.5 * 1 - 0.5 * 1.9.
    assert second["b"].item() == pytest.approx(0.55, rel=1e-6)


@pytest.mark.parametrize("decay", [0, 0.8, 1])
def test_ema_against_a_loop(decay, generator):
    previous = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    value = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    mean = fp.Weighted(value, torch.tensor([3.0, 0.0, 0.5, 9.0]))
    new, _ = fp.ema(decay=decay).step(previous, mean, {})
    for row in range(4):
        for column in range(3):
            old, average = previous[row, column].item(), mean.value[row, column].item()
            expected = old if mean.weight[row] == 0 else decay * old + (1 - decay) * average
            assert new[row, column].item() == pytest.approx(expected, rel=1e-12)


def test_overwrite_copies_known_rows(generator):
    previous, mean = torch.randn(3, 2, generator=generator), torch.randn(3, 2, generator=generator)
    new, state = fp.overwrite().step(
        previous, fp.Weighted(mean, torch.tensor([0.01, 0.0, 900.0])), {}
    )
    assert_identical(new, torch.stack([mean[0], previous[1], mean[2]]))
    assert state == {}


NESTEROV = partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
ADAMW = partial(torch.optim.AdamW, lr=0.01, amsgrad=True)


@pytest.mark.parametrize("make_optimizer", [NESTEROV, ADAMW])
def test_descend_with_positive_weights_is_an_uninterrupted_torch_optimizer(
    make_optimizer, generator
):
    parameter = torch.nn.Parameter(torch.randn(4, 3, generator=generator))
    optimizer, update = make_optimizer([parameter]), fp.descend(make_optimizer)
    value = parameter.detach().clone()
    state = update.init(value)
    for _ in range(5):
        parameter.grad = torch.randn(4, 3, generator=generator)
        mean = fp.Weighted(parameter.grad.clone(), torch.rand(4, generator=generator) + 0.1)
        optimizer.step()
        value, state = update.step(value, mean, state)
        assert_identical(value, parameter.detach())


@pytest.mark.parametrize(
    ("max_norm", "factor"), [(None, 1.0), (100.0, 1.0), (5.0, 1.0), (1.0, 0.2)]
)
def test_descend_clips_the_gradient_to_the_maximum_norm(max_norm, factor):
    # The norm of (3, 4) is 5; the third row is unknown, and its NaN must not count.
    gradient = fp.Weighted(torch.tensor([[3.0], [4.0], [torch.nan]]), torch.tensor([1.0, 2.0, 0.0]))
    update = fp.descend(partial(torch.optim.SGD, lr=1.0), max_norm=max_norm)
    guides = torch.ones(3, 1)
    new, _ = update.step(guides, gradient, update.init(guides))
    assert_near(new, torch.tensor([[1 - 3 * factor], [1 - 4 * factor], [1.0]]))
    nothing = gradient._replace(value=torch.zeros(3, 1))
    assert_identical(update.step(guides, nothing, update.init(guides))[0], guides)


@pytest.mark.parametrize("max_norm", [5.0, 1e20, 3e38])
def test_descend_clips_a_gradient_whose_norm_overflows(max_norm):
    # The norm of (3e38, 2e38) overflows float32 (3.4e38). Its direction is (3, 2) / sqrt(13).
    gradient = fp.Weighted(
        torch.tensor([[3e38], [2e38], [torch.nan]]), torch.tensor([1.0, 2.0, 0.0])
    )
    update, start = (
        fp.descend(partial(torch.optim.SGD, lr=1.0), max_norm=max_norm),
        torch.zeros(3, 1),
    )
    new, _ = update.step(start, gradient, update.init(start))
    assert_near(new / max_norm, -torch.tensor([[3.0], [2.0], [0.0]]) / 13**0.5)
