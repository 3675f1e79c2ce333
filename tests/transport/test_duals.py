"""Plans from duals equal the plans of the solvers."""

import pytest
import torch

from fedprompt.transport import dykstra, exact, independent, newton, plan_from_duals, sinkhorn
from references.transport import planted_cost, slow_plan

SHAPES = [(9, 3), (4, 9, 3), (2, 3, 9, 3), (2, 1, 3, 9, 3), (0, 9, 3)]


def problem(shape, mass, dtype=torch.float64):
    """Draw costs of a shape; the masses of rows differ along the first axis of a batch."""
    generator = torch.Generator().manual_seed(0)
    batch = shape[:1] + (1,) * (len(shape) - 3) if len(shape) > 2 else ()
    a = torch.rand(*batch, shape[-2], generator=generator, dtype=torch.float64) + 0.3
    b = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64) * mass
    cost = planted_cost("wide", shape, generator)
    return cost.to(dtype), (a / a.sum(-1, keepdim=True)).to(dtype), b.to(dtype)


@pytest.mark.parametrize(
    ("solver", "mass"),
    [(newton, 0.8), (newton, 1.0), (dykstra, 0.8), (dykstra, 1.0), (sinkhorn, 1.0)],
)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_plan_follows_from_its_duals(solver, mass, shape):
    """Costs of any rank, and masses that broadcast."""
    cost, a, b = problem(shape, mass)
    coupling = solver(cost, a, b, epsilon=0.2, tolerance=1e-12, max_iterations=5000)
    assert coupling.duals.shape == (*shape[:-2], 3)
    plan = plan_from_duals(coupling.duals, cost, a, b, epsilon=0.2)
    assert plan.shape == cost.shape
    torch.testing.assert_close(plan, coupling.plan, rtol=0, atol=1e-10)


def test_the_formula_is_that_of_the_slow_reference():
    """In a slack row of the reference plan the duals are x = log T + D / epsilon."""
    cost, a, b = problem((9, 3), 0.6)
    plan = slow_plan(cost, a, b, epsilon=0.2)
    slack = int((a - plan.sum(1)).argmax())
    duals = (plan.log() + (cost - cost.amin(0)) / 0.2)[slack]
    torch.testing.assert_close(
        plan_from_duals(duals, cost, a, b, epsilon=0.2), plan, rtol=0, atol=1e-10
    )


def test_solvers_without_duals_return_none():
    cost, a, b = problem((4, 9, 3), 0.8)
    assert exact(cost, a, b).duals is None
    assert independent(cost, a, b).duals is None
