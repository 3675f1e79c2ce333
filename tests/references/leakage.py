"""Statistics of attacks by loops, SciPy and dense matrices."""

import math

import numpy as np
from scipy import optimize, stats


def auc(members, others):
    """Count pairs, of which ties are a half."""
    pairs = [(a > b) + (a == b) / 2 for a in members for b in others]
    return math.fsum(pairs) / len(pairs)


def auc_interval(estimate, m, n):
    """Solve (estimate - A)^2 = z^2 V(A) with Q1 and Q2 of Hanley and McNeil, and equal counts."""
    z, count = stats.norm.ppf(0.975), (m + n) / 2

    def excess(a):
        q1, q2 = a / (2 - a), 2 * a**2 / (1 + a)
        v = a * (1 - a) + (count - 1) * (q1 - a**2) + (count - 1) * (q2 - a**2)
        return (estimate - a) ** 2 - z**2 * v / (m * n)

    tiny = 1e-12
    low = optimize.brentq(excess, tiny, min(estimate, 1 - 1e-9)) if estimate > 0 else 0.0
    high = optimize.brentq(excess, max(estimate, 1e-9), 1 - tiny) if estimate < 1 else 1.0
    return low, high


def true_positives(members, others, rate):
    """Try each threshold, and return the largest share of members above one that is allowed."""
    fits = [t for t in [*others, *members, -math.inf] if np.mean([o > t for o in others]) <= rate]
    return max(np.mean([a > t for a in members]) for t in fits)


def p_value(m, r, v, epsilon, delta):
    """Steinke, Nasr and Jagielski (2023), Appendix D, as their listing has it."""
    q = 1 / (1 + math.exp(-epsilon))
    beta, alpha, total = stats.binom.sf(v - 1, r, q), 0.0, 0.0
    for i in range(1, v + 1):
        total += stats.binom.pmf(v - i, r, q)
        alpha = max(alpha, total / i)
    return min(beta + alpha * delta * 2 * m, 1)


def matched_filter(candidate, seen, population):
    """Score a message with the inverse of a dense covariance matrix."""
    mean = population.mean(0)
    apart = population - mean
    share = 0.01 * np.mean((apart**2).sum(1))
    inverse = np.linalg.inv(apart.T @ apart + share * np.eye(len(mean)))
    scale = (mean @ inverse @ seen) / (mean @ inverse @ mean)
    own, moved = candidate - mean, seen - scale * mean
    return own @ inverse @ moved / math.sqrt((own @ inverse @ own) * (moved @ inverse @ moved))
