"""Mean of the products of low-rank factors, as on the server of FedEx-LoRA."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

import fedprompt._nouns as nouns
import fedprompt._refusals as check
from fedprompt._conversions import widened
from fedprompt.aggregation.means import weighted_mean
from fedprompt.interfaces import Payload, Weighted
from fedprompt.interfaces.nouns import per_row

_Pairs = Mapping[str, tuple[str, str]]


def low_rank_mean(
    payloads: Iterable[Payload], pairs: Mapping[str, tuple[str, str]], *, rank: int | None = None
) -> dict[str, Weighted]:
    r"""Average payloads, and add what the means of low-rank factors miss of their mean product.

    .. math:: R = \sum_k w_k B_k A_k \Big/ \sum_k w_k - \bar B \bar A

    LoRA changes a frozen weight by a product :math:`B A`, and the product of the means is not the
    mean of the products. The result has the means :math:`\bar B, \bar A` of :func:`weighted_mean`,
    and the residual R as a further entry. Add R to the frozen weight, so that clients begin the
    next round with the mean of their products. If your LoRA scales its product, multiply R by the
    same number (1 for :func:`fedprompt.tuning.lora`).

    Payloads are streamed, and products are computed in float64. Edge servers cannot average first,
    because the mean of residuals is not the residual.

    Args:
        payloads: Payloads of clients (at least one).
        pairs: Names of the factors B (rows, rank) and A (rank, columns), by the name of the
            residual in the result, such as the name of the frozen weight. Clients do not send this
            name.
        rank: Rank of the residual (at least 1), by a truncated singular value decomposition. If
            None, the residual is exact.

    Returns:
        Mean of each name, and the residual (rows, columns) of each pair in the dtypes of B. A row
        of the product has the weight of the row of B, or weight 0 if a row of A is unknown. In rows
        of total weight 0 the residual is 0.

    Raises:
        ValueError: If no payload has both factors of a pair, a payload has the name of a residual,
            the shapes of two factors do not fit, a weight of B has more than one axis, a residual
            is beyond the dtype of B, or :func:`weighted_mean` would refuse a payload.

    Example:
        Of two clients, each changes another row. The product of the means is a quarter everywhere.

        >>> def payload(row):
        ...     one = torch.tensor(1.0)
        ...     return {"B": Weighted(row[:, None], one), "A": Weighted(row[None], one)}
        >>> mean = low_rank_mean([payload(row) for row in torch.eye(2)], {"W": ("B", "A")})
        >>> mean["W"].value
        tensor([[ 0.2500, -0.2500],
                [-0.2500,  0.2500]])
        >>> mean["B"].value @ mean["A"].value + mean["W"].value
        tensor([[0.5000, 0.0000],
                [0.0000, 0.5000]])

    References:
        Singhal et al., "FedEx-LoRA: Exact Aggregation for Federated and Efficient Fine-Tuning of
        Large Language Models", ACL 2025, Eq. 12-18.
    """
    check.names("pairs", pairs, "map names to pairs of names")
    check.some("pairs", pairs, "hold at least one pair of names")
    for name, pair in pairs.items():
        check.pair(f"pairs[{name!r}]", pair, "be the names of two factors")
        check.texts(f"pairs[{name!r}]", pair)
    check.optional(check.count, "rank", rank)
    check.iterable("payloads", payloads, "payloads")
    means = weighted_mean(_with_products(payloads, pairs))
    if missing := sorted(pairs.keys() - means.keys()):
        rule = "name two factors that a payload has"
        raise check.wrong(f"pairs[{missing[0]!r}]", rule, pairs[missing[0]])
    for name, factors in pairs.items():
        left, right = (means[factor] for factor in factors)
        means[name] = _residual(means[name], left, right, rank)
        rule = f"have a residual within {left.value.dtype}, the dtype of its first factor"
        fits = means[name].value.isfinite().all()
        check.require(fits, f"pairs[{name!r}]", rule, means[name].value)
    return means


def _with_products(payloads: Iterable[Payload], pairs: _Pairs) -> Iterator[Payload]:
    """Add the products of a payload's pairs under their names, in float64."""
    position = -1
    for position, payload in enumerate(payloads):
        argument = f"payloads[{position}]"
        check.names(argument, payload, "map names to Weighted")
        if doubled := sorted(pairs.keys() & payload.keys()):
            raise check.wrong("pairs", "name residuals, which clients do not send", doubled)
        complete = {name: pair for name, pair in pairs.items() if set(pair) <= payload.keys()}
        products = {name: _product(argument, payload, *pair) for name, pair in complete.items()}
        yield {**payload, **products}
    check.some("payloads", position >= 0, "hold at least one payload")


def _product(argument: str, payload: Payload, left: str, right: str) -> Weighted:
    """Multiply two factors. A row is known if its row of the left one and all of A are known."""
    b, a = (nouns.layout(f"{argument}[{name!r}]", payload[name]) for name in (left, right))
    if b.value.ndim != 2 or a.value.ndim != 2 or b.value.shape[1] != a.value.shape[0]:
        rule = f"have shape (rows, rank) to match {right!r} of (rank, columns)"
        got = f"{tuple(b.value.shape)} and {tuple(a.value.shape)}"
        raise check.wrong(f"{argument}[{left!r}]", rule, got)
    rule = "have one axis at most, for rows of the product"
    check.require(b.weight.ndim <= 1, f"{argument}[{left!r}].weight", rule, b.weight)
    weight = torch.where((a.weight > 0).all(), b.weight, 0.0)
    value = widened(b.known) @ widened(a.known)
    return Weighted(value, weight.to(value.device))


def _residual(product: Weighted, b: Weighted, a: Weighted, rank: int | None) -> Weighted:
    """Subtract the product of the means, as they were rounded, in rows with a product."""
    value = product.value - widened(b.value) @ widened(a.value)
    value = torch.where(per_row(product.weight > 0, value), value, 0.0)
    if rank is not None:
        left, sizes, right = torch.linalg.svd(value, full_matrices=False)
        value = (left[:, :rank] * sizes[:rank]) @ right[:rank]
    return Weighted(value.to(b.value), product.weight.to(b.weight.device))
