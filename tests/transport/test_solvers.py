"""Transport solvers against independent references, at the limits of their domain, and errors."""

import importlib
import math
from functools import partial
from itertools import product
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compilers import COMPILERS
from fedprompt.transport import _dual as search
from fedprompt.transport import (
    dykstra,
    exact,
    independent,
    newton,
    plan_fixed,
    plan_from_duals,
    sinkhorn,
    unbalanced,
)
from fedprompt.transport._problem import flat
from references.transport import marginals, planted_cost, pot_plan, published_plan, slow_plan

KINDS = ["clip", "trained", "wide"]
ITERATIVE = [newton, dykstra, sinkhorn]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("epsilon", "mass"), [(0.1, 0.8), (0.1, 1.0), (0.05, 0.5), (0.02, 0.8)])
def test_newton_agrees_with_slow_alternation_and_with_pot(kind, epsilon, mass):
    a, b = marginals(20, 3, mass)
    for cost in planted_cost(kind, (2, 20, 3), torch.Generator().manual_seed(1)):
        plan = newton(cost, a, b, epsilon=epsilon, tolerance=1e-11, max_iterations=300).plan
        torch.testing.assert_close(plan, slow_plan(cost, a, b, epsilon=epsilon), rtol=0, atol=1e-9)
        if mass < 1:
            torch.testing.assert_close(
                plan, pot_plan(cost, a, b, epsilon=epsilon), rtol=0, atol=1e-7
            )


def test_dykstra_is_the_published_loop_where_that_converges():
    """On costs of zero-shot CLIP, with a smaller threshold than the published one."""
    a, b = marginals(30, 2, 0.8)
    cost = planted_cost("clip", (5, 30, 2), torch.Generator().manual_seed(4))
    published = published_plan(
        cost, a.expand(5, -1), b.expand(5, -1), epsilon=0.1, threshold=1e-9, most=1000
    )
    torch.testing.assert_close(
        dykstra(cost, a, b, tolerance=1e-11).plan, published, rtol=0, atol=1e-9
    )


MASSES = [0.05, 0.8, 0.95, 0.999, 0.99999, 1.0]
SETTINGS = list(product(KINDS, [0.1, 0.01], [(196, 2), (49, 4), (7, 3), (3, 8)]))


