"""Gradients of scores against finite differences, and against differentiating the iterations."""

from itertools import pairwise

import pytest
import torch

from fedprompt.transport import (
    dykstra,
    envelope,
    exact,
    implicit,
    independent,
    newton,
    plan_fixed,
    sinkhorn,
)
from references.transport import planted_cost

EPSILON = 0.2


def problem(mass=0.8, *, rows=6, columns=3, batch=(1,)):
    cost = planted_cost("wide", (*batch, rows, columns), torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    a = torch.rand(rows, generator=generator, dtype=torch.float64) + 0.3
    b = torch.rand(columns, generator=generator, dtype=torch.float64) + 0.3
    return cost, a / a.sum(), b / b.sum() * mass


def solve(cost, a, b, solver=newton):
    return solver(cost, a, b, epsilon=EPSILON, tolerance=1e-13, max_iterations=5000)


def gradient_of(score, cost, a, b):
    cost = cost.clone().requires_grad_()
    return torch.autograd.grad(score(cost, solve(cost, a, b)).sum(), cost)[0]


def numeric_gradient(value, cost, step=1e-5):
    """Compute central differences, with the problem solved at both ends."""
    result = torch.zeros_like(cost)
    for index in range(cost.numel()):
        nudge = torch.zeros_like(cost).flatten()
        nudge[index] = step
        nudge = nudge.reshape(cost.shape)
        result.view(-1)[index] = (value(cost + nudge) - value(cost - nudge)) / (2 * step)
    return result


@pytest.mark.parametrize("mass", [0.3, 0.8, 1.0])
def test_implicit_is_the_gradient_of_the_transport_cost(mass):
    cost, a, b = problem(mass)
    numeric = numeric_gradient(lambda moved: (solve(moved, a, b).plan * moved).sum(), cost)
    own = gradient_of(implicit, cost, a, b)
    torch.testing.assert_close(own, numeric, rtol=0, atol=1e-7)
    fixed = gradient_of(plan_fixed, cost, a, b)
    assert (fixed - numeric).abs().max() > 1e-3  # the part that the paper's gradient leaves out
    assert torch.nn.functional.cosine_similarity(fixed.flatten(), numeric.flatten(), 0) > 0.7


@pytest.mark.parametrize("mass", [0.3, 0.8, 1.0])
def test_envelope_is_the_gradient_of_the_regularized_value(mass):
    cost, a, b = problem(mass)

    def value(moved):
        plan = solve(moved, a, b).plan
        return (plan * moved).sum() + EPSILON * (plan * plan.log()).sum()

    torch.testing.assert_close(
        gradient_of(envelope, cost, a, b), numeric_gradient(value, cost), rtol=0, atol=1e-8
    )
    coupling = solve(cost, a, b)
    torch.testing.assert_close(envelope(cost, coupling).sum(), value(cost), rtol=1e-12, atol=0)


@pytest.mark.parametrize(("solver", "mass"), [(dykstra, 0.8), (dykstra, 1.0), (sinkhorn, 1.0)])
def test_implicit_takes_a_plan_from_any_entropic_solver(solver, mass):
    cost, a, b = problem(mass)
    expected = gradient_of(implicit, cost, a, b)
    cost = cost.clone().requires_grad_()
    implicit(cost, solve(cost, a, b, solver)).sum().backward()
    torch.testing.assert_close(cost.grad, expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("constant", [0, 1000])
def test_implicit_in_float32_with_rows_of_no_mass_and_many_columns(constant):
    """A constant in the cost has no effect, also on the error of rounding."""
    cost, _, _ = problem(rows=5, columns=6)
    a = torch.tensor([0.3, 0.0, 0.4, 0.2, 0.1], dtype=torch.float64)
    b = torch.full((6,), 0.15, dtype=torch.float64)
    expected = gradient_of(implicit, cost, a, b)
    single = (cost + constant).float().requires_grad_()
    coupling = newton(single, a.float(), b.float(), epsilon=EPSILON)
    implicit(single, coupling).sum().backward()
    assert (single.grad[:, 1] == 0).all()
    torch.testing.assert_close(single.grad.double(), expected, rtol=0, atol=2e-5)


def test_scores_are_the_plan_times_the_cost():
    cost, a, b = problem()
    coupling = independent(cost, a, b)
    expected = torch.stack(
        [sum((plan * its).flatten()) for plan, its in zip(coupling.plan, cost, strict=True)]
    )
    torch.testing.assert_close(plan_fixed(cost, coupling), expected)
    torch.testing.assert_close(implicit(cost, coupling), expected)


@pytest.mark.parametrize("score", [envelope, implicit])
def test_epsilon_and_masses_are_those_that_the_plan_was_solved_with(score):
    """Gradients agree with finite differences for each epsilon and mass of the solver."""
    cost, a, b = problem()
    found = []
    for epsilon in (0.1, 0.5):
        for mass in (1.0, 0.5):
            coupling = newton(cost, a, mass * b, epsilon=epsilon, tolerance=1e-13)
            assert coupling.epsilon == epsilon
            assert torch.equal(coupling.a, a)
            assert torch.equal(coupling.b, mass * b)
            step = torch.linspace(-1, 1, cost.numel(), dtype=torch.float64).reshape(cost.shape)
            values = [
                score(moved, newton(moved, a, mass * b, epsilon=epsilon, tolerance=1e-13))
                for moved in (cost + 1e-5 * step, cost - 1e-5 * step)
            ]
            own = cost.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(score(own, coupling).sum(), own)
            torch.testing.assert_close(
                (gradient * step).sum((1, 2)), (values[0] - values[1]) / 2e-5, rtol=0, atol=1e-7
            )
            found.append(gradient)
    assert all((one - other).abs().max() > 1e-3 for one, other in pairwise(found))


@pytest.mark.parametrize("solver", [exact, independent])
def test_the_gradient_is_the_plan_if_the_plan_does_not_change(solver):
    """A small change of the cost does not change these plans."""
    cost, a, b = problem()
    expected = numeric_gradient(lambda moved: (solver(moved, a, b).plan * moved).sum(), cost)
    own = cost.clone().requires_grad_()
    implicit(own, solver(cost, a, b)).sum().backward()
    torch.testing.assert_close(own.grad, expected, rtol=0, atol=1e-8)
