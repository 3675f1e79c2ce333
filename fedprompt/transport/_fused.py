"""Conditions and launch of the CUDA kernel for Newton's plain steps; Triton is imported on use."""

import math
import warnings
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from fedprompt.transport._dual import NEAR
from fedprompt.transport._problem import Problem

LARGEST = 8192
"""Largest number of entries of a problem: 32 registers in each thread of eight warps.

Rows are rounded up to a power of 2.
"""

MOST_COLUMNS = 8
"""Largest number of columns. The linear system of a step is unrolled."""

OLDEST = (8, 0)
"""Lowest compute capability that Triton supports."""


def fits(problem: Problem) -> bool:
    """Whether :func:`fused_steps` can solve these problems."""
    problems, columns, rows = problem.cost.shape
    small = problems > 0 and columns <= MOST_COLUMNS and columns * block_of(rows) <= LARGEST
    return (
        problem.eager
        and small
        and problem.cost.dtype == torch.float32
        and launchable(problem.cost.device)
    )


@cache
def launchable(device: torch.device) -> bool:
    """Whether Triton can build and launch kernels on this device; warns if a launch fails."""
    if device.type != "cuda" or torch.version.cuda is None or find_spec("triton") is None:
        return False
    if torch.cuda.get_device_capability(device) < OLDEST:
        return False
    from triton.runtime import driver

    try:
        driver.active.get_current_target()  # needs a C compiler and Python's headers
    # RuntimeError without a C compiler, CalledProcessError without Python's headers, ImportError or
    # AssertionError without the libraries of CUDA.
    except Exception as reason:
        message = f"Triton cannot launch kernels here. `newton` runs without its kernel: {reason}"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
        return False
    return True


def block_of(rows: int) -> int:
    """Return the number of rows with padding: a power of 2, at least the 32 threads of a warp."""
    return max(32, 1 << (rows - 1).bit_length())


def options(columns: int, rows: int) -> dict[str, int | bool]:
    """Return the compile-time options of a kernel.

    One warp is used as long as 32 registers of each thread hold the problem, because sums within a
    warp need no barrier.
    """
    block = block_of(rows)
    return {
        "columns": columns,
        "block": block,
        "num_warps": max(1, columns * block // 1024),
        "enable_fp_fusion": True,
    }


def fused_steps(
    problem: Problem, *, epsilon: float, tolerance: float, max_iterations: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run Newton's plain steps in one kernel; return plan, v, number of evaluations and violation.

    Formulas and stopping rule are those of the plain path. Each problem stops on the device,
    without the host. Its numbers are bitwise independent of the other problems.
    """
    from fedprompt.transport._triton import newton_steps

    problems, columns, rows = problem.cost.shape
    plan = problem.cost.new_empty(problems, columns, rows)
    v = problem.cost.new_empty(problems, columns)
    error = problem.cost.new_empty(problems)
    iterations = torch.empty(problems, dtype=torch.int64, device=problem.cost.device)
    inputs = [part.contiguous() for part in (problem.cost, problem.a, problem.b, problem.full)]
    numbers = rows, math.log2(math.e) / epsilon, NEAR * tolerance**0.5, max_iterations
    outputs = plan, v, error, iterations
    with torch.cuda.device(problem.cost.get_device()):  # Triton launches on the current device
        newton_steps[(problems,)](*inputs, *outputs, *numbers, **options(columns, rows))
    return plan, v, iterations, error
