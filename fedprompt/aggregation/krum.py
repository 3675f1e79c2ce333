"""Krum and Multi-Krum: select the payloads with the nearest neighbors."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

import fedprompt._refusals as check
from fedprompt.aggregation._vectors import alike, vectors
from fedprompt.aggregation.means import weighted_mean
from fedprompt.interfaces import Payload, Weighted


def krum(payloads: Iterable[Payload], /, *, num_byzantine: int) -> dict[str, Weighted]:
    r"""Select the payload that is closest to its neighbors.

    .. math:: k^* = \arg\min_k \sum_{j \in N_k} \lVert v_k - v_j \rVert^2

    Here n is the number of payloads, and :math:`N_k` are the n - `num_byzantine` - 2 payloads
    nearest to k. Distances are over all names together. Self-reported weights are ignored. If
    several scores are equal, the first payload is selected.

    The distance is infinite if two payloads know different rows, or if a known row contains NaN or
    infinity. If clients know different rows, use :func:`trimmed_mean` or :func:`weighted_median`.

    Krum does not bound single coordinates: it can select a malicious client that sends the mean of
    the others with one changed coordinate. :func:`trimmed_mean` and :func:`weighted_median` bound
    each coordinate.

    Args:
        payloads: Payloads with the same names, shapes, dtypes and device (at least 2
            `num_byzantine` + 3).
        num_byzantine: Largest number of malicious payloads (at least 0).

    Returns:
        A copy of the selected payload, with its weights.

    Raises:
        TypeError: If `payloads` are entries, because Krum compares whole payloads.
        ValueError: If there are too few payloads, layouts differ, a weight is negative or not
            finite, or no payload has enough neighbors with the same known rows.

    Example:
        >>> one = torch.tensor(1.0)
        >>> values = (1.0, 1.1, 1.3, 1e6, 0.9)
        >>> payloads = [{"head": Weighted(value * one, one)} for value in values]
        >>> krum(payloads, num_byzantine=1)["head"].value
        tensor(1.)

    References:
        Blanchard et al., "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent",
        NeurIPS 2017.
    """
    listed = _listed(payloads, num_byzantine)
    best = listed[_ranking(listed, num_byzantine)[0]]
    return {name: Weighted(*(tensor.clone() for tensor in entry)) for name, entry in best.items()}


def multi_krum(
    payloads: Iterable[Payload], /, *, num_byzantine: int, num_selected: int
) -> dict[str, Weighted]:
    """Average the payloads that are closest to their neighbors.

    The `num_selected` payloads with the lowest scores of :func:`krum` are averaged by
    :func:`weighted_mean`. A huge weight of one of them would dominate the mean, so cap weights
    first (:func:`cap_weight`).

    Args:
        payloads: Payloads with the same names, shapes, dtypes and device (at least 2
            `num_byzantine` + 3).
        num_byzantine: Largest number of malicious payloads (at least 0).
        num_selected: Number of payloads to average (at least 1, at most the number of payloads
            minus `num_byzantine`).

    Returns:
        Weighted mean of the selected payloads.

    Raises:
        TypeError: If `payloads` are entries, because Krum compares whole payloads.
        ValueError: As for :func:`krum`, or if fewer than `num_selected` payloads have enough
            neighbors with the same known rows.

    Example:
        >>> one = torch.tensor(1.0)
        >>> values = (1.0, 1.1, 1.3, 1e6, 0.9)
        >>> payloads = [{"head": Weighted(value * one, one)} for value in values]
        >>> multi_krum(payloads, num_byzantine=1, num_selected=3)["head"].value
        tensor(1.)

    References:
        Blanchard et al., "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent",
        NeurIPS 2017.
    """
    listed = _listed(payloads, num_byzantine)
    honest = len(listed) - num_byzantine
    check.count("num_selected", num_selected, at_most=honest, of="the number of honest payloads")
    ranking = _ranking(listed, num_byzantine)
    enough = "the number of payloads that have enough neighbors with the same known rows"
    check.count("num_selected", num_selected, at_most=len(ranking), of=enough)
    return weighted_mean([listed[position] for position in sorted(ranking[:num_selected])])


def _listed(payloads: Iterable[Payload], num_byzantine: int) -> list[Payload]:
    """List the payloads after checking their number and layout."""
    check.count("num_byzantine", num_byzantine, at_least=0)
    listed = alike(payloads)
    rule = f"be at least {2 * num_byzantine + 3} if {num_byzantine} may be malicious"
    check.require(len(listed) >= 2 * num_byzantine + 3, "payloads", rule, len(listed))
    return listed


def _ranking(payloads: list[Payload], num_byzantine: int) -> list[int]:
    """List positions by ascending score, without payloads of infinite score."""
    values, compared = vectors(payloads)
    scores = _scores(values, compared, num_byzantine)
    if max(scores) < torch.inf:
        return sorted(range(len(scores)), key=scores.__getitem__)
    # A square may have overflowed, so infinite scores are compared again in units of 2**600.
    scaled = _scores(values * 2.0**-600, compared, num_byzantine)
    ranking = sorted(
        (k for k in range(len(scores)) if min(scores[k], scaled[k]) < torch.inf),
        key=lambda k: (scores[k], scaled[k] if scores[k] == torch.inf else 0.0),
    )
    rule = "include one with enough neighbors that have the same known rows"
    check.some("payloads", ranking, rule)
    return ranking


def _scores(values: Tensor, compared: Tensor, num_byzantine: int) -> list[float]:
    """Sum the squared distances of each payload to its nearest neighbors."""
    distance = torch.cdist(values, values, compute_mode="donot_use_mm_for_euclid_dist").square()
    distance = torch.where(compared, distance, torch.inf)
    distance.fill_diagonal_(torch.inf)  # a payload is not its own neighbor
    return distance.sort(1).values[:, : len(values) - num_byzantine - 2].sum(1).tolist()
