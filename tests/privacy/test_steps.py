"""A step of DP-SGD moves by at most its sensitivity, and has the noise of the formula.

Each law takes an implementation, so that it can be tested on wrong ones too.
"""

import copy
import math
import re
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2, kstest

import fedprompt
from fedprompt import vit_trunk
from fedprompt.privacy import clipped_sum, noisy_mean, per_sample
from models import Client, draw_images, tiny_vit
from references.dpsgd import clipped_and_added
from same import assert_identical
from tolerance import assert_near

BATCH = 6


def ours(gradients, *, max_norm, **others):
    return noisy_mean(clipped_sum(gradients, max_norm=max_norm), max_norm=max_norm, **others)


def _noise(like, sigma, generator):
    return sigma * torch.randn(like.shape, generator=generator, dtype=torch.float64)


def clips_each_tensor(gradients, *, max_norm, **others):
    parts = [
        ours({name: gradient}, max_norm=max_norm, **others) for name, gradient in gradients.items()
    ]
    return {name: part[name] for name, part in zip(gradients, parts, strict=True)}


def clips_nothing(gradients, **others):
    total = {name: gradient.double().sum(0) for name, gradient in gradients.items()}
    return noisy_mean(total, **others)


def divides_by_the_batch(gradients, *, expected_batch_size, **others):
    return ours(gradients, expected_batch_size=len(next(iter(gradients.values()))), **others)


def noise_without_the_norm(gradients, *, max_norm, multiplier, expected_batch_size, generator):
    total = clipped_sum(gradients, max_norm=max_norm)
    return {
        name: (tensor + _noise(tensor, multiplier, generator)) / expected_batch_size
        for name, tensor in total.items()
    }


def noise_on_the_mean(gradients, *, max_norm, multiplier, expected_batch_size, generator):
    total = clipped_sum(gradients, max_norm=max_norm)
    return {
        name: tensor / expected_batch_size + _noise(tensor, multiplier * max_norm, generator)
        for name, tensor in total.items()
    }


def drawn(seed, *, batch=5, scale=3.0, dtype=torch.float64):
    """Draw gradients of three names, with norms below and above 1. Two samples are opposed."""
    generator = torch.Generator().manual_seed(seed)
    sizes = scale * 10 ** (2 * torch.rand(batch, generator=generator, dtype=torch.float64) - 1.5)
    gradients = {}
    for name, shape in {"tokens": (2, 3), "weight": (4,), "scale": ()}.items():
        gradient = torch.randn(batch, *shape, generator=generator, dtype=torch.float64)
        gradient[1:2] = -gradient[:1]
        gradients[name] = (gradient * sizes.reshape(-1, *[1] * len(shape))).to(dtype)
    return gradients


def without(gradients, sample):
    return {
        name: torch.cat([gradient[:sample], gradient[sample + 1 :]])
        for name, gradient in gradients.items()
    }


def distance(first, second):
    return math.sqrt(
        math.fsum(
            number**2
            for name in first
            for number in (first[name] - second[name]).flatten().tolist()
        )
    )


def check_sensitivity(step, seed, max_norm):
    """Removing a sample changes B times the step by at most C, and replacing one by at most 2 C."""
    quiet = partial(
        step,
        max_norm=max_norm,
        multiplier=0.0,
        expected_batch_size=50,
        generator=torch.Generator().manual_seed(0),
    )
    gradients = drawn(seed)
    whole = quiet(gradients)
    for sample in range(5):
        assert 50 * distance(whole, quiet(without(gradients, sample))) <= max_norm * (1 + 1e-12)
        rest = without(gradients, sample)
        others = {
            name: torch.cat([rest[name], -9 * gradient[sample : sample + 1]])
            for name, gradient in gradients.items()
        }
        assert 50 * distance(whole, quiet(others)) <= 2 * max_norm * (1 + 1e-12)


