"""Newton's kernel under Triton's interpreter, compiled without a GPU, and on one (``-m gpu``)."""

import os
import re
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedprompt
from fedprompt.transport import _fused
from fedprompt.transport._problem import flat, violation
from references.transport import marginals, planted_cost
from same import assert_same

needs_triton = pytest.mark.skipif(
    find_spec("triton") is None,
    reason="Triton is not installed; it is part of PyTorch for Linux",
)
INTERPRETED = pytest.param("cpu", marks=pytest.mark.interpreted)
INTERPRETED_SLOWLY = pytest.param("cpu", marks=[pytest.mark.interpreted, pytest.mark.slow])
ON_A_GPU = pytest.param("cuda", marks=pytest.mark.gpu)
EVERYWHERE = pytest.mark.parametrize("device", [INTERPRETED, ON_A_GPU])
# Warnings of NumPy in the interpreter.
OVERFLOW = "ignore:(All-NaN slice|overflow|invalid value|divide by zero):RuntimeWarning"
KINDS = ["clip", "trained", "wide"]
QUICK_SHAPES = [(7, 3)]
SLOW_SHAPES = [(1, 1), (3, 4), (16, 1), (33, 8), (49, 2), (196, 2), (196, 4)]
newton_module = import_module("fedprompt.transport.newton")
newton = partial(fedprompt.transport.newton, fused=True)


@contextmanager
def path(*, fused):
    """Use the kernel for small problems, or never; yield the list of batch sizes launched."""
    launches = []

    def counted(problem, **options):
        launches.append(len(problem.cost))
        return _fused.fused_steps(problem, **options)

    with (
        patch.object(_fused, "launchable", lambda device: fused),
        patch.object(newton_module, "fused_steps", counted),
    ):
        yield launches


def draw(kind, problems, rows, columns, mass, device="cpu", *, seed=0):
    """Draw costs and uneven masses, 0 for every fifth row."""
    generator = torch.Generator().manual_seed(seed)
    cost = planted_cost(kind, (problems, rows, columns), generator)
    a = (torch.rand(problems, rows, generator=generator, dtype=torch.float64) + 0.3) * (
        torch.arange(rows) % 5 != 3
    )
    b = torch.rand(problems, columns, generator=generator, dtype=torch.float64) + 0.3
    a = a / a.sum(1, keepdim=True)
    return tuple(
        tensor.float().to(device) for tensor in (cost, a, mass * b / b.sum(1, keepdim=True))
    )


def steps(solve, cost, a, b, *, epsilon=0.1):
    problem = flat(cost, a, b)
    return problem, solve(
        problem, epsilon=epsilon, tolerance=1e-5, max_iterations=newton_module.PLAIN_STEPS
    )


