"""Figures of key usage."""

import math
import warnings

import torch
from jaxtyping import Float, Real
from torch import Tensor

import fedprompt._conversions as convert
import fedprompt._refusals as check
from fedprompt._cosine import unit


def selection_health(
    counts: Real[Tensor, "groups *classes"],
    query: Float[Tensor, "batch dim"] | None = None,
    *,
    max_cosine: float = 0.5,
) -> dict[str, float]:
    r"""Summarize the use of groups in a dict of figures that any logger accepts.

    Monitor ``dead_groups`` and ``effective_groups``. A collapse shows in them long before it shows
    in the accuracy.

    Queries in a narrow cone cause a collapse. If you pass them, their mean cosine is reported, with
    a warning above `max_cosine`. :class:`CenteredQueries` removes the cause. Pass queries of many
    classes, because queries of one class resemble one another.

    Args:
        counts: Number of samples of each group, (groups,), or a table of groups and classes as
            from :func:`fedprompt.metrics.contingency_table`.
        query: Queries as the selector receives them, for example of one client.
        max_cosine: Largest mean cosine without a warning, in [-1, 1]. At 0.5, a key on the axis is
            3.4 times nearer than an orthogonal one, :math:`1 / (1 - \sqrt{0.5})`.

    Returns:
        A dict with these entries.

        - ``count/0``, ``count/1`` and so on: number of samples of each group.
        - ``dead_groups``: number of groups without a sample.
        - ``largest_share``: share of the largest group in all samples, in [0, 1].
        - ``entropy``: entropy of the groups' shares in nats.
        - ``effective_groups``: exponential of the entropy. It is the number of groups if all are
          equally large, and 1 if a single group has all samples.
        - ``purity``, for a table: share of samples whose class is the most frequent one of their
          group. It increases with the number of groups.
        - ``label_overlap``, for a table: mutual information of group and class, divided by the
          mean of their entropies. It is 0 if they are independent and 1 if they are identical. It
          need not increase with the number of groups.
        - ``mean_cosine``, with `query`: mean cosine of two different queries, in [-1, 1].

        With no counts, all values of `counts` except ``dead_groups`` are 0 (0/0 is defined as 0).

    Raises:
        ValueError: If `counts` has no group or more than two axes, or an entry is negative or not
            finite.

    Example:
        One of four groups is dead, and one has half of the samples.

        >>> health = selection_health(torch.tensor([50, 25, 25, 0]))
        >>> health["dead_groups"], health["largest_share"], round(health["effective_groups"], 2)
        (1.0, 0.5, 2.83)
    """
    check.number("max_cosine", max_cosine, at_least=-1, at_most=1)
    table = convert.counts("counts", counts, "(groups,) or (groups, classes)", ndims=(1, 2))
    table = table.reshape(len(table), -1)
    sizes = table.sum(1)
    total = float(table.sum()) or 1.0
    entropy = _entropy(sizes / total)
    health = {f"count/{group}": size for group, size in enumerate(sizes.tolist())}
    health |= {
        "dead_groups": float((sizes == 0).sum()),
        "largest_share": float(sizes.max()) / total,
        "entropy": entropy,
        "effective_groups": math.exp(entropy) if sizes.any() else 0.0,
    }
    if counts.ndim == 2:
        classes = _entropy(table.sum(0) / total)
        shared = max(0.0, entropy + classes - _entropy(table / total))
        health |= {
            "purity": float(table.amax(1).sum()) / total,
            "label_overlap": 2 * shared / ((entropy + classes) or 1.0),
        }
    if query is not None:
        health["mean_cosine"] = _mean_cosine(query, max_cosine)
    return health


@torch.no_grad()
def _mean_cosine(query: Tensor, max_cosine: float) -> float:
    """Average the cosine over all pairs of different queries, and warn of a narrow cone."""
    check.number_tensor("query", query, "be a floating-point tensor (batch, dim)", ndim=2)
    check.finite("query", query)
    directions = unit(query).cpu().double()
    pairs = len(directions) * (len(directions) - 1)
    same = directions.square().sum()
    cosine = float((directions.sum(0).square().sum() - same) / max(pairs, 1))
    if cosine > max_cosine:
        warnings.warn(
            f"The mean cosine of queries is {cosine:.2f}, above {max_cosine:g}. Most of them will "
            "select the same key. Subtract their mean with CenteredQueries.",
            stacklevel=3,
        )
    return cosine


def _entropy(shares: Tensor) -> float:
    return float(torch.special.entr(shares).sum())