def check_value(step, seed, max_norm):
    """The step is the sum of the reference divided by B. Short gradients keep their norm."""
    gradients = drawn(seed)
    mean = step(
        gradients,
        max_norm=max_norm,
        multiplier=0.0,
        expected_batch_size=50,
        generator=torch.Generator().manual_seed(0),
    )
    for name, tensor in clipped_and_added(gradients, max_norm).items():
        # The tolerance covers the margin for rounding, 2^-40 of each sample.
        torch.testing.assert_close(50 * mean[name], tensor, rtol=0, atol=1e-11 * max_norm)


def check_noise(step, seed, max_norm):
    """For a sum of 0, the step is independent normal noise of deviation z C / B."""
    multiplier, expected, count = 0.7, 20, 10_000
    low, high = chi2.ppf([1e-6, 1 - 1e-6], 2 * count)
    for batch in (4, 1, 0):
        quiet = {
            name: torch.zeros(batch, count, dtype=torch.float64) for name in ("tokens", "weight")
        }
        generator = torch.Generator().manual_seed(seed)
        mean = step(
            quiet,
            max_norm=max_norm,
            multiplier=multiplier,
            expected_batch_size=expected,
            generator=generator,
        )
        numbers = torch.cat([mean["tokens"], mean["weight"]]) * expected / (multiplier * max_norm)
        assert low < numbers.square().sum() < high
        assert kstest(numbers.numpy(), "norm").pvalue > 1e-6
        assert len(set(numbers.tolist())) == 2 * count


LAWS = {"sensitivity": check_sensitivity, "value": check_value, "noise": check_noise}
WRONG = {
    clips_each_tensor: {"sensitivity", "value"},
    clips_nothing: {"sensitivity", "value"},
    divides_by_the_batch: {"sensitivity", "value", "noise"},
    noise_without_the_norm: {"noise"},
    noise_on_the_mean: {"noise"},
}


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 2**32), max_norm=st.floats(1e-3, 30))
def test_one_sample_changes_a_step_by_at_most_the_sensitivity(seed, max_norm):
    check_sensitivity(ours, seed, max_norm)
    check_value(ours, seed, max_norm)


@pytest.mark.parametrize("max_norm", [0.05, 1.0, 2.5])
def test_noise_has_the_deviation_of_the_formula(max_norm):
    check_noise(ours, 0, max_norm)


@pytest.mark.parametrize("wrong", WRONG, ids=lambda step: step.__name__)
def test_known_wrong_steps_break_their_laws(wrong):
    for law, check in LAWS.items():
        broken = 0
        for seed in range(6):
            try:
                check(wrong, seed, 0.5)
            except (AssertionError, ValueError, ZeroDivisionError):
                broken += 1
        assert (broken > 0) == (law in WRONG[wrong]), law


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_bound_holds_for_gradients_of_every_precision(dtype):
    gradients = drawn(3, batch=1, scale=300.0, dtype=dtype)
    total = clipped_sum(gradients, max_norm=0.7)
    assert all(tensor.dtype == torch.float64 for tensor in total.values())
    length = distance(total, {name: torch.zeros_like(tensor) for name, tensor in total.items()})
    assert length <= 0.7
    assert length == pytest.approx(0.7, rel=1e-11)


def test_rounding_never_exceeds_the_bound():
    """Without a margin for rounding, about half of these would exceed the bound."""
    for seed in range(100):
        total = clipped_sum(drawn(seed, batch=1, scale=300.0), max_norm=0.7)
        assert (
            distance(total, {name: torch.zeros_like(tensor) for name, tensor in total.items()})
            <= 0.7
        )


@pytest.mark.parametrize("scale", [2.0**1000, 2.0**-700, 1.0])
def test_huge_and_tiny_gradients_are_clipped_by_their_norm(scale):
    """By hand, the samples have norms 5 and 1/2 over two names. Only the first is clipped."""
    gradients = {
        "a": torch.tensor([3.0, 0.3], dtype=torch.float64) * scale,
        "b": torch.tensor([[-4.0], [0.4]], dtype=torch.float64) * scale,
    }
    total = clipped_sum(gradients, max_norm=scale)
    torch.testing.assert_close(total["a"].item() / scale, 0.6 + 0.3, rtol=1e-11, atol=0)
    torch.testing.assert_close(total["b"].item() / scale, -0.8 + 0.4, rtol=1e-11, atol=0)


