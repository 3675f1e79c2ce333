"""Unbalanced transport against POT, and its limits."""

import math
import warnings

import ot
import pytest
import torch

from fedprompt.transport import sinkhorn, unbalanced
from references.transport import planted_cost


def problem(mass=0.8, *, batch=(2,), rows=6, columns=3):
    generator = torch.Generator().manual_seed(0)
    cost = planted_cost("wide", (*batch, rows, columns), generator)
    a, b = (
        torch.rand(size, generator=generator, dtype=torch.float64) + 0.2 for size in (rows, columns)
    )
    return cost, a / a.sum(), b / b.sum() * mass


def solve(cost, a, b, **options):
    return unbalanced(cost, a, b, tolerance=1e-14, max_iterations=20_000, **options)


@pytest.mark.parametrize(
    ("epsilon", "rho", "mass"),
    [
        (0.05, 1.0, 0.8),
        (1.0, 0.05, 3.0),
        (0.1, (1.0, 0.3), 3.0),
        (0.1, (math.inf, 1.0), 3.0),
        (0.1, (1.0, math.inf), 0.8),
    ],
)
def test_plans_are_those_of_pot(rho, epsilon, mass):
    """With the divergence from ab, and with the entropy by a change of the cost."""
    cost, a, b = problem(mass)
    change = epsilon * (a[:, None] * b).log()
    for kind, moved in (("kl", cost), ("entropy", cost + change)):
        plan = solve(moved, a, b, epsilon=epsilon, rho=rho).plan
        for index, own in enumerate(cost.numpy()):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # POT says that "entropy" has no reference
                expected = ot.unbalanced.sinkhorn_unbalanced(
                    a.numpy(), b.numpy(), own, epsilon, rho,
                    reg_type=kind, numItermax=50_000, stopThr=1e-15,
                )  # fmt: skip
            found = plan[index]
            torch.testing.assert_close(found, torch.from_numpy(expected), rtol=0, atol=1e-8)


def test_large_penalties_give_balanced_transport_in_float32_and_as_fast():
    cost, a, b = problem(1.0)
    balanced = sinkhorn(cost, a, b, tolerance=1e-12)
    torch.testing.assert_close(solve(cost, a, b, rho=math.inf).plan, balanced.plan)
    single = unbalanced(cost.float(), a.float(), b.float(), rho=1e6)
    torch.testing.assert_close(single.plan.double(), balanced.plan, rtol=0, atol=1e-5)
    assert single.error.max() <= 1e-4
    assert single.iterations.max() <= 2 * balanced.iterations.max()


def test_rows_of_no_mass_have_no_influence():
    cost, a, b = problem()
    a = torch.cat([a[:4], torch.zeros(2, dtype=a.dtype)])
    coupling = unbalanced(cost, a, b)
    assert (coupling.plan[:, 4:] == 0).all()
    assert coupling.error.max() <= 1e-4
    torch.testing.assert_close(coupling.plan[:, :4], unbalanced(cost[:, :4], a[:4], b).plan)


@pytest.mark.bad_input
def test_a_penalty_is_no_axis_of_vmap():
    cost, a, b = problem()
    with pytest.raises(TypeError, match="`rho` must be a number"):
        torch.vmap(lambda rho: unbalanced(cost, a, b, rho=rho).plan)(a)
