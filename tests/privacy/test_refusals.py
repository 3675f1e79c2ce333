"""Arguments of privacy are refused by name, and their edges are taken."""

import math
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn as nn
from torch import float16, float64, full, nan, ones, tensor, zeros

from fedprompt import Weighted, freeze
from fedprompt.privacy import (
    cap_weight,
    clip_norm,
    clipped_sum,
    from_sum,
    gaussian_noise,
    noisy_mean,
    per_sample,
    poisson_batch,
    to_summable,
)
from refusals import refused_and_taken

ONE = {"a": Weighted(ones(2, 3), ones(2))}
LINEAR, SEEDED = nn.Linear(2, 2), torch.Generator().manual_seed(0)
ABOVE_0 = [0, -1.0, nan, math.inf, "1", None], [1e-30, 1]
AT_LEAST_0 = [-0.1, nan, math.inf, "1"], [0]


class Elsewhere(torch.Generator):
    device = torch.device("cuda:0")


used = torch.Generator()
torch.rand(5, generator=used)
SOURCE = [0, "seed", np.random.default_rng(0), torch.Generator(), used, Elsewhere()], [
    None, torch.Generator().manual_seed(0), torch.Generator().manual_seed(2**63 - 1)]  # fmt: skip


def sent(value, weight=1.0, dtype=float64):
    """Return a payload of some numbers."""
    return {"a": Weighted(tensor(value, dtype=dtype), tensor(weight, dtype=dtype))}


STATISTICS = {"norm.running_var": ONE["a"]}
PAYLOADS = [[1.0], {}, {"a": ones(2)}, {1: ONE["a"]}, sent([nan]), sent([1.0], -1.0),
            sent([1.0], nan)], [sent([nan], 0.0)]  # fmt: skip
CENTERS = [{"b": ones(1)}, {"a": ones(3)}, {"a": ones(2, 3).double()}, {"a": ones(2, 3) * nan},
           {}, 3], [None, {"a": ones(2, 3)}]  # fmt: skip
VECTORS = [ones(7), [1.0] * 8, ones(8).long(), full((8,), nan), -ones(8), ones(2, 4)], [zeros(8)]
GRADIENTS = [zeros(2), {}, {"a": None}, {"a": zeros(())}, {"a": zeros(2), "b": zeros(3)}, {
    "a": tensor([1.0, nan])}], [{"a": zeros(0, 2)}, {"a": zeros(2, 1), "b": zeros(2)}]  # fmt: skip
LARGEST = {"a": tensor([1.7e308, 1.7e308], dtype=float64)}
SMALL = {"payload": sent([0.0]), "multiplier": 1e-200, "sensitivity": 1.0}
SUM = {"total": {"a": zeros(2)}, "multiplier": 1.0, "max_norm": 1.0, "expected_batch_size": 4}


def fits(dtype):
    """Divide a sum by its weight 1 in a dtype."""
    return lambda vector: from_sum(
        tensor([vector, 1.0], dtype=float64), like=sent([0.0], 0.0, dtype)
    )


test_wrong_arguments_are_refused_by_name_and_edges_are_taken = refused_and_taken([
    (partial(clip_norm, max_norm=1), {}, {"payload": PAYLOADS}),
    (clip_norm, {"payload": ONE, "max_norm": 1}, {"max_norm": ABOVE_0, "center": CENTERS}),
    (cap_weight, {"payload": ONE, "max_weight": 1}, {"payload": PAYLOADS, "max_weight": ABOVE_0}),
    (gaussian_noise, {"payload": ONE, "multiplier": 1, "sensitivity": 1}, {
        "payload": ([*PAYLOADS[0], sent([1e300]), STATISTICS], []), "multiplier": AT_LEAST_0,
        "sensitivity": (ABOVE_0[0], [1]), "generator": SOURCE}),
    (gaussian_noise, SMALL, {
        "sensitivity": ([], [1e200]), "multiplier": ([1e-308], [0, 2.3e-308])}),
    (gaussian_noise, {"payload": ONE, "multiplier": 1, "sensitivity": 1e300}, {
        "payload": ([ONE], [sent([0.0])])}),
    (to_summable, {}, {"payload": ([*PAYLOADS[0], sent([1e300], 1e300)], [sent([1e300], 1e7)])}),
    (partial(from_sum, like=ONE), {}, {"vector": VECTORS}),
    (partial(from_sum, ones(8)), {}, {"like": ([{}, {"a": ones(8)}, 3], [ONE])}),
    *((fits(dtype), {}, {"vector": ([mean], [-mean / 4])})
      for dtype, mean in ((float16, 1e5), (torch.bfloat16, 3.7e38), (torch.float32, 1e39))),
    (poisson_batch, {"num_examples": 5, "rate": 0.5}, {
        "num_examples": ([0, 1.0, "5", 10**11], [1]), "rate": ([0, 1.1, nan, "1"], [1, 1e-9]),
        "generator": SOURCE}),
    (per_sample, {"model": LINEAR, "batch_size": 2}, {
        "model": ([LINEAR.state_dict(), freeze(nn.Linear(2, 2)), nn.Linear], [LINEAR.eval()]),
        "batch_size": ([-1, 1.0, None], [0])}),
    (lambda inputs: per_sample(LINEAR, 2)(inputs), {}, {
        "inputs": ([3, ones(2, 2).to_sparse(), zeros(3, 2), zeros(())], [zeros(2, 2)])}),
    (clipped_sum, {"gradients": {"a": zeros(2)}, "max_norm": 1.0}, {
        "gradients": GRADIENTS, "max_norm": ABOVE_0}),
    (clipped_sum, {"max_norm": 1.7e308}, {"gradients": ([LARGEST], [{"a": LARGEST["a"][:1]}])}),
    (noisy_mean, SUM, {
        "total": ([None, {}, {"a": tensor([math.inf])}], [{"a": zeros(0)}]),
        "multiplier": AT_LEAST_0, "max_norm": ABOVE_0, "expected_batch_size": ABOVE_0,
        "generator": SOURCE}),
    (noisy_mean, SUM | {"max_norm": 1e-300, "expected_batch_size": 1e10}, {
        "multiplier": ([1.0], [0, 1e3])}),
    (noisy_mean, SUM | {"expected_batch_size": 1e-9}, {"total": ([LARGEST], [])}),
])  # fmt: skip


class Returning(nn.Module):
    """Module with one parameter that returns the result of a function."""

    def __init__(self, result):
        super().__init__()
        self.scale, self.result = nn.Parameter(torch.ones(4)), result

    def forward(self, *inputs):
        return self.result(self.scale, *inputs)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("result", "inputs"),
    [
        (lambda scale, values: (values * scale, values), [ones(3, 4)]),
        (lambda scale: (scale, scale), []),
        (lambda scale, values: (values * scale).sum(), [ones(3, 4)]),
    ],
)
def test_a_module_must_return_a_tensor_for_each_sample(result, inputs):
    with pytest.raises((TypeError, ValueError), match="`model` must return"):
        per_sample(Returning(result), 3)(*inputs)


def test_a_new_generator_has_the_seed_by_which_it_is_recognized():
    assert torch.Generator().initial_seed() == 67280421310721  # from the source of c10
