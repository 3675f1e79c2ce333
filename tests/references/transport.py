"""Independent solutions of transport problems: a slow loop, POT, SciPy and FedOTP's public code."""

import numpy as np
import torch
from torch import Tensor


def slow_plan(
    cost: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    epsilon: float,
    tolerance: float = 1e-12,
    most: int = 200_000,
) -> Tensor:
    """Solve one problem by alternation in the log domain, in float64, until v is constant."""
    exponent, log_a, log_b = -cost.double() / epsilon, a.double().log(), b.double().log()
    free = b.sum() < a.sum() * (1 - 1e-6)
    v = log_b - exponent.logsumexp(0)
    for _ in range(most):
        u = log_a - (exponent + v).logsumexp(1)
        u = u.clamp(max=0) if free else u
        new = log_b - (exponent + u[:, None]).logsumexp(0)
        change, v = (new - v).abs().max(), new
        if change < tolerance:
            return (exponent + u[:, None] + v).exp()
    raise AssertionError(f"the reference did not converge: {change}")


def pot_plan(cost: Tensor, a: Tensor, b: Tensor, *, epsilon: float) -> Tensor:
    """Solve by POT's partial transport of the mass of b, which fills all columns."""
    import ot

    arrays = (tensor.double().numpy() for tensor in (a, b, cost))
    mass = float(b.double().sum())
    plan = ot.partial.entropic_partial_wasserstein(
        *arrays, reg=epsilon, m=mass, numItermax=200_000, stopThr=1e-14
    )
    return torch.from_numpy(np.asarray(plan))


def published_plan(
    cost: Tensor, a: Tensor, b: Tensor, *, epsilon: float, threshold: float = 1e-3, most: int = 100
) -> Tensor:
    """Solve problems ``(problems, rows, columns)`` by a restatement of FedOTP's published loop.

    It has dense diagonal matrices and one absolute stopping rule for the whole batch.
    """
    kernel = torch.exp(-cost / epsilon)
    onto_rows = torch.bmm(torch.diag_embed(1 / a), kernel)
    onto_columns = torch.bmm(torch.diag_embed(1 / b), kernel.transpose(1, 2))
    u, v = torch.ones_like(a)[..., None], torch.ones_like(b)[..., None]
    for _ in range(most):
        before = v
        u = torch.minimum(1 / torch.bmm(onto_rows, v), torch.ones_like(u))
        v = 1 / torch.bmm(onto_columns, u)
        if (v - before).abs().mean().item() < threshold:
            break
    return torch.bmm(torch.diag_embed(u[..., 0]), torch.bmm(kernel, torch.diag_embed(v[..., 0])))


def kkt_violation(
    plan: Tensor, cost: Tensor, a: Tensor, b: Tensor, *, epsilon: float
) -> dict[str, float]:
    r"""Measure how much the plan of one problem violates the optimality conditions, in float64.

    Stationarity is :math:`C + \epsilon (\log T + 1) = \nu_j - \mu_v`. So ``log T + C / epsilon`` is
    the sum of a number for each row and one for each column. Further conditions are
    :math:`\mu \ge 0`, and :math:`\mu_v = 0` for every row v that keeps mass.
    """
    plan, cost, a, b = plan.double(), cost.double(), a.double(), b.double()
    rows = a > 0
    potential = plan[rows].log() + cost[rows] / epsilon
    weight = plan[rows]
    # The slackest row has mu = 0 and gives the numbers of the columns. A row's number is then
    # -mu / epsilon.
    left = a[rows] - weight.sum(1)
    slackest = int((left / a[rows]).argmax())
    row = ((potential - potential[slackest]) * weight).sum(1) / weight.sum(1)
    spread = (potential - potential[slackest] - row[:, None]) * weight / a[rows][:, None]
    balanced = bool(b.sum() >= a.sum() * (1 - 1e-6))
    return {
        "negative": float((-plan).clamp(min=0).max()),
        "rows": float(((plan.sum(1) - a) / a.clamp(min=1e-30)).clamp(min=0).max()),
        "columns": float(((plan.sum(0) - b) / b).abs().max()),
        "stationarity": float(spread.abs().max()),
        "multiplier": 0.0 if balanced else float(row.clamp(min=0).max()),
        "slackness": 0.0 if balanced else float((row.abs() * left / a[rows]).clamp(min=0).max()),
    }


def planted_cost(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw costs like zero-shot cosines (``clip``), trained ones, or of any size (``wide``)."""
    draw = torch.randn(shape, generator=generator, dtype=torch.float64)
    if kind == "wide":
        return torch.rand(shape, generator=generator, dtype=torch.float64) * 2
    mean, spread = {"clip": (0.8, 0.035), "trained": (0.75, 0.12)}[kind]
    return (mean + spread * draw).clamp(0, 2)


def marginals(
    rows: int, columns: int, mass: float, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Return the marginals of FedOTP: equal rows of sum 1, equal columns of sum `mass`."""
    a = torch.full((rows,), 1 / rows, dtype=dtype)
    b = torch.full((columns,), mass / columns, dtype=dtype)
    return a, b