def agrees_with_the_plain_path(device, rows, columns, mass):
    for kind in KINDS:
        drawn = draw(kind, 3, rows, columns, mass, device)
        problem, (plan, v, iterations, error) = steps(_fused.fused_steps, *drawn)
        _, (expected, its_v, its_iterations, its_error) = steps(newton_module._plain_steps, *drawn)
        torch.testing.assert_close(plan, expected, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(v, its_v, rtol=1e-3, atol=0)
        # An error next to the threshold can round to either side of it.
        assert (iterations - its_iterations).abs().max() <= 1
        # Rows hold by construction, up to rounding.
        torch.testing.assert_close(error, violation(plan, problem), rtol=0.01, atol=5e-7)
        torch.testing.assert_close(its_error, violation(expected, problem), rtol=0.01, atol=5e-7)


@EVERYWHERE
@pytest.mark.parametrize("mass", [0.8, 1.0])
@pytest.mark.parametrize(("rows", "columns"), QUICK_SHAPES)
def test_the_kernel_takes_the_steps_of_the_plain_path(device, rows, columns, mass):
    agrees_with_the_plain_path(device, rows, columns, mass)


@pytest.mark.parametrize("device", [INTERPRETED_SLOWLY, ON_A_GPU])
@pytest.mark.parametrize("mass", [0.05, 0.8, 1.0])
@pytest.mark.parametrize(("rows", "columns"), SLOW_SHAPES)
def test_the_kernel_takes_the_steps_of_the_plain_path_for_every_shape(device, rows, columns, mass):
    agrees_with_the_plain_path(device, rows, columns, mass)


@pytest.mark.parametrize("device", [INTERPRETED_SLOWLY, ON_A_GPU])
@pytest.mark.filterwarnings(OVERFLOW)
@given(
    rows=st.sampled_from([1, 3, 7, 16, 49, 196]),
    columns=st.integers(1, 4),
    mass=st.one_of(st.floats(0.01, 1.0), st.sampled_from([0.8, 0.999, 1.0])),
    epsilon=st.sampled_from([0.01, 0.03, 0.1, 1.0]),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=40, deadline=None)
def test_newton_by_the_kernel_is_as_accurate(device, rows, columns, mass, epsilon, kind, seed):
    is_as_accurate(device, rows, columns, mass, epsilon, kind, seed)


@EVERYWHERE
@pytest.mark.filterwarnings(OVERFLOW)
@pytest.mark.parametrize(("epsilon", "kind"), [(0.1, "trained"), (0.01, "wide")])
def test_newton_by_the_kernel_is_as_accurate_on_two_problems(device, epsilon, kind):
    is_as_accurate(device, 16, 2, 0.8, epsilon, kind, seed=0)


def is_as_accurate(device, rows, columns, mass, epsilon, kind, seed):
    """Remaining problems go to the line search. The reference is solved in float64."""
    drawn = draw(kind, 3, rows, columns, mass, device, seed=seed)
    with path(fused=True) as launches:
        coupling = newton(*drawn, epsilon=epsilon)
    assert launches == [3]
    assert coupling.error.max() <= 1e-5
    best = newton(
        *(tensor.double() for tensor in drawn), epsilon=epsilon, tolerance=1e-12, max_iterations=400
    )
    assert best.error.max() <= 1e-9
    assert ((coupling.plan - best.plan).abs().sum((1, 2)) / mass).max() <= 1e-4
    with path(fused=False) as launches:
        plain = newton(*drawn, epsilon=epsilon)
    assert launches == []
    assert ((coupling.plan - plain.plan).abs().sum((1, 2)) / mass).max() <= 1e-4


@EVERYWHERE
def test_results_are_bitwise_independent_of_the_batch(device):
    drawn = [
        torch.cat(parts)
        for parts in zip(*(draw(kind, 2, 49, 3, 0.9, device) for kind in KINDS), strict=True)
    ]
    _, together = steps(_fused.fused_steps, *drawn)
    for index in range(6):
        _, own = steps(_fused.fused_steps, *(tensor[index : index + 1] for tensor in drawn))
        assert all(
            torch.equal(part, whole[index : index + 1])
            for part, whole in zip(own, together, strict=True)
        )


@EVERYWHERE
def test_a_constant_on_the_cost_leaves_plans_bitwise_identical(device):
    cost, a, b = draw("wide", 3, 49, 2, 0.8, device)
    cost = (cost * 4096).round() / 4096  # so that adding 4 is exact
    with path(fused=True) as launches:
        assert torch.equal(newton(cost + 4, a, b).plan, newton(cost, a, b).plan)
    assert launches == [3, 3]


@EVERYWHERE
def test_layouts_precisions_and_broadcast_masses(device):
    generator = torch.Generator().manual_seed(1)
    cost = (
        planted_cost("trained", (2, 2, 2, 20), generator).to(device, torch.bfloat16).transpose(2, 3)
    )
    a, b = draw("clip", 2, 20, 2, 0.8, device)[1:]
    a = a.T.contiguous().T[:, None]  # column-major, and broadcast over the second axis
    with path(fused=True) as launches:
        coupling = newton(cost, a, b[0])
    assert launches == [4]
    assert coupling.plan.dtype == torch.float32
    with path(fused=False):
        expected = newton(cost, a, b[0])
    torch.testing.assert_close(coupling.plan, expected.plan, rtol=0, atol=1e-6)
    for part in (coupling.plan, coupling.error, coupling.iterations):
        assert part.device.type == device
    with path(fused=True):
        assert newton(cost[:0], a[:0], b[0]).plan.shape == (0, 2, 20, 2)


@EVERYWHERE
@pytest.mark.filterwarnings(OVERFLOW)
def test_problems_that_overflow_go_to_the_line_search(device):
    """A NaN in any column gives an error of NaN, and other problems do not change."""
    cost, a, b = draw("wide", 3, 20, 3, 0.8, device)
    _, whole = steps(_fused.fused_steps, cost, a, b)
    for column in range(3):
        broken = cost.clone()
        broken[1, 4, column] = float("nan")
        _, (plan, _, _, error) = steps(_fused.fused_steps, broken, a, b)
        assert error.isnan().tolist() == [False, True, False]
        assert torch.equal(plan[::2], whole[0][::2])
    for scale in (1e-6, 1e6):
        with path(fused=True):
            coupling = newton(cost * scale, a, b, epsilon=0.001, max_iterations=50)
        assert coupling.plan.isfinite().all()
        assert coupling.error.isfinite().all()


@EVERYWHERE
def test_the_error_is_that_of_the_last_plan_after_few_iterations(device):
    drawn = draw("wide", 3, 49, 2, 0.95, device)
    with path(fused=True):
        coupling = newton(*drawn, max_iterations=2)
        assert coupling.iterations.tolist() == [2, 2, 2]
        assert (coupling.error > 1e-3).all()
        problem = flat(*drawn)
        torch.testing.assert_close(
            coupling.error, violation(coupling.plan.transpose(1, 2), problem), rtol=1e-3, atol=0
        )
        easy = newton(*draw("clip", 3, 49, 2, 0.3, device))
    assert (easy.iterations < 6).all()


@EVERYWHERE
@pytest.mark.bad_input
def test_wrong_values_are_refused_before_the_kernel_runs(device):
    cost, a, b = draw("wide", 3, 5, 2, 0.8, device)
    cost[1, 2, 0] = float("nan")
    with (
        path(fused=True) as launches,
        pytest.raises(
            ValueError, match=r"`cost` must be finite; got values that are not in problem \(1,\)"
        ),
    ):
        newton(cost, a, b)
    assert launches == []


def test_the_kernel_is_used_on_request_only():
    """The kernel has not been run on a GPU yet, so the plain path is the default there too."""
    drawn = draw("wide", 3, 20, 2, 0.8)
    with path(fused=True) as launches:
        plain = fedprompt.transport.newton(*drawn)
    assert launches == []
    with path(fused=False):
        asked = newton(*drawn)  # no effect on a CPU
    assert_same(plain, asked)


@pytest.mark.bad_input
@pytest.mark.parametrize("flag", [1, None, "yes"])
def test_fused_is_a_boolean(flag):
    with pytest.raises(TypeError, match="`fused` must be True or False"):
        fedprompt.transport.newton(*draw("wide", 3, 20, 2, 0.8), fused=flag)


@pytest.mark.gpu
def test_a_gpu_is_used():
    assert _fused.launchable(torch.device("cuda", 0))
    drawn = draw("wide", 300, 196, 2, 0.8, "cuda")
    with patch.object(newton_module, "fused_steps", wraps=_fused.fused_steps) as kernel:
        coupling = newton(*drawn)
    assert kernel.call_count == 1
    assert coupling.error.max() <= 1e-5


def problems(rows=20, columns=2, dtype=torch.float32):
    return flat(torch.zeros(3, rows, columns, dtype=dtype), *marginals(rows, columns, 0.8, dtype))


def test_small_problems_in_float32_fit():
    with patch.object(_fused, "launchable", lambda device: True):
        for fitting in (
            problems(),
            problems(1, 1),
            problems(1024, 8),
            problems(4096, 2),
            problems(196, 5),
        ):
            assert _fused.fits(fitting)
        for unfitting in (
            problems(dtype=torch.float64),
            problems(1025, 5),
            problems(4097, 2),
            problems(10, 9),
            problems()._replace(eager=False),
        ):
            assert not _fused.fits(unfitting)
    assert not _fused.fits(problems())  # on a CPU


def test_other_devices_and_old_ones_take_the_plain_path(monkeypatch):
    asked, device = _fused.launchable.__wrapped__, torch.device("cuda", 0)
    assert not asked(torch.device("cpu"))
    monkeypatch.setattr(torch.version, "cuda", None)  # AMD's
    assert not asked(device)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not asked(device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(_fused, "find_spec", lambda name: None)
    assert not asked(device)


@needs_triton
def test_a_gpu_without_a_c_compiler_warns_and_takes_the_plain_path(monkeypatch):
    from triton.runtime import driver

    class Broken:
        def get_current_target(self):
            raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    name = "_active" if hasattr(driver, "_active") else "active"  # before Triton 3.6
    monkeypatch.setattr(driver, name, Broken())
    with pytest.warns(
        RuntimeWarning, match="Triton cannot launch kernels here.*Failed to find C compiler"
    ):
        assert not _fused.launchable.__wrapped__(torch.device("cuda", 0))


@needs_triton
@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        (1, 1),
        (49, 2),
        (8192, 1),
        *(
            pytest.param(rows, columns, marks=pytest.mark.slow)
            for rows, columns in [(196, 2), (196, 4), (196, 8), (1024, 8)]
        ),
    ],
)
def test_the_kernel_compiles_without_a_gpu(rows, columns, monkeypatch, tmp_path):
    """The compiler checks types, and that a problem fits into registers without the stack."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fedprompt.transport._triton import newton_steps

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    types = dict.fromkeys(("cost", "a", "b", "plan", "duals", "error"), "*fp32") | {
        "full": "*i1",
        "iterations": "*i64",
    }
    types |= {
        "rows": "i32",
        "sharpness": "fp32",
        "near": "fp32",
        "most": "i32",
        "columns": "constexpr",
        "block": "constexpr",
    }
    options = _fused.options(columns, rows)
    constants = {name: options.pop(name) for name in ("columns", "block")}
    built = triton.compile(
        ASTSource(newton_steps, types, constexprs=constants),
        target=GPUTarget("cuda", 90, 32),
        options=options,
    )
    (tmp_path / "cubin").write_bytes(built.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(tmp_path / "cubin")]
    used = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert re.search(r"REG:\d+ STACK:0 SHARED:\d+ LOCAL:0 ", used), used


def interpret(marker):
    """Run tests in a process where Triton interprets kernels, and return how many passed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marker]
    environment = os.environ | {"TRITON_INTERPRET": "1"}  # read when Triton is imported
    run = subprocess.run(
        [*command, str(Path(__file__))],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env=environment,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return int(re.search(r"(\d+) passed", run.stdout)[1])


@needs_triton
@pytest.mark.slow
def test_all_interpreted_tests_pass():
    assert interpret("interpreted") >= 11 + 3 * len(SLOW_SHAPES)
