"""SGPT, Eqs. 5-7 and the additions of its code, as slow and simple loops in float64.

Deng et al., "Unlocking the Potential of Prompt-Tuning in Bridging Generalized and Personalized
Federated Learning", CVPR 2024.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fedprompt.interfaces import Selection

Row = list[float]


class Upload(NamedTuple):
    """Upload of one client, with its selection counts and its number of samples."""

    keys: list[Row]
    prompts: list[Row]
    head: Row
    counts: list[float]
    num_examples: float


def cosine(one: Row, other: Row) -> float:
    return (
        sum(a * b for a, b in zip(one, other, strict=True)) / math.hypot(*one) / math.hypot(*other)
    )


def choices(query: list[Row], keys: list[Row], usage: Row | None, *, offset: float) -> list[int]:
    """Return the group of each query: Eq. 5, or Eq. 6 with the offset of the authors' code."""
    total = sum(usage or [])
    chosen = []
    for own in query:
        costs = [1 - cosine(own, key) for key in keys]
        if total:
            costs = [
                cost * (count / total + offset) for cost, count in zip(costs, usage, strict=True)
            ]
        chosen.append(costs.index(min(costs)))
    return chosen


def literal_keys(query: Tensor, keys: Tensor, *, usage: Tensor | None = None) -> Selection:
    """Select as Eq. 6 is printed: the argmax of (cos - 1) q. KNOWN WRONG.

    An unused group has the score 0. This is the maximum, independent of its cosine.
    """
    similarity = torch.nn.functional.normalize(query) @ torch.nn.functional.normalize(keys).T
    weights = torch.ones(len(keys)) if usage is None else usage / usage.sum().clamp(min=1)
    indices = ((similarity - 1) * weights).argmax(1)
    return Selection(indices, similarity.gather(1, indices[:, None])[:, 0].detach())


def server(
    previous: Upload, uploads: list[Upload], *, decay: float
) -> tuple[list[Row], list[Row], Row]:
    """Update the server's keys, prompts and head (Alg. 2).

    Keys are averaged by selection counts, prompts by data size, both with the momentum of Eq. 7.
    The head is averaged by data size, without momentum.
    """

    def mean(rows: list[Row], weights: Row) -> Row:
        return [
            sum(weight * entry for weight, entry in zip(weights, column, strict=True))
            / sum(weights)
            for column in zip(*rows, strict=True)
        ]

    def smooth(before: Row, now: Row) -> Row:
        return [decay * old + (1 - decay) * new for old, new in zip(before, now, strict=True)]

    sizes = [upload.num_examples for upload in uploads]
    keys, prompts = [], []
    for group in range(len(previous.keys)):
        counts = [upload.counts[group] for upload in uploads]
        known = sum(counts) > 0  # the paper divides by 0 here
        keys.append(
            smooth(previous.keys[group], mean([upload.keys[group] for upload in uploads], counts))
            if known
            else previous.keys[group]
        )
        prompts.append(
            smooth(
                previous.prompts[group], mean([upload.prompts[group] for upload in uploads], sizes)
            )
        )
    return keys, prompts, mean([upload.head for upload in uploads], sizes)
