"""Bad input of the functions of DP-SGD is refused with the reason."""

from functools import partial

import torch
import torch.nn as nn

from fedprompt.privacy import noisy_mean, poisson_batch
from refusals import refused

LINEAR = nn.Linear(2, 2)
poisson = partial(poisson_batch, rate=0.5)


def step_of(**changed):
    arguments = {"total": {"a": torch.zeros(2)}, "multiplier": 1.0, "max_norm": 1.0}
    arguments |= {"expected_batch_size": 4, "generator": torch.Generator().manual_seed(0)} | changed
    return noisy_mean(arguments.pop("total"), **arguments)


LARGEST = {"a": torch.tensor([1.7e308, 1.7e308], dtype=torch.float64)}
test_wrong_calls_are_refused_by_name = refused(globals())("""
privacy.clipped_sum(LARGEST, max_norm=1.7e308) -> ValueError: `gradients['a'] clipped and added`
step_of(total=LARGEST, expected_batch_size=1e-9) -> ValueError: `total['a'] with its noise` must be
privacy.per_sample(LINEAR.state_dict(), 2) -> TypeError: `model` must be an nn.Module
privacy.per_sample(LINEAR, -1) -> ValueError: `batch_size` must be at least 0; got -1.
privacy.per_sample(freeze(nn.Linear(2, 2)), 2) -> ValueError: `model` must have a parameter with
privacy.per_sample(LINEAR, 2)(3) -> ValueError: `inputs[0]` must have the batch of 2 samples; got 3
privacy.per_sample(LINEAR, 2)(ones(2, 2).to_sparse()) -> TypeError: `inputs[0]` must be a dense
privacy.per_sample(LINEAR, 2)(torch.zeros(3, 2)) -> ValueError: `inputs[0]` must have the batch of
privacy.clipped_sum(torch.zeros(2), max_norm=1.0) -> TypeError: `gradients` must map names to
privacy.clipped_sum({}, max_norm=1.0) -> ValueError: `gradients` must hold at least one name
privacy.clipped_sum({'a': None}, max_norm=1.0) -> TypeError: `gradients['a']` must be a
privacy.clipped_sum({'a': torch.zeros(())}, max_norm=1.0) -> ValueError: `gradients` must all have
privacy.clipped_sum({'a': torch.zeros(2), 'b': torch.zeros(3)}, max_norm=1.0) \
-> ValueError: got batches {'a': 2, 'b': 3}
privacy.clipped_sum({'a': tensor([1.0, nan])}, max_norm=1.0) -> ValueError: ['a']` must be finite
privacy.clipped_sum({'a': torch.zeros(2)}, max_norm=0) -> ValueError: `max_norm` must be above 0
step_of(total=None) -> TypeError: `total` must map names to tensors
step_of(total={'a': torch.tensor([torch.inf])}) -> ValueError: `total['a']` must be finite
step_of(multiplier=-0.1) -> ValueError: `multiplier` must be at least 0
step_of(max_norm=0.0) -> ValueError: `max_norm` must be above 0
step_of(multiplier=1e-200, max_norm=1e-200) -> ValueError: `multiplier` must be 0 or give noise of
step_of(max_norm=1e-300, expected_batch_size=1e10) -> ValueError: `multiplier` must be 0 or give
step_of(expected_batch_size=0) -> ValueError: `expected_batch_size` must be above 0
poisson(0) -> ValueError: `num_examples` must be at least 1
poisson(10 ** 11) -> ValueError: `num_examples` must be at most
poisson(5, rate=0) -> ValueError: `rate` must be above 0
poisson(5, rate=1.1) -> ValueError: `rate` must be at most 1
""")
