"""When Newton's plain steps run as one CUDA kernel, and how that is launched. Imports Triton only to run it."""

import math
import warnings
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from fedprompt.transport._dual import NEAR
from fedprompt.transport._problem import Problem

LARGEST = 8192  # entries of a problem, its rows rounded up to a power of 2: 32 registers in each thread of eight warps
MOST_COLUMNS = 8  # the system of Newton's step is unrolled
OLDEST = (8, 0)  # compute capability; what Triton supports


def fits(problem: Problem) -> bool:
    """Whether :func:`fused_steps` may take these problems."""
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
    """Whether Triton can build and start a kernel on this device; warns where it ought to and cannot."""
    if device.type != "cuda" or torch.version.cuda is None or find_spec("triton") is None:
        return False
    if torch.cuda.get_device_capability(device) < OLDEST:
        return False
    from triton.runtime import driver

    try:
        driver.active.get_current_target()  # builds what launches kernels: needs a C compiler and Python's headers
    except Exception as reason:  # whatever the compiler or the driver has to say
        warnings.warn(
            f"Triton cannot launch kernels here, so transport takes more, smaller ones: {reason}",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True


def block_of(rows: int) -> int:
    """Return the rows that a program holds, real ones and padding: a power of 2, and one for each thread of a warp at least."""
    return max(32, 1 << (rows - 1).bit_length())


def options(columns: int, rows: int) -> dict[str, int | bool]:
    """Return what a kernel is built for. One warp as long as 32 registers of each thread hold the problem: its sums need no barrier."""
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
    """Take Newton's plain steps in one kernel; return plan, v, the number of evaluations, and each problem's violation.

    The same mathematics as the plain path, and the same stop, but problem by problem and without the host: a problem's numbers depend on
    nothing beside it, to the last bit.
    """
    from fedprompt.transport._triton import newton_steps

    problems, columns, rows = problem.cost.shape
    plan, v, error = (
        problem.cost.new_empty(shape)
        for shape in ((problems, columns, rows), (problems, columns), (problems,))
    )
    iterations = torch.empty(problems, dtype=torch.int64, device=problem.cost.device)
    inputs = [part.contiguous() for part in (problem.cost, problem.a, problem.b, problem.full)]
    numbers = rows, math.log2(math.e) / epsilon, NEAR * tolerance**0.5, max_iterations
    with torch.cuda.device(problem.cost.get_device()):  # Triton launches on the current one
        newton_steps[(problems,)](
            *inputs, plan, v, error, iterations, *numbers, **options(columns, rows)
        )
    return plan, v, iterations, error
