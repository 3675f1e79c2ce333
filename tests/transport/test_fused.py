"""Newton's steps as one kernel: under Triton's interpreter here, on a GPU with ``-m gpu``, built for one without having it."""

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

needs_triton = pytest.mark.skipif(
    find_spec("triton") is None,
    reason="no Triton here; PyTorch's own builds for Linux bring it along",
)
EVERYWHERE = pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.interpreted),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)
OVERFLOW = "ignore:(All-NaN slice|overflow|invalid value|divide by zero):RuntimeWarning"  # NumPy's, in the interpreter
KINDS = ["clip", "trained", "wide"]
SHAPES = [(1, 1), (3, 4), (7, 3), (16, 1), (33, 8), (49, 2), (196, 2), (196, 4)]
room = import_module("fedprompt.transport.newton")
newton = partial(fedprompt.transport.newton, fused=True)


@contextmanager
def path(*, fused):
    """Send small problems through the kernel, or none; yields a list that fills with the numbers of problems it got."""
    launches = []

    def counted(problem, **options):
        launches.append(len(problem.cost))
        return _fused.fused_steps(problem, **options)

    with (
        patch.object(_fused, "launchable", lambda device: fused),
        patch.object(room, "fused_steps", counted),
    ):
        yield launches


def draw(kind, problems, rows, columns, mass, device="cpu", *, seed=0):
    """Costs and uneven masses, every fifth row without any."""
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
    return problem, solve(problem, epsilon=epsilon, tolerance=1e-5, max_iterations=room.PLAIN_STEPS)


@EVERYWHERE
@pytest.mark.parametrize("mass", [0.05, 0.8, 1.0])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_the_kernel_takes_the_steps_of_the_plain_path(device, rows, columns, mass):
    for kind in KINDS:
        drawn = draw(kind, 3, rows, columns, mass, device)
        problem, (plan, v, iterations, error) = steps(_fused.fused_steps, *drawn)
        _, (expected, its_v, its_iterations, its_error) = steps(room._plain_steps, *drawn)
        torch.testing.assert_close(plan, expected, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(v, its_v, rtol=1e-3, atol=0)
        assert (
            iterations - its_iterations
        ).abs().max() <= 1  # where an error rounds to either side of the stop
        torch.testing.assert_close(
            error, violation(plan, problem), rtol=0.01, atol=5e-7
        )  # rows hold by construction, to rounding
        torch.testing.assert_close(its_error, violation(expected, problem), rtol=0.01, atol=5e-7)


@EVERYWHERE
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
    """What the kernel leaves goes to the line search; the best is float64's."""
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
def test_the_same_bits_alone_and_in_company(device):
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
def test_a_constant_on_the_cost_changes_no_bit(device):
    cost, a, b = draw("wide", 3, 49, 2, 0.8, device)
    cost = (cost * 4096).round() / 4096  # so that adding 4 rounds nothing
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
    a = a.T.contiguous().T[
        :, None
    ]  # rows of a matrix that lies by columns; the same for both of the second axis
    with path(fused=True) as launches:
        coupling = newton(cost, a, b[0])
    assert launches == [4]
    assert coupling.plan.dtype == torch.float32
    with path(fused=False):
        expected = newton(cost, a, b[0])
    torch.testing.assert_close(coupling.plan, expected.plan, rtol=0, atol=1e-6)
    assert (
        coupling.plan.device.type
        == coupling.error.device.type
        == coupling.iterations.device.type
        == device
    )
    with path(fused=True):
        assert newton(cost[:0], a[:0], b[0]).plan.shape == (0, 2, 20, 2)


@EVERYWHERE
@pytest.mark.filterwarnings(OVERFLOW)
def test_what_overflows_is_left_to_the_line_search(device):
    """A NaN is an error that is not small, whichever column it stands in; companions keep their bits."""
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
def test_few_iterations_are_kept_and_said(device):
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
def test_values_are_refused_as_ever(device):
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


def test_the_kernel_is_used_only_where_it_is_asked_for():
    """It has not run on a GPU yet: the plain path is the default there too."""
    drawn = draw("wide", 3, 20, 2, 0.8)
    with path(fused=True) as launches:
        plain = fedprompt.transport.newton(*drawn)
    assert launches == []
    with path(fused=False):
        asked = newton(*drawn)  # on a CPU the argument has no effect
    assert all(torch.equal(one, other) for one, other in zip(plain, asked, strict=True))


@pytest.mark.bad_input
@pytest.mark.parametrize("flag", [1, None, "yes"])
def test_fused_is_a_boolean(flag):
    with pytest.raises(TypeError, match="`fused` must be True or False"):
        fedprompt.transport.newton(*draw("wide", 3, 20, 2, 0.8), fused=flag)


@pytest.mark.gpu
def test_a_gpu_is_used():
    assert _fused.launchable(torch.device("cuda", 0))
    drawn = draw("wide", 300, 196, 2, 0.8, "cuda")
    with patch.object(room, "fused_steps", wraps=_fused.fused_steps) as kernel:
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
    monkeypatch.setattr(driver, "_active", Broken())
    with pytest.warns(
        RuntimeWarning, match="Triton cannot launch kernels here.*Failed to find C compiler"
    ):
        assert not _fused.launchable.__wrapped__(torch.device("cuda", 0))


@needs_triton
@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 1), (49, 2), (196, 2), (196, 4), (196, 8), (1024, 8), (8192, 1)]
)
def test_the_kernel_builds_for_a_gpu_that_is_not_there(rows, columns, monkeypatch, tmp_path):
    """What the interpreter does not see: types, and that a problem stays in registers (nothing on the stack)."""
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


@needs_triton
def test_everything_marked_interpreted():
    """In a process of its own: Triton asks when it is imported whether to interpret. By hand: ``pytest -m interpreted``."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "interpreted",
        str(Path(__file__)),
    ]
    run = subprocess.run(
        command, capture_output=True, text=True, cwd=Path(__file__).parents[2], env=dict(os.environ)
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert int(re.search(r"(\d+) passed", run.stdout)[1]) >= len(SHAPES) * 3 + 6
