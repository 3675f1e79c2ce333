"""Newton's plain steps as one Triton kernel, in which a program keeps one problem in registers.

Importing this module imports Triton, so it is imported on use. The number of columns is a
compile-time constant. Loops over columns are unrolled, and tuples have one entry for each column: a
block of rows (`kernel`) or a number. Triton's annotations and growing tuples are not typed Python.
"""

from typing import no_type_check

import triton
import triton.language as tl

from fedprompt.transport import _dual

GROUND = tl.constexpr(_dual.GROUND)
FARTHEST = tl.constexpr(_dual.FARTHEST)


@triton.jit
@no_type_check
def newton_steps(
    cost,  # (problems, columns, rows); all tensors are contiguous, with fewer than 2**31 entries
    a,  # (problems, rows)
    b,  # (problems, columns)
    full,  # (problems,) bool
    plan,  # out: (problems, columns, rows)
    duals,  # out: (problems, columns)
    error,  # out: (problems,)
    iterations,  # out: (problems,) int64
    rows,
    sharpness,  # log2(e) / epsilon
    near,
    most,
    columns: tl.constexpr,
    block: tl.constexpr,
):
    """Solve one problem in the same way as :func:`fedprompt.transport.newton._plain_steps`."""
    problem = tl.program_id(0)
    row = tl.arange(0, block)
    inside = row < rows
    has = tl.load(a + problem * rows + row, mask=inside, other=0.0)
    balanced = tl.load(full + problem)
    cap = tl.where(balanced, float("inf"), 1.0)
    kernel, takes, v = (), (), ()
    for j in tl.static_range(columns):
        place = cost + (problem * columns + j) * rows + row
        price = tl.load(place, mask=inside, other=float("inf"))
        kernel += (tl.exp2((tl.min(price, 0) - price) * sharpness),)
        takes += (tl.load(b + problem * columns + j),)
        v += (takes[j] / tl.sum(kernel[j], 0),)

    count, worst = 0, float("inf")
    while (count < most) & (worst > near):
        free, off, slope, worst = _evaluate(kernel, v, has, takes, balanced, cap, columns)
        v = _move(v, _eliminate(free, off, slope, columns), columns)
        count += 1

    scale, worst = tl.minimum(has * _inverse_demand(kernel, v, columns), cap), 0.0
    for j in tl.static_range(columns):
        column = kernel[j] * scale * v[j]
        # Rows hold by construction, up to rounding.
        worst = _larger(worst, tl.abs(tl.sum(column, 0) - takes[j]) / takes[j])
        tl.store(plan + (problem * columns + j) * rows + row, column, mask=inside)
        tl.store(duals + problem * columns + j, v[j])
    tl.store(error + problem, worst)
    tl.store(iterations + problem, count)


@triton.jit
@no_type_check
def _inverse_demand(kernel, v, columns: tl.constexpr):
    """Return 1 / s for each row's demand s, with relative error 3e-7, in two instructions."""
    s = kernel[0] * v[0]
    for j in tl.static_range(1, columns):
        s += kernel[j] * v[j]
    root = tl.rsqrt(tl.maximum(s, 1e-18))
    return root * root


@triton.jit
@no_type_check
def _evaluate(kernel, v, has, takes, balanced, cap, columns: tl.constexpr):
    """Return diagonal and couplings of the curvature, slope and error, as ``_dual.evaluate``.

    The couplings are a square matrix in one flat tuple.
    """
    inverse = _inverse_demand(kernel, v, columns)
    ratio = has * inverse
    slack, scale = ratio > cap, tl.minimum(ratio, cap)
    alone, shared = tl.where(slack, scale, 0.0), tl.where(slack, 0.0, scale * inverse)
    free, off, slope, worst = (), (), (), 0.0
    for j in tl.static_range(columns):
        given = v[j] * tl.sum(kernel[j] * scale, 0)
        loose = v[j] * tl.sum(kernel[j] * alone, 0)
        if j == columns - 1:
            loose += tl.where(balanced, given, 0.0)
        free += (loose + GROUND * takes[j],)
        slope += (takes[j] - given,)
        worst = _larger(worst, tl.abs(slope[j]) / takes[j])
        for k in tl.static_range(columns):
            if k < j:
                off += (off[k * columns + j],)
            elif k == j:
                off += (0.0,)
            else:
                # In this order, because v * v may overflow.
                off += (v[j] * tl.sum(kernel[j] * shared * kernel[k], 0) * v[k],)
    return free, off, slope, worst


@triton.jit
@no_type_check
def _eliminate(free, off, right, columns: tl.constexpr):
    """Solve for the Newton step without subtractions, as ``_elimination.eliminate``."""
    shares, own = (), ()
    for k in tl.static_range(columns - 1):
        pivot, share = free[k], ()
        for i in tl.static_range(k + 1, columns):
            pivot += off[k * columns + i]
        for i in tl.static_range(columns):
            share += (off[k * columns + i] / pivot,)
        shares += (share,)
        own += (right[k] / pivot,)
        next_free, next_off, next_right = (), (), ()
        for i in tl.static_range(columns):  # entries with i <= k or i == j are never read
            next_free += (free[i] + share[i] * free[k],)
            next_right += (right[i] + share[i] * right[k],)
            for j in tl.static_range(columns):
                next_off += (off[i * columns + j] + share[i] * off[k * columns + j],)
        free, off, right = next_free, next_off, next_right
    solution = (right[columns - 1] / free[columns - 1],)
    for k in tl.static_range(columns - 2, -1, -1):
        unknown = own[k]
        for i in tl.static_range(k + 1, columns):
            unknown += shares[k][i] * solution[i - k - 1]
        solution = (unknown,) + solution  # noqa: RUF005 (Triton has no unpacking)
    return solution


@triton.jit
@no_type_check
def _move(v, step, columns: tl.constexpr):
    moved = ()
    for j in tl.static_range(columns):
        up = tl.minimum(tl.maximum(step[j], 0.0), FARTHEST)
        down = tl.maximum(tl.minimum(step[j], 0.0), -FARTHEST)
        moved += ((v[j] + v[j] * up) / (1 - down),)
    return moved


@triton.jit
@no_type_check
def _larger(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)
