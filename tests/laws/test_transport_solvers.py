"""Laws that every public transport solver obeys, and wrong solvers that the laws reject."""

import inspect
import math
from functools import partial
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedprompt import transport
from fedprompt.interfaces import Coupling, TransportSolver
from fedprompt.transport import dykstra, exact, independent, newton, sinkhorn, unbalanced
from references.transport import kkt_violation, marginals, planted_cost

KINDS = ["clip", "trained", "wide"]
TIGHT = 1e-10


class Row(NamedTuple):
    """A solver with a small tolerance, and the problems that it solves."""

    solve: TransportSolver
    masses: tuple[float, ...] = (0.3, 0.8, 0.95, 1.0)
    entropic: bool = True


SOLVERS = {
    "newton": Row(partial(newton, tolerance=TIGHT)),
    "dykstra": Row(
        partial(dykstra, tolerance=TIGHT, max_iterations=50_000), masses=(0.3, 0.8, 1.0)
    ),
    "sinkhorn": Row(partial(sinkhorn, tolerance=TIGHT, max_iterations=50_000), masses=(1.0,)),
    "unbalanced": Row(
        partial(unbalanced, rho=math.inf, tolerance=TIGHT, max_iterations=50_000), masses=(1.0,)
    ),
    "exact": Row(exact, entropic=False),
    "independent": Row(independent, entropic=False),
}
ENTROPIC = [name for name, row in SOLVERS.items() if row.entropic]


