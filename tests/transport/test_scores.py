"""Scores and duals of plans: gradients against differences, values by loops, plans from duals."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from fedprompt.transport import (
    dykstra,
    envelope,
    exact,
    implicit,
    independent,
    newton,
    plan_fixed,
    plan_from_duals,
    sinkhorn,
    unbalanced,
)
from references.transport import planted_cost, slow_plan

TIGHT = {"tolerance": 1e-13, "max_iterations": 20_000}


def problem(mass=0.8, *, batch=(2,), rows=6, columns=4):
    """Draw costs, and masses that differ."""
    cost = planted_cost("wide", (*batch, rows, columns), torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.rand(n, generator=generator, dtype=cost.dtype) + 0.3 for n in (rows, columns))
    return cost, a / a.sum(), b / b.sum() * mass


# A solver with its options, and the mass of the columns.
SOLVED = [
    *((partial(newton, epsilon=e, **TIGHT), mass) for e in (0.1, 0.5) for mass in (0.3, 0.8, 1.0)),
    *((partial(dykstra, epsilon=0.2, **TIGHT), mass) for mass in (0.8, 1.0)),
    (partial(sinkhorn, epsilon=0.2, **TIGHT), 1.0),
    (exact, 0.8),
    (independent, 0.8),
    *((partial(unbalanced, epsilon=0.3, rho=rho, **TIGHT), 0.8)
      for rho in (0.05, 1.0, (1.0, 0.3), (math.inf, 1.0), (1.0, math.inf))),
]  # fmt: skip


VALUES = [(envelope, *row) for row in SOLVED if row[0] is not independent]  # it minimizes none


@pytest.mark.parametrize(("score", "solver", "mass"), VALUES + [(implicit, *row) for row in SOLVED])
def test_the_gradient_of_a_score_is_that_of_its_value(score, solver, mass):
    """By central differences of the whole cost, with the problem solved at both ends."""
    cost, a, b = problem(mass)
    own = cost.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(score(own, solver(own, a, b)).sum(), own)
    for seed in range(3):
        step = torch.randn(cost.shape, generator=torch.Generator().manual_seed(seed)).double()
        ends = (score(at, solver(at, a, b)) for at in (cost + 1e-5 * step, cost - 1e-5 * step))
        slope = next(ends) - next(ends)
        torch.testing.assert_close((gradient * step).sum((1, 2)), slope / 2e-5, rtol=0, atol=2e-7)


def test_scores_are_the_plan_times_the_cost_and_the_papers_gradient_leaves_a_part_out():
    cost, a, b = problem()
    coupling, own = newton(cost, a, b, epsilon=0.2), cost.clone().requires_grad_()
    pairs = zip(coupling.plan, cost, strict=True)
    expected = torch.stack([sum((plan * its).flatten()) for plan, its in pairs])
    for score in (plan_fixed, implicit):
        torch.testing.assert_close(score(cost, coupling), expected)
    fixed, whole = (
        torch.autograd.grad(score(own, coupling).sum(), own)[0] for score in (plan_fixed, implicit)
    )
    assert torch.equal(fixed, coupling.plan)
    assert (fixed - whole).abs().max() > 1e-3
    assert F.cosine_similarity(fixed.flatten(), whole.flatten(), 0) > 0.7


@pytest.mark.parametrize("rho", [None, (0.5, 2.0), (math.inf, 0.5)])
def test_envelope_is_the_value_of_the_problem(rho):
    """By loops over the terms; with soft marginals, the minimum is below its neighbors."""
    cost, a, b = problem(batch=())
    solve = newton if rho is None else partial(unbalanced, rho=rho)
    coupling = solve(cost, a, b, **TIGHT)

    def divergence(found, expected):
        pairs = zip(found.flatten().tolist(), expected.flatten().tolist(), strict=True)
        return sum(p * math.log(p / q) - p + q for p, q in pairs)

    def value(plan):
        total = (plan * cost).sum().item()
        if rho is None:
            return total + 0.1 * sum(p * math.log(p) for p in plan.flatten().tolist())
        total += 0.1 * divergence(plan, a[:, None] * b)
        sides = zip(rho, (plan.sum(1), plan.sum(0)), (a, b), strict=True)
        return total + sum(w * divergence(*both) for w, *both in sides if w < math.inf)

    assert envelope(cost, coupling).item() == pytest.approx(value(coupling.plan), abs=1e-12)
    if rho and max(rho) < math.inf:
        assert value(coupling.plan) < min(value(by * coupling.plan) for by in (0.99, 1.01))


@pytest.mark.parametrize("constant", [0, 1000])
def test_implicit_in_float32_with_rows_of_no_mass_and_many_columns(constant):
    """A constant in the cost has no effect, also on the error of rounding."""
    cost, _, _ = problem(rows=5, columns=6)
    a = torch.tensor([0.3, 0.0, 0.4, 0.2, 0.1], dtype=torch.float64)
    b = torch.full((6,), 0.15, dtype=torch.float64)
    wide, single = cost.clone().requires_grad_(), (cost + constant).float().requires_grad_()
    implicit(wide, newton(wide, a, b, epsilon=0.2, **TIGHT)).sum().backward()
    implicit(single, newton(single, a.float(), b.float(), epsilon=0.2)).sum().backward()
    assert (single.grad[:, 1] == 0).all()
    torch.testing.assert_close(single.grad.double(), wide.grad, rtol=0, atol=2e-5)


# Plans from duals.


@pytest.mark.parametrize(
    ("solver", "mass"),
    [(newton, 0.8), (newton, 1.0), (dykstra, 0.8), (dykstra, 1.0), (sinkhorn, 1.0)],
)
@pytest.mark.parametrize("batch", [(), (4,), (2, 1, 3), (0,)])
def test_the_plan_follows_from_its_duals(solver, mass, batch):
    """Costs of any rank, and masses that broadcast."""
    cost, a, b = problem(mass, batch=batch)
    if batch and mass < 1:
        a = a * torch.linspace(1, 1.2, batch[0]).double().reshape(-1, *[1] * len(batch))
    coupling = solver(cost, a, b, epsilon=0.2, tolerance=1e-12, max_iterations=5000)
    assert coupling.duals.shape == (*batch, 4)
    plan = plan_from_duals(coupling.duals, cost, a, b, epsilon=0.2)
    torch.testing.assert_close(plan, coupling.plan, rtol=0, atol=1e-10)


def test_the_formula_of_duals_is_that_of_the_slow_reference():
    """In a slack row of the reference plan the duals are x = log T + D / epsilon."""
    cost, a, b = problem(0.6, batch=())
    plan = slow_plan(cost, a, b, epsilon=0.2)
    slack = int((a - plan.sum(1)).argmax())
    duals = (plan.log() + (cost - cost.amin(0)) / 0.2)[slack]
    found = plan_from_duals(duals, cost, a, b, epsilon=0.2)
    torch.testing.assert_close(found, plan, rtol=0, atol=1e-10)
    assert exact(cost, a, b).duals is independent(cost, a, b).duals is None
