"""Each gradient against finite differences of the number that it is the gradient of, and against unrolling."""

from functools import partial

import pytest
import torch

from fedprompt import Coupling, dykstra, envelope, implicit, independent, newton, plan_fixed, sinkhorn
from references.transport import marginals, planted_cost

EPSILON = 0.2


def problem(mass=0.8, *, rows=6, columns=3, batch=(2,)):
    cost = planted_cost("wide", (*batch, rows, columns), torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    a = torch.rand(rows, generator=generator, dtype=torch.float64) + 0.3
    b = torch.rand(columns, generator=generator, dtype=torch.float64) + 0.3
    return cost, a / a.sum(), b / b.sum() * mass


def solve(cost, a, b, solver=newton):
    return solver(cost, a, b, epsilon=EPSILON, tolerance=1e-13, max_iterations=5000)


def gradient_of(score, cost, a, b):
    cost = cost.clone().requires_grad_()
    return torch.autograd.grad(score(cost, solve(cost, a, b), a, b).sum(), cost)[0]


def numeric_gradient(value, cost, step=1e-5):
    """Central differences, the problem solved anew at both ends."""
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
    exact = gradient_of(partial(implicit, epsilon=EPSILON), cost, a, b)
    torch.testing.assert_close(exact, numeric, rtol=0, atol=1e-7)
    fixed = gradient_of(plan_fixed, cost, a, b)
    assert (fixed - numeric).abs().max() > 1e-3  # what the paper's choice leaves out
    assert torch.nn.functional.cosine_similarity(fixed.flatten(), numeric.flatten(), 0) > 0.7


@pytest.mark.parametrize("mass", [0.3, 0.8, 1.0])
def test_envelope_is_the_gradient_of_the_regularised_value(mass):
    cost, a, b = problem(mass)

    def value(moved):
        plan = solve(moved, a, b).plan
        return (plan * moved).sum() + EPSILON * (plan * plan.log()).sum()

    torch.testing.assert_close(
        gradient_of(partial(envelope, epsilon=EPSILON), cost, a, b), numeric_gradient(value, cost), rtol=0, atol=1e-8
    )
    coupling = solve(cost, a, b)
    torch.testing.assert_close(envelope(cost, coupling, a, b, epsilon=EPSILON).sum(), value(cost), rtol=1e-12, atol=0)


def test_implicit_matches_differentiating_through_the_iterations():
    """Four hundred alternations with a graph; at equal masses too, where no row is slack."""
    for mass in (0.7, 1.0):
        cost, a, b = problem(mass, batch=())
        cost.requires_grad_()
        v = b.log()
        for _ in range(400):
            u = a.log() - (-cost / EPSILON + v).logsumexp(1)
            u = u if mass == 1 else u.clamp(max=0)
            v = b.log() - (-cost / EPSILON + u[:, None]).logsumexp(0)
        unrolled = torch.autograd.grad((((-cost / EPSILON + u[:, None] + v).exp()) * cost).sum(), cost)[0]
        exact = gradient_of(partial(implicit, epsilon=EPSILON), cost.detach(), a, b)
        torch.testing.assert_close(exact, unrolled, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("solver", "mass"), [(dykstra, 0.8), (dykstra, 1.0), (sinkhorn, 1.0)])
def test_implicit_takes_a_plan_from_any_entropic_solver(solver, mass):
    cost, a, b = problem(mass)
    expected = gradient_of(partial(implicit, epsilon=EPSILON), cost, a, b)
    cost = cost.clone().requires_grad_()
    implicit(cost, solve(cost, a, b, solver), a, b, epsilon=EPSILON).sum().backward()
    torch.testing.assert_close(cost.grad, expected, rtol=0, atol=1e-8)


def test_implicit_in_float32_with_rows_of_no_mass_and_many_columns():
    cost, _, _ = problem(rows=5, columns=6)
    a = torch.tensor([0.3, 0.0, 0.4, 0.2, 0.1], dtype=torch.float64)
    b = torch.full((6,), 0.15, dtype=torch.float64)
    expected = gradient_of(partial(implicit, epsilon=EPSILON), cost, a, b)
    single = cost.float().requires_grad_()
    coupling = newton(single, a.float(), b.float(), epsilon=EPSILON)
    implicit(single, coupling, a.float(), b.float(), epsilon=EPSILON).sum().backward()
    assert (single.grad[:, 1] == 0).all()
    torch.testing.assert_close(single.grad.double(), expected, rtol=0, atol=1e-4)


def test_scores_are_the_plan_times_the_cost():
    cost, a, b = problem()
    coupling = independent(cost, a, b)
    expected = torch.stack([sum((plan * its).flatten()) for plan, its in zip(coupling.plan, cost, strict=True)])
    torch.testing.assert_close(plan_fixed(cost, coupling, a, b), expected)
    torch.testing.assert_close(implicit(cost, coupling, a, b), expected)


@pytest.mark.bad_input
@pytest.mark.parametrize("score", [plan_fixed, envelope, implicit])
def test_wrong_input_is_refused(score):
    cost, a, b = problem()
    coupling = newton(cost, a, b)
    with pytest.raises(TypeError, match="`coupling` must be a Coupling"):
        score(cost, coupling.plan, a, b)
    with pytest.raises(ValueError, match=r"`cost` must have the shape of the plan \(2, 6, 3\)"):
        score(cost[0], coupling, a, b)
    if score is not plan_fixed:
        with pytest.raises(ValueError, match="`epsilon` must be above 0"):
            score(cost, coupling, a, b, epsilon=0)


@pytest.mark.bad_input
@pytest.mark.parametrize("score", [envelope, implicit])
@pytest.mark.parametrize(
    ("a", "b", "error", "words"),
    [
        (torch.ones(5), torch.ones(3), ValueError, r"`a` must have shape \(..., 6\)"),
        (torch.ones(6), torch.ones(2), ValueError, r"`b` must have shape \(..., 3\)"),
        (torch.ones(6), [0.1, 0.1, 0.1], TypeError, "`b` must be a floating-point tensor"),
        (torch.ones(6), torch.tensor([1.0, 1.0, 0.0]), ValueError, "`b` must be finite and above 0"),
        (-torch.ones(6), torch.ones(3), ValueError, "`a` must be finite and at least 0"),
        (torch.ones(6) / 6, torch.ones(3), ValueError, "`b` must sum to at most the sum of `a`"),
    ],
)
def test_wrong_masses_are_refused_where_they_are_given(score, a, b, error, words):
    cost, its_a, its_b = problem()
    coupling = newton(cost, its_a, its_b)
    with pytest.raises(error, match=words):
        score(cost, coupling, a, b)


def test_no_plan_is_mutated():
    cost, (a, b) = torch.rand(3, 4, 2, generator=torch.Generator().manual_seed(2)), marginals(4, 2, 0.8, torch.float32)
    coupling = newton(cost, a, b)
    before = Coupling(*(part.clone() for part in coupling))
    for score in (plan_fixed, envelope, implicit):
        score(cost, coupling, a, b)
    assert all(torch.equal(part, old) for part, old in zip(coupling, before, strict=True))