def test_the_sums_of_parts_of_a_batch_add_up(generator):
    gradients = drawn(1)
    parts = [
        {name: gradient[cut] for name, gradient in gradients.items()}
        for cut in (slice(2), slice(2, 5))
    ]
    first, second = (clipped_sum(part, max_norm=1.0) for part in parts)
    for name, tensor in clipped_sum(gradients, max_norm=1.0).items():
        assert_near(first[name] + second[name], tensor)


def test_gradients_of_zero_stay_zero():
    assert clipped_sum({"a": torch.zeros(3, 2)}, max_norm=1.0)["a"].tolist() == [0.0, 0.0]


def test_inputs_are_not_changed(generator):
    gradients = drawn(0)
    before = copy.deepcopy(gradients)
    total = clipped_sum(gradients, max_norm=1.0)
    kept = copy.deepcopy(total)
    noisy_mean(total, multiplier=1.0, max_norm=1.0, expected_batch_size=5, generator=generator)
    assert_identical(gradients, before)
    assert_identical(total, kept)


def test_one_image_changes_the_step_of_a_model_by_at_most_the_sensitivity(generator):
    """The step is computed from images. Its bound is C / B."""
    client = Client(vit_trunk(tiny_vit()), generator)
    images = draw_images(tiny_vit(), BATCH)
    labels = torch.tensor([0, 1, 2, 3, 1, 1])

    def step(chosen):
        copies = per_sample(client, len(chosen))
        F.cross_entropy(copies(images[chosen]), labels[chosen], reduction="sum").backward()
        gradients = {name: parameter.grad for name, parameter in copies.named_parameters()}
        total = clipped_sum(gradients, max_norm=0.1)
        return noisy_mean(
            total, multiplier=0.0, max_norm=0.1, expected_batch_size=4, generator=generator
        )

    whole = step(list(range(BATCH)))
    moved = [
        distance(whole, step([other for other in range(BATCH) if other != one]))
        for one in range(BATCH)
    ]
    assert max(moved) <= 0.1 / 4 * (1 + 1e-9)
    # All gradients are clipped here, so the bound is attained.
    assert max(moved) > 0.99 * 0.1 / 4


@pytest.mark.parametrize("weight", [0, 0.5, 1, 1000])
def test_one_client_changes_the_sum_of_the_page_by_at_most_the_bound(weight, monkeypatch):
    """The loop in docs/how-to/differential-privacy.md, for any weight that a client reports."""
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "differential-privacy.md").read_text()
    (block,) = (
        block
        for block in re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
        if "num_clients" in block
    )
    model, claims, totals, collect = nn.Linear(4, 3), [], [], fedprompt.collect
    nn.init.constant_(model.weight, 10.0)

    def trained(model, *, weight):
        nn.init.constant_(model.weight, 11.0)
        return collect(model, weight=claims[-1])

    def caught(total, **options):
        totals.append(total)
        return noisy_mean(total, **options)

    monkeypatch.setattr(fedprompt, "collect", trained)
    monkeypatch.setattr(fedprompt.privacy, "noisy_mean", caught)
    for claim, clients in ((weight, [0]), (1, [0, 1])):
        claims.append(claim)
        monkeypatch.setattr(
            fedprompt.privacy,
            "poisson_batch",
            lambda count, clients=clients, **options: torch.tensor(clients),
        )
        names = {
            "fp": fedprompt,
            "torch": torch,
            "model": model,
            "draw": torch.Generator().manual_seed(0),
        }
        nn.init.constant_(model.weight, 10.0)
        exec(compile(block, "docs/how-to/differential-privacy.md", "exec"), names)
    lengths = [
        distance(total, {name: torch.zeros_like(tensor) for name, tensor in total.items()})
        for total in totals
    ]
    assert lengths[0] == pytest.approx(0.5 * min(weight, 1), rel=1e-4)
    assert lengths[0] <= 0.5
    # Two equal changes add up.
    assert lengths[1] == pytest.approx(1.0, rel=1e-4)
