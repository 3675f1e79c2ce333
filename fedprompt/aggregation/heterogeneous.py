"""FedHPL's server: one teacher for each latent dimension, from class logits of clients with different models."""

from collections.abc import Callable, Iterable, Mapping

import torch

from fedprompt._checks import check_count, check_number, checked_layout, wrong_type, wrong_value
from fedprompt.aggregation._wide import WideSum
from fedprompt.aggregation.means import RowSums, as_entry
from fedprompt.interfaces import Weighted


def dimension_similarity(dim: int, other: int, /) -> float:
    r"""Compare two latent dimensions (FedHPL Eq. 7): :math:`\min(d / d', d' / d)`.

    Args:
        dim: Width of the features before one client's head, at least 1.
        other: The other client's.

    Returns:
        A similarity in (0, 1]; 1 for equal widths.

    Example:
        >>> dimension_similarity(384, 768)
        0.5
    """
    check_count("dim", dim)
    check_count("other", other)
    return min(dim / other, other / dim)


def heterogeneous_means(
    entries: Iterable[Weighted],
    dims: Iterable[int],
    *,
    smoothing: float = 1.0,
    similarity: Callable[[int, int], float] = dimension_similarity,
) -> dict[int, Weighted]:
    r"""Average class logits for every distinct latent dimension (FedHPL Eq. 8).

    .. math:: \tilde p_c(d) = \sum_j \beta(d, d_j)\, n_{j,c}\, \bar p_{j,c} \,\Big/\, \Big(s + \sum_j \beta(d, d_j)\, n_{j,c}\Big)

    The teacher of a client depends on its latent dimension alone, so one is made for each distinct
    dimension. The entries are streamed, in memory that does not grow with the number of clients.

    The entries are class logits alone, never payloads. The result is keyed by dimension, and the other
    names of a payload, such as prompts, have other shapes in other dimensions: average these among
    clients of equal dimension with :func:`weighted_mean`.

    Args:
        entries: Class logits, value (classes, \*event), with the number of correct logits of each class
            as weight (classes,). From :func:`class_means`. A client that sends several entries may
            average them with :func:`weighted_mean` first; the result is the same.
        dims: For each entry the width of its client's features before the head.
        smoothing: :math:`s \ge 0`, in counts. The paper prints 1, which pulls the teacher of a rare class towards 0; 0 gives the mean.
        similarity: :math:`\beta`, from 0 to 1e18, called with two widths. ``lambda dim, other: 1.0`` is the paper's uniform ablation.

    Returns:
        From each distinct dimension to its teacher. The weight of a class is the sum of similarity times count; classes that
        nobody knows have value 0 and weight 0, which :func:`distillation_loss` reads as "no distillation" (App. C.4).

    Raises:
        ValueError: If `entries` is empty, `dims` is shorter or longer, `smoothing` is negative, a
            similarity is out of range, or an entry is refused by :func:`weighted_mean`.

    Example:
        One client of width 2 and one of width 4 know one class each; similarity 0.5, smoothing 1.

        >>> narrow = Weighted(torch.tensor([[6.0], [0.0]]), torch.tensor([2.0, 0.0]))
        >>> wide = Weighted(torch.tensor([[0.0], [8.0]]), torch.tensor([0.0, 2.0]))
        >>> heterogeneous_means([narrow, wide], [2, 4])[2]
        Weighted(value=tensor([[4.],
                [4.]]), weight=tensor([2., 1.]))

    References:
        Ma et al., "FedHPL: Efficient Heterogeneous Federated Learning with Prompt Tuning and Logit Distillation", 2024, Eq. 7-10.
    """
    check_number("smoothing", smoothing, at_least=0)
    sums: dict[int, RowSums] = {}
    first: Weighted | None = None
    widths = iter(dims)
    for position, entry in enumerate(entries):
        if (dim := next(widths, None)) is None:
            raise wrong_value(
                "dims", "hold one latent dimension for each entry", "fewer than entries"
            )
        check_count(f"dims[{position}]", dim)
        if isinstance(entry, Mapping):
            raise wrong_type(
                f"entries[{position}]", "be one Weighted, the class logits", "a whole payload"
            )
        first = first or checked_layout(f"entries[{position}]", entry)
        if dim not in sums:
            sums[dim] = RowSums(first)
        sums[dim].add(f"entries[{position}]", entry)
    if first is None:
        raise wrong_value("entries", "hold at least one entry", "none")
    if next(widths, None) is not None:
        raise wrong_value("dims", "hold one latent dimension for each entry", "more than entries")
    return {dim: _teacher(dim, sums, smoothing, similarity, like=first) for dim in sums}


def _teacher(
    dim: int,
    sums: dict[int, RowSums],
    smoothing: float,
    similarity: Callable[[int, int], float],
    *,
    like: Weighted,
) -> Weighted:
    value, weight = (
        WideSum(torch.zeros_like(sums[dim].value.low)),
        WideSum(torch.zeros_like(sums[dim].weight.low)),
    )
    for other, sent in sums.items():
        beta = similarity(dim, other)
        check_number(f"similarity({dim}, {other})", beta, at_least=0, at_most=1e18)
        value.add_sum(sent.value, beta)
        weight.add_sum(sent.weight, beta)
    evidence = weight.saturated()
    weight.add(torch.full_like(evidence, smoothing))
    return as_entry(value.over(weight), evidence, like=like)
