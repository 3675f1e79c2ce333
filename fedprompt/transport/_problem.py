"""Parts shared by all solvers: checks, memory layout, chunks of bounded size, and the result."""

import math
from collections.abc import Callable, Iterator
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fedprompt._refusals as check
from fedprompt.interfaces import Coupling

CHUNK = {"cpu": 2**18}
"""Entries of the cost that are solved at a time: the size of a CPU cache."""

CHUNK_ELSEWHERE = 2**27
"""The same on an accelerator: half a gigabyte of float32."""


_Solve = Callable[..., tuple[Tensor, ...]]
"""Function of cost, `a`, `b` and others."""


class Problem(NamedTuple):
    """Batch of problems with one batch axis, and with rows as the last axis.

    Attributes:
        cost: ``(problems, columns, rows)``, float32 or float64.
        a: ``(problems, rows)``, mass of the rows. In a full problem it is scaled to the sum of `b`.
        b: ``(problems, columns)``, mass of the columns.
        full: ``(problems, 1)``, whether the columns take the whole mass of the rows.
        pinned: ``(problems, columns)``, 1 for the last column of a full problem and 0 elsewhere.
        eager: Whether a solver may read values, to stop when all problems are solved.
        rows_exact: Whether rows give exactly `a`, not at most.
    """

    cost: Tensor
    a: Tensor
    b: Tensor
    full: Tensor
    pinned: Tensor
    eager: bool
    rows_exact: bool

    def take(self, part: slice | Tensor) -> "Problem":
        """Return some of the problems."""
        tensors = ("cost", "a", "b", "full", "pinned")
        return self._replace(**{name: getattr(self, name)[part] for name in tensors})

    def double(self) -> "Problem":
        """Return the same problems in float64, on devices that support it."""
        if self.cost.device.type == "mps":
            return self
        wide = {name: getattr(self, name).double() for name in ("cost", "a", "b", "pinned")}
        return self._replace(**wide)

    def chunks(self) -> Iterator[slice]:
        """Split into parts of bounded size. Where values cannot be read, there is one part."""
        problems, columns, rows = self.cost.shape
        entries = CHUNK.get(self.cost.device.type, CHUNK_ELSEWHERE)
        size = max(entries // (columns * rows), 1) if self.eager else max(problems, 1)
        return (slice(start, start + size) for start in range(0, problems, size))


class Solution(NamedTuple):
    """Result of a solver on a :class:`Problem`.

    Attributes:
        plan: ``(problems, columns, rows)``.
        error: ``(problems,)``, the :func:`violation` of each problem.
        iterations: ``(problems,)``.
        duals: ``(problems, columns)``, log v for costs minus the smallest cost of their column.
            None if the solver has no duals.
    """

    plan: Tensor
    error: Tensor
    iterations: Tensor
    duals: Tensor | None = None


def couple_entropic(
    cost: Tensor,
    a: Tensor,
    b: Tensor,
    solve: Callable[..., Solution],
    epsilon: float,
    tolerance: float,
    max_iterations: int,
    *,
    rows_exact: bool | None = False,
) -> Coupling:
    """Check the options of an iterative solver, and call :func:`couple` with them."""
    check.divisor("epsilon", epsilon)
    check.number("tolerance", tolerance, above=0)
    check.count("max_iterations", max_iterations)
    solver = partial(solve, epsilon=epsilon, tolerance=tolerance, max_iterations=max_iterations)
    coupling = couple(cost, a, b, solver, epsilon=epsilon, rows_exact=rows_exact)
    return coupling._replace(tolerance=max(tolerance, resolution(coupling.plan.dtype)))


def resolution(dtype: torch.dtype) -> float:
    """Return the smallest tolerance that a dtype resolves."""
    return 8 * torch.finfo(dtype).eps


@torch.no_grad()
def couple(
    cost: Tensor,
    a: Tensor,
    b: Tensor,
    solve: Callable[[Problem], Solution],
    *,
    epsilon: float,
    rows_exact: bool | None = False,
) -> Coupling:
    """Check and solve a batch chunk by chunk; return the result in the layout of `cost`.

    If `rows_exact` is None, the marginals are relaxed, and masses may have any sums.
    """
    check_layout(cost, a, b)

    def solved(cost: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        check_problem(cost, a, b, epsilon, rows_exact)
        plan, error, iterations, duals = _by_chunks(flat(cost, a, b, rows_exact), solve)
        batch = cost.shape[:-2]
        plan = plan.transpose(1, 2).reshape(cost.shape)
        found = plan, error.reshape(batch), iterations.reshape(batch)
        return found if duals is None else (*found, duals.reshape(*batch, cost.shape[-1]))

    with torch.autocast(cost.device.type, enabled=False):
        plan, error, iterations, *duals = unwrapped(solved, cost, a, b)
    masses = a.detach(), b.detach()
    return Coupling(plan, error, iterations, *masses, epsilon, (*duals, None)[0], 1e-5)


def unwrapped(solve: _Solve, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Call a function of cost, `a`, `b` and others, in ``torch.func`` transforms on plain tensors.

    So the function can read values there, and stop when all problems are solved.
    """
    if torch.compiler.is_compiling() or check.values_readable(*tensors):
        return solve(*tensors)
    found: tuple[Tensor, ...] = _Unwrapped.apply(solve, *tensors)
    return found


class _Unwrapped(torch.autograd.Function):
    """Autograd function without a gradient, for :func:`unwrapped`."""

    @staticmethod
    def forward(solve: _Solve, *tensors: Tensor) -> tuple[Tensor, ...]:
        return unwrapped(solve, *tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], solve: _Solve, *tensors: Tensor) -> Any:
        """Solve all problems as one batch; masses have fewer axes, and get axes of length 1."""
        batched = [
            tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            for tensor, dim in zip(tensors, in_dims[1:], strict=True)
        ]
        masses = [
            mass.reshape(len(mass), *[1] * (batched[0].ndim - 1 - mass.ndim), *mass.shape[1:])
            for mass in batched[1:]
        ]
        found = unwrapped(solve, batched[0], *masses)
        return found, (0,) * len(found)


def _by_chunks(problem: Problem, solve: Callable[[Problem], Solution]) -> Solution:
    parts = list(problem.chunks())
    if len(parts) <= 1:
        return solve(problem)
    plan = torch.empty_like(problem.cost)
    duals = torch.empty_like(problem.b)
    error = plan.new_empty(len(plan))
    iterations = torch.empty(len(plan), dtype=torch.int64, device=plan.device)
    for part in parts:
        solution = solve(problem.take(part))
        plan[part], error[part], iterations[part] = solution[:3]
        if solution.duals is not None:
            duals[part] = solution.duals
    return Solution(plan, error, iterations, None if solution.duals is None else duals)


def violation(plan: Tensor, problem: Problem) -> Tensor:
    """Return the largest relative violation of a marginal; for capped rows, only of an excess."""
    tiny = torch.finfo(plan.dtype).tiny
    excess = (plan.sum(1) - problem.a) / problem.a.clamp(min=tiny)
    gap = (plan.sum(2) - problem.b) / problem.b.clamp(min=tiny)
    rows = excess.abs() if problem.rows_exact else excess.clamp(min=0)
    return torch.maximum(rows.amax(1), gap.abs().amax(1))


def flat(cost: Tensor, a: Tensor, b: Tensor, rows_exact: bool | None = False) -> Problem:
    """Arrange a batch for the solvers, in float32 at least; masses shared by all are not copied."""
    dtype = _dtype(cost, a, b)
    *batch, rows, columns = cost.shape
    problems = math.prod(batch)
    slack = slack_of(a, b)
    eager = check.values_readable(cost, a, b)
    a, b = a.to(dtype), b.to(dtype)
    has, takes = a.sum(-1, keepdim=True), b.sum(-1, keepdim=True)
    full = (takes >= has * (1 - slack)) & (rows_exact is not None)
    a = torch.where(full, a * (takes / has), a)
    last = torch.arange(columns, device=cost.device) == columns - 1
    a, b, full, pinned = (
        part.expand(*batch, -1).reshape(problems, part.shape[-1])
        for part in (a, b, full, (full & last).to(dtype))
    )
    cost = cost.to(dtype).transpose(-2, -1).reshape(problems, columns, rows).contiguous()
    return Problem(cost, a, b, full, pinned, eager, bool(rows_exact))


def check_problem(
    cost: Tensor, a: Tensor, b: Tensor, epsilon: float, rows_exact: bool | None = False
) -> None:
    """Require finite costs, and masses for which a plan exists.

    The range of the costs must not overflow if it is divided by `epsilon`.
    """
    if not check.values_readable(cost, a, b):
        return
    slack = slack_of(a, b)
    dtype = _dtype(cost, a, b)
    has, takes = (mass.sum(-1, dtype=dtype) for mass in (a, b))
    unequal = (takes > has * (1 + slack)) | ((takes < has * (1 - slack)) if rows_exact else False)
    total = f"sum to {'the sum' if rows_exact else 'at most the sum'} of `a`"
    top, least = (end((-2, -1)).to(dtype) for end in (cost.amax, cost.amin))
    largest = torch.finfo(dtype).max / 8 * min(epsilon, 1) if 0 < epsilon < math.inf else math.inf
    rules = (
        ("cost", "be finite", ~((top < math.inf) & (least > -math.inf))),
        ("cost", f"have a range of at most {largest:.2g}", ~(top / 2 - least / 2 <= largest / 2)),
        ("a", "be finite and at least 0", ~((a >= 0) & (a < math.inf)).all(-1)),
        ("b", "be finite and above 0", ~((b > 0) & (b < math.inf)).all(-1)),
        ("b", total, unequal & (rows_exact is not None)),
    )
    if not bool(torch.stack([wrong.any() for _, _, wrong in rules]).any()):  # one synchronization
        return
    batch = cost.shape[:-2]
    for name, rule, wrong in rules:
        if problems := torch.nonzero(wrong.expand(batch)).tolist():
            sums = (mass.expand(batch)[tuple(problems[0])].item() for mass in (takes, has))
            got = "{:g} of {:g}".format(*sums) if rule == total else "values that are not"
            raise check.wrong(name, rule, got + _places(problems))


def _dtype(*tensors: Tensor) -> torch.dtype:
    """Return the dtype in which a problem is solved, at least float32."""
    return reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)


def slack_of(a: Tensor, b: Tensor) -> float:
    """Return the relative tolerance of sums of masses, larger for half precision."""
    return max(1e-6, *(4 * torch.finfo(mass.dtype).eps for mass in (a, b)))


def check_layout(cost: Tensor, a: Tensor, b: Tensor) -> None:
    """Require floating-point tensors on one device, and masses that broadcast over the problems."""
    for name, tensor, axes in (
        ("cost", cost, "(..., rows, columns)"),
        ("a", a, "(..., rows)"),
        ("b", b, "(..., columns)"),
    ):
        check.number_tensor(name, tensor, f"be a floating-point tensor {axes}")
        check.same_device(name, tensor, cost.device, "the device of `cost`,")
    rule = "have shape (..., rows, columns) with at least one row and one column"
    check.require(cost.ndim >= 2 and 0 not in cost.shape[-2:], "cost", rule, cost)
    *batch, rows, columns = cost.shape
    for name, mass, size in (("a", a, rows), ("b", b, columns)):
        leading = mass.shape[:-1]
        fits = len(leading) <= len(batch) and all(
            x in (1, y) for x, y in zip(reversed(leading), reversed(batch), strict=False)
        )
        if mass.ndim < 1 or mass.shape[-1] != size or not fits:
            rule = f"have shape (..., {size}) to match `cost` {tuple(cost.shape)}"
            raise check.wrong(name, rule, tuple(mass.shape))


def _places(problems: list[list[int]]) -> str:
    """Name the first five problems by their indices; a single problem without a batch has none."""
    if problems == [[]]:
        return ""
    shown = [str(tuple(index)) for index in problems[:5]] + ["..."] * (len(problems) > 5)
    return f" in problem{'s' if len(problems) > 1 else ''} {', '.join(shown)}"
