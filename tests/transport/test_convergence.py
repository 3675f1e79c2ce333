"""Plans that do not solve their problem are reported: once a process, or as an error."""

from functools import partial

import pytest
import torch

from fedprompt import _convergence, transport_logits
from fedprompt.selection import select_balanced
from fedprompt.transport import dykstra, envelope, exact, implicit, newton, sinkhorn
from references.transport import marginals, planted_cost

DRAW = torch.Generator().manual_seed(0)
PATCHES, TEXT = torch.randn(3, 20, 8, generator=DRAW), torch.randn(2, 4, 8, generator=DRAW)
EARLY = partial(dykstra, epsilon=0.001, max_iterations=5)
COST = planted_cost("wide", (2, 9, 2), DRAW)
MASSES = marginals(9, 2, 0.8)

logits = partial(transport_logits, PATCHES, TEXT, scale=100.0)


@pytest.fixture(autouse=True)
def as_in_a_new_process(monkeypatch):
    monkeypatch.setattr(_convergence, "_warned", set())
    monkeypatch.setattr(_convergence, "_kept", {})


def relaxed(cost, a, b):
    """A solver with soft columns that calls its plan exact."""
    coupling = newton(cost, a, b)
    return coupling._replace(plan=0.7 * coupling.plan, tolerance=None)


def half_exact(cost, a, b):
    coupling = exact(cost, a, b)
    return coupling._replace(error=coupling.error + 0.5)


def overfull(cost, a, b):
    """A plan whose first row has a small part of the mass of the second one, too."""
    coupling = newton(cost, a, b)
    part = 0.002 * coupling.plan[:, 1]
    plan = coupling.plan.clone()
    plan[:, 0] += part
    plan[:, 1] -= part
    return coupling._replace(plan=plan)


@pytest.mark.parametrize(
    "call",
    [
        lambda: logits(solver=EARLY),
        lambda: logits(solver=half_exact),
        lambda: logits(solver=partial(newton, max_iterations=1)),
        lambda: logits(solver=partial(dykstra, max_iterations=5), lean=True),
        lambda: select_balanced(PATCHES[0], TEXT[0], solver=partial(sinkhorn, max_iterations=1)),
        lambda: implicit(COST, newton(COST, *MASSES, max_iterations=1)),
        lambda: implicit(COST, relaxed(COST, *MASSES)),
        lambda: envelope(COST, relaxed(COST, *MASSES)),
        lambda: envelope(COST, overfull(COST, *marginals(9, 2, 1.0))),
    ],
)
def test_a_plan_above_ten_times_its_tolerance_warns_once_a_process(call):
    with pytest.warns(UserWarning, match="violates its marginals by .* times its tolerance"):
        call()
    call()  # warnings are errors


def test_the_worst_plan_of_a_batch_decides():
    coupling = newton(COST, *MASSES)
    below, above = (
        coupling._replace(error=torch.tensor([0, times * coupling.tolerance]))
        for times in (9.9, 10.1)
    )
    _convergence.solved(below, strict=True)
    with pytest.raises(ValueError, match=r"violates its marginals by 10\.1 times its tolerance"):
        _convergence.solved(above, strict=True)


@pytest.mark.parametrize("lean", [False, True])
def test_strict_raises_each_time(lean):
    for _ in range(2):
        with pytest.raises(ValueError, match="violates its marginals"):
            logits(solver=partial(dykstra, max_iterations=5), lean=lean, strict=True)
    logits(strict=True, lean=lean)


def test_on_an_accelerator_the_first_and_every_hundredth_call_read(monkeypatch):
    """A violation is kept on the device until then."""
    monkeypatch.setattr(_convergence, "AT_ONCE", set())
    coupling = newton(COST, *MASSES)
    wrong = coupling._replace(error=torch.full((2,), 0.5))
    for found in (coupling, wrong, *[coupling] * 98):
        _convergence.solved(found)
    with pytest.warns(UserWarning, match=r"by 5e\+04 times"):
        _convergence.solved(coupling)


def test_an_error_that_is_not_a_number_is_reported_by_the_first_call(monkeypatch):
    monkeypatch.setattr(_convergence, "AT_ONCE", set())
    wrong = newton(COST, *MASSES)._replace(error=torch.full((2,), torch.nan))
    with pytest.warns(UserWarning, match="by nan times"):
        _convergence.solved(wrong)


def test_an_unstated_tolerance_is_1e_3_if_strict_and_a_stated_one_is_kept():
    found = newton(COST, *MASSES)
    small = found._replace(error=torch.full((2,), 5e-4))
    relaxed = found._replace(error=torch.full((2,), 0.5), tolerance=None)
    for coupling, times in ((small, 50), (relaxed, 500)):
        with pytest.raises(ValueError, match=f"by {times} times"):
            _convergence.solved(coupling, strict=True)
    _convergence.solved(relaxed)  # warnings are errors


def test_nothing_is_read_under_vmap():
    each = torch.func.vmap(
        lambda patches: transport_logits(patches[None], TEXT, scale=100.0, solver=EARLY)
    )
    torch.testing.assert_close(each(PATCHES)[:, 0].isfinite().all(), torch.tensor(True))


@pytest.mark.parametrize("tolerance", [1e-12, 1e-3])
def test_a_tolerance_below_the_resolution_of_a_dtype_is_not_meant(tolerance):
    cost, (a, b) = COST.float(), (mass.float() for mass in MASSES)
    coupling = newton(cost, a, b, tolerance=tolerance)
    assert coupling.tolerance == max(tolerance, 8 * torch.finfo(torch.float32).eps)
    logits(solver=partial(newton, tolerance=tolerance), strict=True)
