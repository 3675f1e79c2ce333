"""Answers for each client: mixtures of payloads, and distances between payloads."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

import fedprompt._nouns as nouns
import fedprompt._refusals as check
from fedprompt.aggregation._sums import RowSums
from fedprompt.aggregation._vectors import alike, vectors
from fedprompt.interfaces import Payload, Weighted

_LARGEST_FACTOR = 1e18


def mixtures(
    payloads: Iterable[Payload], weights: Float[Tensor, "answers clients"]
) -> list[dict[str, Weighted]]:
    r"""Average payloads once for each answer, with other weights of the clients each time.

    .. math:: \bar v_{a,r} = \sum_k A_{a,k} w_{k,r} v_{k,r} \,\big/\, \sum_k A_{a,k} w_{k,r}

    Each answer is :func:`weighted_mean` with all weights of client k multiplied by :math:`A_{a,k}`.
    A row of `weights` with ones is the plain mean, and a row of the identity is one client. If
    `weights` alone shall count, collect with equal weights. Payloads are streamed.

    Args:
        payloads: Payloads, one for each client. If a client does not send a name, it has weight 0
            for that name.
        weights: Weight :math:`A_{a,k}` of each client in each answer (from 0 to 1e18), such as the
            attention of FedAMP. They receive no gradient.

    Returns:
        A payload for each row of `weights`. Rows of total weight 0 have value 0, so
        :func:`load_values` keeps them on the client.

    Raises:
        ValueError: If `weights` has another shape or a number out of range, or
            :func:`weighted_mean` would refuse a payload.

    Example:
        >>> def payload(value):
        ...     return {"head": Weighted(torch.tensor([value]), torch.tensor(10.0))}
        >>> weights = torch.tensor([[0.5, 0.5], [0.0, 1.0]])
        >>> answers = mixtures([payload(1.0), payload(3.0)], weights)
        >>> [answer["head"].value.item() for answer in answers]
        [2.0, 3.0]

    References:
        Huang et al., "Personalized Cross-Silo Federated Learning on Non-IID Data" (FedAMP), AAAI
        2021.
    """
    rows = _weight_rows(weights)
    check.iterable("payloads", payloads, "payloads")
    clients = weights.shape[1]
    sums: list[dict[str, RowSums]] = [{} for _ in rows]
    count = 0
    for count, payload in enumerate(payloads, 1):
        if count > clients:
            break
        for name, sent in _sums(f"payloads[{count - 1}]", payload, sums).items():
            for answer, row in zip(sums, rows, strict=True):
                if name not in answer:
                    answer[name] = RowSums(sent.like)
                if row[count - 1] > 0:
                    answer[name].add_sums(sent, row[count - 1])
    rule = f"have one payload for each of the {clients} columns of `weights`"
    check.require(count == clients, "payloads", rule, "more" if count > clients else count)
    return [{name: total.result() for name, total in answer.items()} for answer in sums]


def distances(payloads: Iterable[Payload]) -> Float[Tensor, "clients clients"]:
    r"""Compute the Euclidean distances between payloads, as vectors over all names.

    .. math:: D_{jk} = \lVert v_j - v_k \rVert_2

    Weights are not used. The distance of two payloads with different known rows is infinite, so
    ``softmax(-distances)`` gives such a pair no attention.

    Args:
        payloads: Payloads with the same names, shapes, dtypes and device (at least one).

    Returns:
        Symmetric matrix with zeros on its diagonal. It has the dtype of the values, float32 at
        least. Distances of payloads that can be compared are finite.

    Raises:
        ValueError: If `payloads` is empty, layouts differ, a weight is negative or not finite, or
            a row of positive weight contains NaN or infinity.

    Example:
        >>> one = torch.tensor(1.0)
        >>> payloads = [{"a": Weighted(x * one, one), "b": Weighted(y * one, one)}
        ...             for x, y in ((0.0, 0.0), (3.0, 4.0))]
        >>> distances(payloads)
        tensor([[0., 5.],
                [5., 0.]])
    """
    listed = alike(payloads)
    check.some("payloads", listed, "hold at least one payload")
    for position, payload in enumerate(listed):
        for name, entry in payload.items():
            nouns.entry(f"payloads[{position}][{name!r}]", entry)
    first = [entry.value for entry in listed[0].values()]
    dtype = reduce(torch.promote_types, (value.dtype for value in first), torch.float32)
    values, compared = vectors(listed)
    halves = values / 2  # a difference of halves does not overflow
    wide = torch.stack([_lengths(halves - half) for half in halves])
    near = (2 * wide).clamp(max=torch.finfo(dtype).max)
    return torch.where(compared, near, torch.inf).to(dtype).to(first[0].device)


def _weight_rows(weights: Any) -> list[list[float]]:
    """Return weights (answers, clients) as numbers, after checking their form and range."""
    rule = "be floating-point of shape (answers, clients)"
    check.number_tensor("weights", weights, rule)
    rule = "have shape (answers, clients), at least one client"
    check.require(weights.ndim == 2 and weights.shape[1] != 0, "weights", rule, weights)
    check.finite("weights", weights)
    rows: list[list[float]] = weights.detach().tolist()
    extremes = (extreme for row in rows for extreme in (min(row), max(row)))
    outside = [number for number in extremes if not 0 <= number <= _LARGEST_FACTOR]
    check.nothing(outside, "weights", f"lie in [0, {_LARGEST_FACTOR:g}]")
    return rows


def _sums(argument: str, payload: Payload, sums: list[dict[str, RowSums]]) -> dict[str, RowSums]:
    """Return the sums of one payload, whose entries have the layout of those before."""
    check.names(argument, payload, "map names to Weighted")
    made = {}
    for name, entry in payload.items():
        place = f"{argument}[{name!r}]"
        seen = sums[0].get(name) if sums else None
        made[name] = RowSums(nouns.layout(place, entry) if seen is None else seen.like)
        made[name].add(place, entry)
    return made


def _lengths(rows: Tensor) -> Tensor:
    """Return the Euclidean norm of each row. No square overflows or underflows."""
    if rows.shape[1] == 0:
        return rows.new_zeros(rows.shape[0])
    largest = rows.abs().amax(1, keepdim=True)
    unit = rows / torch.where(largest > 0, largest, 1.0)
    lengths: Tensor = largest[:, 0] * torch.linalg.vector_norm(unit, dim=1)
    return lengths