def problem(kind="trained", mass=0.8, *, batch=(2, 3), rows=12, columns=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    a = torch.rand(rows, generator=generator, dtype=torch.float64) + 0.2
    b = torch.rand(columns, generator=generator, dtype=torch.float64) + 0.2
    return planted_cost(kind, (*batch, rows, columns), generator), a / a.sum(), b / b.sum() * mass


def plans_are_feasible(solve, mass, kind="trained"):
    """Law T-a: plans are at least 0, both marginals hold, and `error` covers them."""
    cost, a, b = problem(kind, mass)
    coupling = solve(cost, a, b)
    assert isinstance(coupling, Coupling)
    assert coupling.plan.shape == cost.shape
    assert coupling.error.shape == coupling.iterations.shape == cost.shape[:-2]
    assert not coupling.plan.requires_grad
    assert (coupling.plan >= 0).all()
    columns = ((coupling.plan.sum(-2) - b) / b).abs().amax(-1)
    rows = ((coupling.plan.sum(-1) - a) / a).clamp(min=0).amax(-1)
    assert columns.max() <= 1e-8
    assert rows.max() <= 1e-8
    assert (coupling.error >= torch.maximum(rows, columns) - 1e-12).all()


def plans_are_optimal(solve, mass, kind="trained", epsilon=0.1):
    """Law T-b: plans satisfy the Karush-Kuhn-Tucker conditions, with complementary slackness."""
    cost, a, b = problem(kind, mass)
    plan = solve(cost, a, b, epsilon=epsilon).plan
    for one, its in zip(plan.flatten(0, 1), cost.flatten(0, 1), strict=True):
        found = kkt_violation(one, its, a, b, epsilon=epsilon)
        assert max(found.values()) <= 1e-7, found


def constants_are_ignored(solve, mass):
    """Law T-d: a constant added to the cost does not change the plan."""
    cost, a, b = problem("trained", mass)
    torch.testing.assert_close(
        solve(cost + 7, a, b).plan, solve(cost, a, b).plan, rtol=0, atol=1e-8
    )
    torch.testing.assert_close(
        solve(cost - 0.5, a, b).plan, solve(cost, a, b).plan, rtol=0, atol=1e-8
    )


def order_is_irrelevant(solve, mass):
    """Law T-i: permuting rows or columns permutes the plan."""
    cost, a, b = problem("trained", mass)
    rows, columns = (
        torch.randperm(12, generator=torch.Generator().manual_seed(1)),
        torch.tensor([2, 0, 1]),
    )
    shuffled = solve(cost[..., rows, :][..., columns], a[rows], b[columns]).plan
    torch.testing.assert_close(
        shuffled, solve(cost, a, b).plan[..., rows, :][..., columns], rtol=0, atol=1e-8
    )


def problems_are_independent(solve, mass):
    """Law T-j: the plan of a problem is independent of the other problems in the batch."""
    easy, a, b = problem("clip", mass, batch=(3,))
    hard = problem("wide", mass, batch=(3,))[0]
    together = solve(torch.cat([easy, hard]), a, b)
    for index, cost in enumerate(torch.cat([easy, hard])):
        own = solve(cost, a, b)
        torch.testing.assert_close(own.plan, together.plan[index], rtol=0, atol=1e-9)
        assert own.iterations == together.iterations[index]


def test_every_public_solver_is_in_the_table():
    solvers = {
        name
        for name in transport.__all__
        if list(inspect.signature(getattr(transport, name)).parameters)[:3] == ["cost", "a", "b"]
    }
    assert solvers == set(SOLVERS)


EVERY = [(name, mass) for name, row in SOLVERS.items() for mass in row.masses]


@pytest.mark.parametrize(("name", "mass"), EVERY)
@pytest.mark.parametrize(
    "law",
    [plans_are_feasible, constants_are_ignored, order_is_irrelevant, problems_are_independent],
)
def test_solvers_obey(law, name, mass):
    assert isinstance(SOLVERS[name].solve, TransportSolver)
    law(SOLVERS[name].solve, mass)


@pytest.mark.parametrize(
    ("name", "mass"), [(name, mass) for name, mass in EVERY if SOLVERS[name].entropic]
)
@pytest.mark.parametrize("kind", KINDS)
def test_entropic_solvers_are_optimal(kind, name, mass):
    plans_are_optimal(SOLVERS[name].solve, mass, kind)


@given(
    rows=st.integers(1, 30),
    columns=st.integers(1, 6),
    mass=st.sampled_from([0.05, 0.4, 0.8, 0.99, 1.0]),
    epsilon=st.sampled_from([0.05, 0.1, 0.5, 3.0]),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=40, deadline=None)
def test_newton_is_optimal_for_any_shape(rows, columns, mass, epsilon, kind, seed):
    """Shapes include uneven marginals, more columns than rows, one row and one column."""
    cost, a, b = problem(kind, mass, batch=(2,), rows=rows, columns=columns, seed=seed)
    plan = newton(cost, a, b, epsilon=epsilon, tolerance=TIGHT, max_iterations=300).plan
    for one, its in zip(plan, cost, strict=True):
        found = kkt_violation(one, its, a, b, epsilon=epsilon)
        assert max(found.values()) <= 1e-7, found


@pytest.mark.parametrize("mass", [0.8, 1.0])
def test_all_entropic_solvers_find_the_same_plan(mass):
    """Law T-c: with equal masses the capped problem is that of Sinkhorn."""
    cost, a, b = problem("trained", mass)
    plans = [
        SOLVERS[name].solve(cost, a, b).plan for name in ENTROPIC if mass in SOLVERS[name].masses
    ]
    assert len(plans) == (4 if mass == 1 else 2)
    for plan in plans[1:]:
        torch.testing.assert_close(plan, plans[0], rtol=0, atol=1e-8)


@pytest.mark.parametrize("name", ENTROPIC)
def test_the_limits_of_epsilon(name):
    """Laws T-e and T-f: the limits are the independent coupling and the linear program."""
    row = SOLVERS[name]
    cost, a, b = problem("wide", row.masses[-1], rows=8, columns=2)
    flat = row.solve(cost, a, b, epsilon=1e4).plan
    torch.testing.assert_close(flat, independent(cost, a, b).plan, rtol=1e-3, atol=0)
    sharp = (row.solve(cost, a, b, epsilon=0.004).plan * cost).sum((-2, -1))
    best = (exact(cost, a, b).plan * cost).sum((-2, -1))
    assert (sharp >= best - 1e-7).all()
    assert (sharp <= best + 0.004 * 3).all()  # entropies of 16 entries differ by at most log 16


@pytest.mark.parametrize("name", [*ENTROPIC, "independent", "exact"])
def test_one_prompt_at_full_mass_is_the_mean(name):
    """Law T-g: every patch contributes equally, whatever its cost."""
    a, b = marginals(9, 1, 1.0)
    cost = planted_cost("wide", (4, 9, 1), torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        SOLVERS[name].solve(cost, a, b).plan, torch.full_like(cost, 1 / 9), rtol=1e-9, atol=0
    )


@pytest.mark.parametrize("name", ENTROPIC)
def test_equal_prompts_get_equal_columns(name):
    """Law T-h."""
    cost, a, _ = problem("trained", columns=1)
    b = torch.full((3,), SOLVERS[name].masses[-1] / 3, dtype=torch.float64)
    plan = SOLVERS[name].solve(cost.repeat(1, 1, 1, 3), a, b).plan
    torch.testing.assert_close(plan, plan[..., :1].expand_as(plan), rtol=1e-9, atol=0)


def test_the_scales_of_dykstra_are_monotone():
    """Law T-o: the scale of columns never decreases, and the scale of rows never increases.

    Both scales follow from a plan in which some row is slack.
    """
    cost, a, b = problem("trained", 0.8)
    before = None
    for steps in range(1, 30):
        ratio = dykstra(cost, a, b, tolerance=1e-15, max_iterations=steps).plan / torch.exp(
            -cost / 0.1
        )
        v = ratio.amax(-2, keepdim=True)
        u = (ratio / v).amax(-1)
        if before is not None:
            assert (v >= before[0] * (1 - 1e-12)).all()
            assert (u <= before[1] * (1 + 1e-12)).all()
        before = (v, u)


def relaxed_plans_are_stationary(solve):
    """Law T-p: ``C + epsilon log(T / ab) + rho log(marginal / mass)`` of both sides is 0."""
    cost, a, b = problem("wide")
    for rho in ((0.3, 2.0), (50.0, 0.1)):
        plan = solve(cost, a, 3 * b, rho=rho).plan
        slope = cost + 0.1 * (plan / (a[:, None] * 3 * b)).log()
        slope += rho[0] * (plan.sum(-1, keepdim=True) / a[:, None]).log()
        slope += rho[1] * (plan.sum(-2, keepdim=True) / (3 * b)).log()
        torch.testing.assert_close(slope, torch.zeros_like(slope), rtol=0, atol=1e-8)


def swaps_the_sides(cost, a, b, *, rho):
    return unbalanced(cost, a, b, rho=rho[::-1], tolerance=TIGHT)


def without_reference(cost, a, b, *, rho):
    """Take the entropy for the divergence from ab."""
    return unbalanced(cost + 0.1 * (a[:, None] * b).log(), a, b, rho=rho, tolerance=TIGHT)


def test_relaxed_plans_are_stationary():
    relaxed_plans_are_stationary(partial(unbalanced, tolerance=1e-12, max_iterations=5000))
    order_is_irrelevant(partial(unbalanced, tolerance=TIGHT, rho=(0.3, 2.0)), 0.8)
    problems_are_independent(partial(unbalanced, tolerance=TIGHT, rho=(0.3, 2.0)), 0.8)
    for wrong in (swaps_the_sides, without_reference):
        with pytest.raises(AssertionError):
            relaxed_plans_are_stationary(wrong)


def stops_early(cost, a, b, **options):
    return dykstra(cost, a, b, max_iterations=3, **options)


def wrong_temperature(cost, a, b, *, epsilon=0.1):
    return newton(cost, a, b, epsilon=2 * epsilon, tolerance=TIGHT)


def with_absolute_scale(cost, a, b, *, epsilon=0.1):
    """Stop as the published code does: by the mean absolute change of v over the batch."""
    kernel, u, v = torch.exp(-cost / epsilon), 1.0, torch.ones_like(cost[..., 0, :])
    for _ in range(100):
        u, before = (a / (kernel * v[..., None, :]).sum(-1)).clamp(max=1), v
        v = b / (kernel * u[..., None]).sum(-2)
        if (v - before).abs().mean() < 1e-3:
            break
    plan = kernel * u[..., None] * v[..., None, :]
    error = (plan.sum(-1) / a - 1).clamp(min=0).amax(-1)
    return Coupling(plan, error, torch.ones(cost.shape[:-2], dtype=torch.int64), a, b, epsilon)


def in_order(cost, a, b, **options):
    """Prefer the first patches."""
    return newton(cost + 0.1 * torch.arange(cost.shape[-2])[:, None], a, b, tolerance=TIGHT)


@pytest.mark.parametrize(
    ("law", "wrong"),
    [
        (plans_are_feasible, stops_early),
        (plans_are_optimal, wrong_temperature),
        (constants_are_ignored, with_absolute_scale),
        (problems_are_independent, with_absolute_scale),
        (order_is_irrelevant, in_order),
    ],
)
def test_the_laws_reject_wrong_solvers(law, wrong):
    with pytest.raises(AssertionError):
        law(wrong, 0.8)