@pytest.mark.parametrize(  # a third of all combinations: every pair of values occurs
    ("kind", "epsilon", "rows", "columns", "mass"),
    [
        (kind, epsilon, *size, mass)
        for number, (kind, epsilon, size) in enumerate(SETTINGS)
        for mass in MASSES[(number + number // 4) % 3 :: 3]
    ],
)
def test_newton_in_float32_is_accurate_for_every_mass(kind, epsilon, mass, rows, columns):
    cost = planted_cost(kind, (9, rows, columns), torch.Generator().manual_seed(5)).float()
    a, b = marginals(rows, columns, mass, torch.float32)
    coupling = newton(cost, a, b, epsilon=epsilon)
    assert coupling.plan.dtype == torch.float32
    assert coupling.error.max() <= 1e-5
    best = newton(
        cost.double(),
        *marginals(rows, columns, mass),
        epsilon=epsilon,
        tolerance=1e-12,
        max_iterations=400,
    )
    assert best.error.max() <= 1e-10
    assert ((coupling.plan - best.plan).abs().sum((1, 2)) / mass).max() <= 1e-4


def test_newton_solves_problems_with_a_small_epsilon():
    """At epsilon 0.001 the kernel of FedOTP's code underflows to 0."""
    cost = planted_cost("wide", (50, 196, 2), torch.Generator().manual_seed(7)).float()
    coupling = newton(cost, *marginals(196, 2, 0.8, torch.float32), epsilon=0.001)
    assert coupling.error.max() <= 1.1e-5
    assert coupling.iterations.max() <= 100


def test_rows_without_mass_have_a_plan_of_0_and_no_influence():
    cost = planted_cost("trained", (3, 10, 2), torch.Generator().manual_seed(8))
    a, b = marginals(7, 2, 0.8)
    padded = torch.cat([a, torch.zeros(3, dtype=a.dtype)])
    plan = newton(cost, padded, b, tolerance=1e-11).plan
    assert (plan[:, 7:] == 0).all()
    torch.testing.assert_close(
        plan[:, :7], newton(cost[:, :7], a, b, tolerance=1e-11).plan, rtol=0, atol=1e-9
    )
    full = padded.sum() * b / b.sum()
    assert (sinkhorn(cost, padded, full).plan[:, 7:] == 0).all()


@pytest.mark.parametrize("solver", [*ITERATIVE, exact, independent])
def test_leading_shapes_and_broadcast_masses(solver):
    generator = torch.Generator().manual_seed(9)
    cost = planted_cost("trained", (2, 3, 6, 2), generator)
    a = torch.rand(2, 1, 6, generator=generator, dtype=torch.float64) + 0.5
    a, b = a / a.sum(-1, keepdim=True), torch.tensor([0.7, 0.3], dtype=torch.float64)
    coupling = solver(cost, a, b)
    assert coupling.plan.shape == cost.shape
    assert coupling.error.shape == coupling.iterations.shape == (2, 3)
    for i in range(2):
        for j in range(3):
            torch.testing.assert_close(
                coupling.plan[i, j], solver(cost[i, j], a[i, 0], b).plan, rtol=0, atol=1e-9
            )
    empty = solver(cost[:0], a[:0], b)
    assert empty.plan.shape == (0, 3, 6, 2)
    assert empty.error.shape == (0, 3)


def test_large_batches_are_cut_into_chunks(monkeypatch):
    problem = importlib.import_module("fedprompt.transport._problem")
    cost = planted_cost("trained", (7, 5, 2), torch.Generator().manual_seed(10))
    masses = marginals(5, 2, 0.8)
    whole = newton(cost, *masses)
    monkeypatch.setitem(problem.CHUNK, "cpu", 25)  # two problems at a time
    parts = newton(cost, *masses)
    torch.testing.assert_close(parts.plan, whole.plan, rtol=0, atol=1e-12)
    torch.testing.assert_close(parts.duals, whole.duals, rtol=0, atol=1e-12)
    assert torch.equal(parts.iterations, whole.iterations)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precisions_are_solved_in_float32(dtype):
    cost = planted_cost("trained", (4, 49, 2), torch.Generator().manual_seed(11)).to(dtype)
    masses = marginals(49, 2, 1.0, dtype)
    for solver in ITERATIVE:  # sums of masses agree only up to the rounding of the dtype
        coupling = solver(cost, *masses, epsilon=0.05)
        expected = solver(cost.float(), *marginals(49, 2, 1.0, torch.float32), epsilon=0.05).plan
        assert coupling.plan.dtype == torch.float32
        assert coupling.error.max() <= 1e-4
        torch.testing.assert_close(coupling.plan, expected, rtol=2 * torch.finfo(dtype).eps, atol=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = newton(cost, *marginals(49, 2, 0.8, torch.float32))
    torch.testing.assert_close(
        inside.plan, newton(cost, *marginals(49, 2, 0.8, torch.float32)).plan, rtol=0, atol=0
    )


@pytest.mark.parametrize(("kind", "epsilon"), [("clip", 0.1), ("clip", 0.05), ("trained", 0.1)])
@pytest.mark.parametrize("mass", [0.8, 0.95, 0.999, 1.0])
def test_plain_steps_are_enough_for_cosines_at_fedotps_epsilon(kind, epsilon, mass):
    """No problem needs the line search in float64."""
    cost = planted_cost(kind, (50, 49, 2), torch.Generator().manual_seed(17)).float()
    module = importlib.import_module("fedprompt.transport.newton")
    with patch.object(module, "climb", side_effect=AssertionError("line search")):
        coupling = newton(cost, *marginals(49, 2, mass, torch.float32), epsilon=epsilon)
    assert coupling.error.max() <= 1e-5
    assert coupling.iterations.max() <= 12


def one_column(x, *, slope):
    """Take a step of length 1 to log v = x, from a point with a given slope, and judge it.

    The problem has two rows of 0.5 with costs 0 and 1, and one column that takes 0.4.
    """
    problem = flat(
        torch.tensor([[[0.0], [1.0]]], dtype=torch.float64),
        torch.full((2,), 0.5).double(),
        torch.tensor([0.4]).double(),
    )
    x = torch.tensor([[x]], dtype=torch.float64)
    kernel, cap = search.row_kernel(problem, search.levelled_cost(problem, 1.0), x)
    now = search.evaluate(problem, kernel, torch.ones_like(x), cap)
    before = search.Search(x - 1, torch.ones_like(x), torch.ones_like(x), torch.full_like(x, slope))
    return search.next_step(before, x, now, search.all_full(problem, now, cap))


def test_a_step_is_accepted_while_a_row_is_slack():
    """At log 0.6 the rows give 0.5 (full) and 0.6 / e = 0.2207.

    The slope is 0.4 - 0.7207 = -0.3207, above minus half of 2 and below minus half of 0.5.
    """
    following, accepted = one_column(math.log(0.6), slope=2.0)
    assert accepted.item()
    assert following.slope.item() != 2.0
    assert not one_column(math.log(0.6), slope=0.5)[1].item()


def test_a_step_into_the_flat_part_of_the_dual_is_rejected():
    """At log 2 both rows are full and give 1, so the slope is -0.6, above minus half of 2.

    The secant gives the length 2 / 2.6, which is above the largest one, 0.7.
    """
    following, accepted = one_column(math.log(2), slope=2.0)
    assert not accepted.item()
    assert following.length.item() == pytest.approx(0.7)


def test_the_next_step_is_twice_as_long_if_the_slope_has_hardly_decreased():
    """At log 0.1 the rows give 0.1 (1 + 1 / e) = 0.1368.

    The slope is 0.2632, more than half of 0.3 and less than half of 2.
    """
    assert one_column(math.log(0.1), slope=0.3)[0].length.item() == 2
    assert one_column(math.log(0.1), slope=2.0)[0].length.item() == 1


@given(
    rows=st.integers(1, 12),
    columns=st.integers(1, 5),
    mass=st.floats(0.01, 1.0),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=30, deadline=None)
def test_exact_costs_no_more_than_any_entropic_plan(rows, columns, mass, seed):
    cost = planted_cost("wide", (rows, columns), torch.Generator().manual_seed(seed))
    a, b = marginals(rows, columns, mass)
    coupling = exact(cost, a, b)
    assert coupling.error <= 1e-9
    entropic = newton(cost, a, b, epsilon=0.02, tolerance=1e-9).plan
    assert (coupling.plan * cost).sum() <= (entropic * cost).sum() + 1e-8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mass", [0.8, 1.0])
@pytest.mark.parametrize("total", [1e-12, 7.0, 1e9, 1e20])
def test_exact_solves_masses_of_any_size(total, mass, dtype):
    """Plans are linear in the masses, although POT compares sums with an absolute tolerance."""
    cost = planted_cost("wide", (2, 6, 3), torch.Generator().manual_seed(15)).to(dtype)
    a, b = marginals(6, 3, mass, dtype)
    coupling = exact(cost, total * a, total * b)
    assert coupling.error.max() <= 8 * torch.finfo(dtype).eps
    expected = total * exact(cost, a, b).plan
    torch.testing.assert_close(coupling.plan, expected, rtol=0, atol=1e-6 * total)


def test_solvers_mutate_no_argument_keep_no_graph_and_print_nothing(capsys):
    cost = planted_cost("trained", (2, 6, 2), torch.Generator().manual_seed(13)).requires_grad_()
    a, b = (masses.requires_grad_() for masses in marginals(6, 2, 1.0))
    before = [tensor.detach().clone() for tensor in (cost, a, b)]
    for solver in [*ITERATIVE, exact, independent]:
        found = solver(cost, a, b)
        assert not any(part.requires_grad for part in (found.plan, found.a, found.b))
    assert all(torch.equal(tensor, old) for tensor, old in zip((cost, a, b), before, strict=True))
    assert capsys.readouterr() == ("", "")


@pytest.mark.benchmark
@pytest.mark.parametrize("backend", COMPILERS)
@pytest.mark.parametrize("epsilon", [0.1, 0.2])
def test_newton_compiles_into_one_graph(epsilon, backend):
    cost = planted_cost("trained", (6, 20, 2), torch.Generator().manual_seed(14)).float()
    masses = marginals(20, 2, 0.8, torch.float32)
    compiled = torch.compile(newton, fullgraph=True, backend=backend)(
        cost, *masses, epsilon=epsilon
    )
    assert compiled.error.max() <= 1e-5
    torch.testing.assert_close(
        compiled.plan, newton(cost, *masses, epsilon=epsilon).plan, rtol=0, atol=1e-6
    )


OTHERS = [dykstra, sinkhorn, exact, independent, unbalanced]
VMAPPED = [(0, None, None), (None, 0, None), (None, None, 0), (1, 0, 0), (0, None, 1)]
VMAPPED = [*((newton, in_dims) for in_dims in VMAPPED), *((each, (0, None, 1)) for each in OTHERS)]


@pytest.mark.parametrize(("solver", "in_dims"), VMAPPED)
def test_vmap_over_any_argument_equals_a_loop(solver, in_dims):
    """At an epsilon at which solvers need more steps than under ``torch.compile``."""
    generator = torch.Generator().manual_seed(16)
    cost = planted_cost("wide", (2, 2, 9, 3), generator)
    a, b = (torch.rand(2, size, generator=generator).double() + 0.2 for size in (9, 3))
    solve = solver if solver in (exact, independent) else partial(solver, epsilon=0.02)
    whole = cost, a / a.sum(1, keepdim=True), b / b.sum(1, keepdim=True)
    given = [
        part[0] if dim is None else part.movedim(0, dim)
        for part, dim in zip(whole, in_dims, strict=True)
    ]
    found = torch.func.vmap(lambda *problem: solve(*problem)[:3], in_dims=in_dims)(*given)
    for index in range(2):
        own = [part[0 if dim is None else index] for part, dim in zip(whole, in_dims, strict=True)]
        for one, other in zip(found, solve(*own)[:3], strict=True):
            torch.testing.assert_close(one[index], other, rtol=0, atol=1e-12)


def test_transforms_may_be_nested_and_duals_give_plans_in_them():
    cost = planted_cost("trained", (2, 3, 9, 2), torch.Generator().manual_seed(18))
    a, b = marginals(9, 2, 0.8)
    coupling = newton(cost, a, b)
    twice = torch.func.vmap(torch.func.vmap(lambda its: newton(its, a, b).plan))
    torch.testing.assert_close(twice(cost), coupling.plan)
    again = torch.func.vmap(lambda its, duals: plan_from_duals(duals, its, a, b))
    torch.testing.assert_close(again(cost, coupling.duals), coupling.plan)
    gradient = torch.func.grad(lambda its: plan_fixed(its, newton(its, a, b)).sum())
    torch.testing.assert_close(gradient(cost), coupling.plan)


@pytest.mark.parametrize("solver", [*ITERATIVE, unbalanced])
@pytest.mark.parametrize("epsilon", [1e-3, 1.0])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6, 1e30, 1e36, 1e38, 3e38])
def test_finite_costs_are_solved_or_refused_up_to_the_end_of_float32(solver, epsilon, scale):
    """A range that overflows when it is divided by epsilon gave NaN."""
    cost = planted_cost("wide", (4, 6, 3), torch.Generator().manual_seed(19)).float() - 1
    a, b = marginals(6, 3, 1.0, torch.float32)
    if scale / epsilon > 1e37:
        with pytest.raises(ValueError, match=r"^`cost` must have a range of at most"):
            solver(cost * scale, a, b, epsilon=epsilon)
    elif solver is unbalanced and scale >= 1e6:
        with pytest.raises(ValueError, match=r"^`cost` must give plans of finite mass"):
            solver(cost * scale, a, b, epsilon=epsilon)
    else:
        coupling = solver(cost * scale, a, b, epsilon=epsilon, max_iterations=50)
        assert torch.isfinite(coupling.plan).all()
        assert torch.isfinite(coupling.error).all()
        assert coupling.iterations.max() <= 50
