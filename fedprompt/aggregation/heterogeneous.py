"""Class logits averaged over clients with different models, as on the server of FedHPL."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import fedprompt._nouns as nouns
import fedprompt._refusals as check
from fedprompt.aggregation._sums import RowSums, as_entry, quotient
from fedprompt.interfaces import Weighted

_DIMS = "have one latent dimension for each entry"


def _dimension_similarity(dim: int, other: int, /) -> float:
    """Return the ratio of the smaller to the larger latent dimension (FedHPL Eq. 7)."""
    return min(dim / other, other / dim)


def heterogeneous_means(
    entries: Iterable[Weighted],
    dims: Iterable[int],
    *,
    smoothing: float = 1.0,
    similarity: Callable[[int, int], float] | float | None = None,
) -> dict[int, Weighted]:
    r"""Average class logits for every distinct latent dimension (FedHPL Eq. 8).

    .. math::
        \tilde p_c(d) = \sum_j \beta(d, d_j)\, n_{j,c}\, \bar p_{j,c} \,\Big/\,
        \Big(s + \sum_j \beta(d, d_j)\, n_{j,c}\Big)

    There is one teacher for each distinct latent dimension, the width of the features before a
    client's head. The similarity :math:`\beta` defaults to :math:`\min(d / d', d' / d)` (Eq. 7).
    Entries are streamed.

    Payloads are not accepted, because prompts have other shapes for each dimension. Average them
    with :func:`weighted_mean` among clients of equal dimension.

    Args:
        entries: Class logits of :func:`class_means` (at least one). Values have shape
            (classes, \*event). Weights (classes,) count the correct logits of each class.
        dims: Latent dimension of each entry's client (at least 1).
        smoothing: Smoothing s, in counts (at least 0). The paper uses 1, which pulls the teacher of
            a rare class towards 0. With 0, the result is a weighted mean.
        similarity: Function :math:`\beta` of two dimensions, with results from 0 to 1e18, or one
            number for all pairs. The uniform ablation of the paper is 1. If None, that of Eq. 7.

    Returns:
        Teacher of each distinct dimension. The weight of a class is the sum of similarity times
        count. Classes without evidence have value 0 and weight 0, and :func:`distillation_loss`
        ignores them (App. C.4).

    Raises:
        ValueError: If `entries` is empty, the length of `dims` differs, a similarity is out of
            range, or :func:`weighted_mean` would refuse an entry.

    Example:
        Two clients, of dimension 2 and 4, know one class each. The similarity is 0.5.

        >>> narrow = Weighted(torch.tensor([[6.0], [0.0]]), torch.tensor([2.0, 0.0]))
        >>> wide = Weighted(torch.tensor([[0.0], [8.0]]), torch.tensor([0.0, 2.0]))
        >>> heterogeneous_means([narrow, wide], [2, 4])[2]
        Weighted(value=tensor([[4.],
                [4.]]), weight=tensor([2., 1.]))

    References:
        Ma et al., "FedHPL: Efficient Heterogeneous Federated Learning with Prompt Tuning and Logit
        Distillation", 2024, Eq. 7-10.
    """
    check.number("smoothing", smoothing, at_least=0)
    check.iterable("entries", entries, "entries")
    check.iterable("dims", dims, "integers")
    beta_of = _dimension_similarity if similarity is None else similarity
    sums: dict[int, RowSums] = {}
    first: Weighted | None = None
    widths = iter(dims)
    for position, entry in enumerate(entries):
        if (dim := next(widths, None)) is None:
            raise check.wrong("dims", _DIMS, "fewer than entries")
        check.count(f"dims[{position}]", dim)
        place = f"entries[{position}]"
        first = first or nouns.layout(place, entry)
        if dim not in sums:
            sums[dim] = RowSums(first)
        sums[dim].add(place, entry)
    if first is None:
        raise check.wrong("entries", "hold at least one entry", "none")
    check.require(next(widths, None) is None, "dims", _DIMS, "more than entries")
    teachers = {}
    for dim in sums:
        total = RowSums(first)
        for other, sent in sums.items():
            beta = beta_of(dim, other) if callable(beta_of) else beta_of
            check.number(f"similarity({dim}, {other})", beta, at_least=0, at_most=1e18)
            total.add_sums(sent, beta)
        mean = quotient(total.value, total.weight + smoothing)
        teachers[dim] = as_entry(mean, total.weight, like=first)
    return teachers
