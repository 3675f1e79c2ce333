"""Krum: of whole payloads, those that have the nearest neighbours."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from fedprompt._checks import (
    check_count,
    check_weights,
    checked_layout,
    known_rows,
    wrong_type,
    wrong_value,
)
from fedprompt.aggregation._mapped import check_payload
from fedprompt.aggregation.means import check_alike, weighted_mean
from fedprompt.interfaces import Payload, Weighted


def krum(payloads: Iterable[Payload], /, *, num_byzantine: int) -> dict[str, Weighted]:
    r"""Choose the one payload that lies closest to its neighbours.

    .. math:: k^* = \arg\min_k \sum_{j \in N_k} \lVert v_k - v_j \rVert^2

    :math:`N_k` are the n - `num_byzantine` - 2 payloads nearest to k, over all names together; of equals the first is taken. Payloads
    count by heads, not by weights, which are claims. Two payloads that do not know the same rows cannot be compared and are
    infinitely far apart, and so is one with NaN or infinity in a row that it claims to know: where clients know different rows, use
    :func:`trimmed_mean` or :func:`weighted_median`. Distances are over all coordinates: a liar who sends the others' mean with one
    coordinate moved by less than they scatter is the closest of all, and chosen. Those two bound each coordinate.

    Args:
        payloads: At least 2 `num_byzantine` + 3, with the same names, shapes, dtypes and device.
        num_byzantine: How many of them may be malicious, at least 0.

    Returns:
        A copy of the chosen payload, its weights included.

    Raises:
        TypeError: If `payloads` are entries: Krum compares whole payloads.
        ValueError: If there are too few payloads, layouts differ, a weight is negative or not finite, or no payload has enough
            neighbours that know the same rows.

    Example:
        >>> sent = [{"head": Weighted(torch.tensor([value]), torch.tensor(1.0))} for value in (1.0, 1.1, 1.3, 1e6, 0.9)]
        >>> krum(sent, num_byzantine=1)["head"].value
        tensor([1.])

    References:
        Blanchard et al., "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent", NeurIPS 2017.
    """
    held = _held(payloads, num_byzantine)
    best = held[_ranking(held, num_byzantine)[0]]
    return {
        name: Weighted(upload.value.clone(), upload.weight.clone()) for name, upload in best.items()
    }


def multi_krum(
    payloads: Iterable[Payload], /, *, num_byzantine: int, num_selected: int
) -> dict[str, Weighted]:
    """Average the payloads that lie closest to their neighbours.

    The `num_selected` payloads with the lowest score of :func:`krum`, averaged by :func:`weighted_mean`: one of them with a huge weight
    would be all of the mean, so cap the weights before (:func:`cap_weight`).

    Args:
        payloads: As for :func:`krum`.
        num_byzantine: How many of them may be malicious, at least 0.
        num_selected: How many to average, from 1 to the number of payloads less `num_byzantine`.

    Returns:
        Their weighted mean, name by name.

    Raises:
        TypeError: If `payloads` are entries.
        ValueError: As :func:`krum`; or if `num_selected` is out of range, or fewer have enough neighbours that know the same rows.

    Example:
        >>> sent = [{"head": Weighted(torch.tensor([value]), torch.tensor(1.0))} for value in (1.0, 1.1, 1.3, 1e6, 0.9)]
        >>> multi_krum(sent, num_byzantine=1, num_selected=3)["head"].value
        tensor([1.])

    References:
        Blanchard et al., "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent", NeurIPS 2017.
    """
    held = _held(payloads, num_byzantine)
    check_count("num_selected", num_selected)
    if num_selected > len(held) - num_byzantine:
        raise wrong_value(
            "num_selected",
            f"be at most the {len(held) - num_byzantine} payloads of others",
            num_selected,
        )
    ranking = _ranking(held, num_byzantine)
    if num_selected > len(ranking):
        raise wrong_value(
            "num_selected",
            f"be at most the {len(ranking)} payloads that have enough neighbours with the same rows",
            num_selected,
        )
    return weighted_mean([held[position] for position in sorted(ranking[:num_selected])])


def _held(payloads: Iterable[Payload], num_byzantine: int) -> list[Payload]:
    check_count("num_byzantine", num_byzantine, at_least=0)
    if isinstance(payloads, Weighted | Mapping):
        raise wrong_type("payloads", "be an iterable of payloads", f"one {type(payloads).__name__}")
    held: list[Payload] = []
    for position, payload in enumerate(payloads):
        check_payload(
            f"payloads[{position}]", payload, reason=", since distances are over all names"
        )
        names = set(held[0]) if held else set(payload)
        if not names or set(payload) != names:
            raise wrong_value(
                f"payloads[{position}]",
                f"have the names {sorted(names) or 'of a model'}",
                sorted(payload),
            )
        for name, upload in payload.items():
            argument = f"payloads[{position}][{name!r}]"
            check_alike(
                argument, upload, held[0][name] if held else checked_layout(argument, upload)
            )
            check_weights(argument, upload)
        held.append(payload)
    if len(held) < 2 * num_byzantine + 3:
        raise wrong_value(
            "payloads",
            f"be at least {2 * num_byzantine + 3} where {num_byzantine} may be malicious",
            len(held),
        )
    return held


def _ranking(payloads: list[Payload], num_byzantine: int) -> list[int]:
    """Positions by ascending score, without those whose score is infinite."""
    names = list(payloads[0])
    values = torch.stack(
        [
            torch.cat([known_rows(payload[name]).flatten().double() for name in names])
            for payload in payloads
        ]
    )
    known = torch.stack(
        [torch.cat([payload[name].weight.flatten() > 0 for name in names]) for payload in payloads]
    )
    sound = values.isfinite().all(1)
    compared = torch.stack([(known == own).all(1) for own in known]) & sound[:, None] & sound
    scores = _scores(values, compared, num_byzantine)
    far = [0.0] * len(payloads)
    if (
        max(scores) == torch.inf
    ):  # a square may have overflowed: those are compared once more, in units of 2**600
        far = [
            there if here == torch.inf else 0.0
            for here, there in zip(
                scores, _scores(values * 2.0**-600, compared, num_byzantine), strict=True
            )
        ]
    ranking = sorted(
        (k for k in range(len(payloads)) if far[k] < torch.inf), key=lambda k: (scores[k], far[k])
    )
    if not ranking:
        raise wrong_value(
            "payloads", "leave one that has enough neighbours with the same known rows", "none"
        )
    return ranking


def _scores(values: Tensor, compared: Tensor, num_byzantine: int) -> list[float]:
    """Sum of the squared distances to the nearest neighbours of each payload."""
    distance = torch.cdist(values, values, compute_mode="donot_use_mm_for_euclid_dist").square()
    distance = torch.where(compared, distance, torch.inf).fill_diagonal_(
        torch.inf
    )  # no payload is its own neighbour
    return distance.sort(1).values[:, : len(values) - num_byzantine - 2].sum(1).tolist()
