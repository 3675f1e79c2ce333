"""Bad input of the functions of DP-SGD is refused with the reason."""

import math

import pytest
import torch
import torch.nn as nn

from fedprompt import freeze
from fedprompt.privacy import clipped_sum, noisy_mean, per_sample, poisson_batch

LINEAR = nn.Linear(2, 2)
BAD = [
    (lambda g: per_sample(LINEAR.state_dict(), 2), TypeError, "`model` must be an nn.Module"),
    (lambda g: per_sample(LINEAR, 2.0), TypeError, "`batch_size` must be an integer"),
    (lambda g: per_sample(LINEAR, -1), ValueError, "`batch_size` must be at least 0; got -1."),
    (
        lambda g: per_sample(freeze(nn.Linear(2, 2)), 2),
        ValueError,
        "`model` must have a parameter with requires_grad",
    ),
    (
        lambda g: per_sample(LINEAR, 2)(torch.zeros(3, 2)),
        ValueError,
        r"`inputs\[0\]` must have the batch of 2 samples.*\(3, 2\)",
    ),
    (
        lambda g: per_sample(LINEAR, 2)(3.0),
        ValueError,
        r"`inputs\[0\]` must have the batch of 2 samples; got 3.0",
    ),
    (
        lambda g: clipped_sum(torch.zeros(2), max_norm=1.0),
        TypeError,
        "`gradients` must map names to tensors",
    ),
    (
        lambda g: clipped_sum({}, max_norm=1.0),
        ValueError,
        "`gradients` must hold at least one name",
    ),
    (
        lambda g: clipped_sum({"a": None}, max_norm=1.0),
        TypeError,
        r"`gradients\['a'\]` must be a floating-point tensor; got None",
    ),
    (
        lambda g: clipped_sum({"a": torch.zeros(2, dtype=torch.int64)}, max_norm=1.0),
        TypeError,
        "floating-point",
    ),
    (
        lambda g: clipped_sum({"a": torch.zeros(())}, max_norm=1.0),
        ValueError,
        r"`gradients` must all have shape \(batch, ...\)",
    ),
    (
        lambda g: clipped_sum({"a": torch.zeros(2), "b": torch.zeros(3)}, max_norm=1.0),
        ValueError,
        "got batches {'a': 2, 'b': 3}",
    ),
    (
        lambda g: clipped_sum({"a": torch.tensor([1.0, math.nan])}, max_norm=1.0),
        ValueError,
        r"`gradients\['a'\]` must be finite",
    ),
    (
        lambda g: clipped_sum({"a": torch.zeros(2)}, max_norm=0),
        ValueError,
        "`max_norm` must be above 0",
    ),
    (lambda g: step_of(total=None), TypeError, "`total` must map names to tensors"),
    (
        lambda g: step_of(total={"a": torch.tensor([math.inf])}),
        ValueError,
        r"`total\['a'\]` must be finite",
    ),
    (lambda g: step_of(multiplier=-0.1), ValueError, "`multiplier` must be at least 0"),
    (lambda g: step_of(max_norm=0.0), ValueError, "`max_norm` must be above 0"),
    (
        lambda g: step_of(multiplier=1e-200, max_norm=1e-200),
        ValueError,
        r"`multiplier` must be 0 or give noise of deviation at least 2.2e-308 in torch.float64; "
        r"got 0\.$",
    ),
    (
        lambda g: step_of(max_norm=1e-300, expected_batch_size=1e10),
        ValueError,
        "`multiplier` must be 0 or give noise of deviation .*; got 1e-310",
    ),
    (lambda g: step_of(expected_batch_size=0), ValueError, "`expected_batch_size` must be above 0"),
    (lambda g: step_of(generator=0), TypeError, "`generator` must be a torch.Generator"),
    (
        lambda g: poisson_batch(0, rate=0.5, generator=g),
        ValueError,
        "`num_examples` must be at least 1",
    ),
    (
        lambda g: poisson_batch(10**11, rate=0.3, generator=g),
        ValueError,
        "`num_examples` must be at most 10,000,000,000; got 100000000000",
    ),
    (lambda g: poisson_batch(5, rate=0, generator=g), ValueError, "`rate` must be above 0"),
    (lambda g: poisson_batch(5, rate=1.1, generator=g), ValueError, "`rate` must be at most 1"),
    (
        lambda g: poisson_batch(5, rate=0.5, generator=0),
        TypeError,
        "`generator` must be a torch.Generator or None; got 0",
    ),
]


def step_of(**changed):
    good = {
        "total": {"a": torch.zeros(2)},
        "multiplier": 1.0,
        "max_norm": 1.0,
        "expected_batch_size": 4,
        "generator": torch.Generator().manual_seed(0),
    }
    arguments = good | changed
    return noisy_mean(arguments.pop("total"), **arguments)


@pytest.mark.bad_input
@pytest.mark.parametrize(("call", "error", "message"), BAD)
def test_bad_input_is_refused_with_the_reason(call, error, message, generator):
    with pytest.raises(error, match=message):
        call(generator)


@pytest.mark.bad_input
def test_sums_and_means_too_large_for_float64_are_refused_by_name():
    largest = {"a": torch.tensor([1.7e308, 1.7e308], dtype=torch.float64)}
    with pytest.raises(
        ValueError, match=r"`gradients\['a'\] clipped and added` must be finite; got 1 entries of 1"
    ):
        clipped_sum(largest, max_norm=1.7e308)
    with pytest.raises(
        ValueError, match=r"`total\['a'\] with its noise` must be finite; got 2 entries of 2"
    ):
        step_of(total=largest, expected_batch_size=1e-9)
