"""The accounting library of the documentation agrees with closed forms and integrals.

It is imported by a fixture, because its import takes a second in every process that collects this
file.
"""

import math
from functools import partial

import pytest

from references.dpsgd import epsilon_at, gaussian_delta, sampled_delta


@pytest.fixture(scope="module")
def private():
    import private

    return private


def epsilon_of(event, delta):
    """Compute epsilon on a coarse grid, rounded up."""
    from dp_accounting.pld import PLDAccountant

    return PLDAccountant(value_discretization_interval=1e-3).compose(event).get_epsilon(delta)


@pytest.mark.parametrize(
    ("multiplier", "steps", "delta"),
    [(1.1, 1, 1e-3), (5.0, 20, 1e-4), (4.0, 1, 1e-5), (0.7, 2, 1e-2)],
)
def test_epsilon_of_whole_batches_is_that_of_the_analytic_gaussian_mechanism(
    multiplier, steps, delta, private
):
    """T steps of deviation z on whole batches are one step of deviation z / sqrt(T)."""
    expected = epsilon_at(delta, partial(gaussian_delta, sigma=multiplier / math.sqrt(steps)))
    actual = epsilon_of(private.training(multiplier, rate=1.0, steps=steps), delta)
    assert expected - 1e-6 <= actual <= expected * 1.005


@pytest.mark.parametrize(
    ("multiplier", "rate", "delta"), [(0.8, 0.2, 1e-3), (2.0, 0.5, 1e-4), (0.6, 0.05, 1e-4)]
)
def test_epsilon_of_a_sampled_step_is_that_of_the_integral(multiplier, rate, delta, private):
    expected = epsilon_at(delta, partial(sampled_delta, sigma=multiplier, rate=rate))
    actual = epsilon_of(private.training(multiplier, rate=rate, steps=1), delta)
    assert expected - 1e-4 <= actual <= expected * 1.005 + 1e-3
    # Sampling lowers epsilon.
    assert actual < 0.8 * epsilon_of(private.training(multiplier, rate=1.0, steps=1), delta)


def test_noise_for_an_epsilon_gives_that_epsilon(private):
    multiplier = private.noise_for(8.0, steps=5)
    event = private.training(multiplier, rate=private.RATE, steps=5)
    assert epsilon_of(event, private.DELTA) == pytest.approx(8.0, abs=1e-3)
