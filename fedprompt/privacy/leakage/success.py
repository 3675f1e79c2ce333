"""How well an attack tells members from other images, and a lower bound on epsilon."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

import fedprompt._refusals as check
from fedprompt._signatures import short_types

Interval = tuple[float, float]

_Z = 1.959963984540054
"""The 97.5 % quantile of the standard normal distribution."""
_ANY = "be a bool tensor of shape (candidates,) with members and other images"


@short_types
class Success(NamedTuple):
    """Success of an attack, with 95 % intervals. An attack that guesses has an AUC of 0.5.

    Attributes:
        auc: Area under the ROC curve: how often a member has a higher score than another image.
        auc_interval: Newcombe's score interval, with the variance of Hanley and McNeil.
        tpr: Share of members with a score above the threshold, at which at most a share
            `false_positives` of the other images is above it.
        tpr_interval: Interval of Clopper and Pearson, at this threshold.
    """

    auc: float
    auc_interval: Interval
    tpr: float
    tpr_interval: Interval


@short_types
class Leakage(NamedTuple):
    """Success of an attack against both controls, and its scores.

    Attributes:
        held_out: Members against other images, in the run that trained on the members.
        without: Members in this run against the same images in a run without them.
        scores: Score of each candidate in the run that trained on the members.
        inside: Whether a candidate is a member.
        scores_without: Score of each member in the run without them.
    """

    held_out: Success
    without: Success
    scores: Float[Tensor, " candidates"]
    inside: Bool[Tensor, " candidates"]
    scores_without: Float[Tensor, " members"]


def measured(
    scores: Float[Tensor, " candidates"],
    inside: Bool[Tensor, " candidates"],
    without: Float[Tensor, " candidates"],
    *,
    false_positives: float = 0.01,
) -> Leakage:
    """Measure an attack against held-out images, and against a run without the members.

    The first control has other images, which may be harder. The second one has the same images, so
    only what training left behind can tell the two apart.

    Args:
        scores: Score of each candidate in a run that trained on the members. Higher is more likely
            a member.
        inside: Whether a candidate is a member of this run.
        without: Score of each candidate in a run that trained on other images in place of the
            members.
        false_positives: Largest share of false positives, in [0, 1).

    Example:
        >>> inside = torch.tensor([True, True, False, False])
        >>> found = measured(torch.tensor([5.0, 6.0, 1.0, 2.0]), inside, torch.zeros(4))
        >>> found.held_out.auc, found.without.tpr
        (1.0, 1.0)
    """
    both = {"scores": scores, "without": without}
    for name, given in both.items():
        _check_scores(name, given)
    fits = isinstance(inside, Tensor) and inside.dtype == torch.bool and inside.ndim == 1
    check.typed(fits, "inside", _ANY, inside)
    check.require(bool(inside.any()) and not bool(inside.all()), "inside", _ANY, "one kind alone")
    for name, given in both.items():
        check.shape(name, given, inside.shape, "scores of `inside`,")
    scores, without, inside = scores.cpu(), without.cpu(), inside.cpu()
    members, absent, rate = scores[inside], without[inside], {"false_positives": false_positives}
    return Leakage(
        success(members, scores[~inside], **rate),
        success(members, absent, **rate),
        scores,
        inside,
        absent,
    )


def success(
    members: Float[Tensor, " members"],
    others: Float[Tensor, " others"],
    *,
    false_positives: float = 0.01,
) -> Success:
    r"""Measure how well scores tell members from other images.

    The AUC is the statistic of Mann and Whitney, in which ties count half. The bounds of its
    interval are the values A at which the estimate is 1.96 standard errors away,

    .. math:: \mathrm{SE}(A)^2 = \frac{A (1 - A)}{m n} \Big(1 + \big(\tfrac{m + n}2 - 1\big)
        \big(\tfrac{1 - A}{2 - A} + \tfrac{A}{1 + A}\big)\Big)

    so the interval has a width at an AUC of 1, too. Both intervals are over images of one model.
    Training again is another error: repeat the attack with other members.

    Args:
        members: Scores of members, higher for images that the attack takes for members.
        others: Scores of other images. With fewer than ``1 / false_positives`` of them, no false
            positive is allowed.
        false_positives: Largest share of false positives, in [0, 1).

    Example:
        >>> found = success(torch.tensor([0.9, 0.8, 0.4]), torch.tensor([0.1, 0.3, 0.5]))
        >>> round(found.auc, 3), round(found.tpr, 3)
        (0.889, 0.667)
        >>> [round(bound, 2) for bound in found.auc_interval + found.tpr_interval]
        [0.4, 0.99, 0.09, 0.99]

    References:
        Hanley and McNeil, "The Meaning and Use of the Area under a Receiver Operating
        Characteristic (ROC) Curve", Radiology 1982. Newcombe, "Confidence intervals for an effect
        size measure based on the Mann-Whitney statistic. Part 2", Statistics in Medicine 2006.
        Clopper and Pearson, "The Use of Confidence or Fiducial Limits", Biometrika 1934. Carlini
        et al., "Membership Inference Attacks From First Principles", S&P 2022, on low rates.
    """
    _check_scores("members", members)
    _check_scores("others", others)
    check.number("false_positives", false_positives, at_least=0)
    check.require(false_positives < 1, "false_positives", "be below 1", false_positives)
    high, low = members.double().cpu(), others.double().cpu()
    m, n = len(high), len(low)
    below = torch.searchsorted(low.sort().values, high)
    equal = torch.searchsorted(low.sort().values, high, right=True) - below
    auc = float((below + equal.double() / 2).mean() / n)
    threshold = low.sort(descending=True).values[math.floor(false_positives * n)]
    hits = int((high > threshold).sum())

    def variance(a: float) -> float:
        spread = (1 - a) / (2 - a) + a / (1 + a)
        return a * (1 - a) / (m * n) * (1 + ((m + n) / 2 - 1) * spread)

    def apart(a: float) -> bool:
        return (auc - a) ** 2 > _Z**2 * variance(a)

    interval = _edge(apart, 0.0, auc), 1 - _edge(lambda a: apart(1 - a), 0.0, 1 - auc)
    return Success(auc, interval, hits / m, clopper_pearson(hits, m))


def epsilon_bound(
    scores: Float[Tensor, " canaries"],
    inside: Bool[Tensor, " canaries"],
    *,
    delta: float,
    guesses: int | None = None,
    confidence: float = 0.95,
) -> float:
    r"""Bound epsilon of a training run from below, by guessing which canaries it contained.

    Each canary is put into the data with probability 1/2, independently of the others
    (``poisson_batch(m, rate=0.5)``). After one run, the r / 2 canaries with the highest scores are
    guessed to be inside, and the r / 2 with the lowest scores outside. Guesses that ties leave open
    count as wrong. If the run were
    :math:`(\varepsilon, \delta)`-private, v or more of r guesses were right with probability at
    most

    .. math:: P[B \ge v] + 2 m \delta \max_{i \ge 1} \tfrac 1i P[v > B \ge v - i],
        \qquad B \sim \mathrm{Binomial}\big(r, e^\varepsilon / (e^\varepsilon + 1)\big)

    The bound is the largest epsilon at which this is below 1 - `confidence`. A bound above the
    accountant's epsilon shows a mistake. A bound below it shows that this attack found none, which
    is no proof. Use a data set that differs in one canary as the accountant's unit (add or remove).

    Args:
        scores: Score of each canary, higher for canaries that the attack takes to be inside.
        inside: Whether a canary was in the data.
        delta: Delta of the guarantee, in [0, 1).
        guesses: Number r of guesses (even, from 2 to the number of canaries). Fix it before you
            look at scores. If None, all canaries, or one fewer if their number is odd.
        confidence: Probability that the bound holds, above 0 and below 1.

    Returns:
        Lower bound on epsilon, 0 if nothing is shown.

    Example:
        All of a hundred canaries are found.

        >>> inside = torch.arange(100) % 2 == 0
        >>> round(epsilon_bound(inside.double(), inside, delta=0.0), 2)
        3.49
        >>> epsilon_bound((torch.arange(100) % 4).double(), inside, delta=1e-5)
        0.0

    References:
        Steinke, Nasr and Jagielski, "Privacy Auditing with One (1) Training Run", NeurIPS 2023,
        whose beginning and formula (in public code) were read.
    """
    _check_scores("scores", scores)
    m = len(scores)
    check.require(m > 1, "scores", "have at least two canaries", m)
    fits = isinstance(inside, Tensor) and inside.dtype == torch.bool
    check.typed(fits, "inside", "be a bool tensor", inside)
    check.shape("inside", inside, scores.shape, "one entry for each canary,")
    check.number("delta", delta, at_least=0)
    check.require(delta < 1, "delta", "be below 1", delta)
    check.number("confidence", confidence, above=0)
    check.require(confidence < 1, "confidence", "be below 1", confidence)
    r = m - m % 2 if guesses is None else guesses
    check.count("guesses", r, at_least=2, at_most=m, of="the number of canaries")
    check.require(r % 2 == 0, "guesses", "be even", r)
    inside, scores = inside.cpu(), scores.double().cpu()
    first = (~inside).int().argsort(stable=True)  # equal scores are wrong guesses
    order = first[scores[first].argsort(stable=True)]
    right = int(inside[order[m - r // 2 :]].sum() + (~inside[order[: r // 2]]).sum())

    def possible(epsilon: float) -> bool:
        return _chance(right, r, epsilon, delta, m) >= 1 - confidence

    if possible(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while not possible(high):
        low, high = high, 2 * high
    return _edge(lambda each: not possible(each), low, high)


def _chance(right: int, guesses: int, epsilon: float, delta: float, canaries: int) -> float:
    """Bound the probability of so many right guesses in a private run."""
    sums = binomial_sums(guesses, 1 / (1 + math.exp(-epsilon)))
    tail, more = float(sums[right]), 0.0
    if right:  # P[v > B >= v - i] for i from 1 to v
        steps = torch.arange(1, right + 1, dtype=torch.float64, device="cpu")
        more = float(((sums[:right].flip(0) - sums[right]) / steps).max())
    return min(1.0, tail + 2 * canaries * delta * more)


def clopper_pearson(hits: int, count: int) -> Interval:
    """Return the exact 95 % interval of a probability, from `hits` of `count` trials."""

    def rare(p: float) -> bool:  # so many hits, or more
        return float(binomial_sums(count, p)[hits]) < 0.025

    def common(p: float) -> bool:  # so few hits
        return float(binomial_sums(count, 1 - p)[count - hits]) < 0.025

    share = hits / count
    low = _edge(rare, 0.0, share) if hits else 0.0
    high = 1 - _edge(lambda p: common(1 - p), 0.0, 1 - share) if hits < count else 1.0
    return low, high


def binomial_sums(count: int, p: float) -> Float[Tensor, _]:
    """Return P[B >= k] for k from 0 to `count`, of a binomial variable."""
    k = torch.arange(count + 1, dtype=torch.float64, device="cpu")
    whole = torch.tensor(float(count), dtype=torch.float64, device="cpu")
    ways = torch.lgamma(whole + 1) - torch.lgamma(k + 1) - torch.lgamma(whole - k + 1)
    p_log, q_log = (math.log(each) if each > 0 else -math.inf for each in (p, 1 - p))
    powers = torch.where(k > 0, k * p_log, 0 * k) + torch.where(
        k < count, (whole - k) * q_log, 0 * k
    )
    return (ways + powers).exp().flip(0).cumsum(0).flip(0).clamp(max=1.0)


def _edge(holds: Callable[[float], bool], low: float, high: float) -> float:
    """Return the largest number up to which a condition holds, between `low` and `high`."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _check_scores(argument: str, scores: Any) -> None:
    """Require some finite scores."""
    check.number_tensor(argument, scores, "be a floating-point tensor of scores", ndim=1)
    check.some(argument, len(scores), "have at least one score")
    check.finite(argument, scores)
