"""Order statistics with repeated values instead of weights, and Krum by two loops.

Nothing is imported from the library.
"""

import numpy as np
from scipy.stats import trim_mean


def repeated(values, counts):
    """Repeat each value of one coordinate as often as its integer weight."""
    return [value for value, count in zip(values, counts, strict=True) for _ in range(count)]


def median(values, counts):
    return float(np.median(repeated(values, counts)))


def trimmed(values, counts, fraction):
    """Return SciPy's trimmed mean of the repeated values.

    `fraction` of the total count must be a whole number.
    """
    assert round(fraction * sum(counts), 9) == round(fraction * sum(counts))
    return float(trim_mean(repeated(values, counts), fraction + 1e-9))


def krum_scores(vectors, num_byzantine):
    scores = []
    for own, vector in enumerate(vectors):
        distances = [
            sum((a - b) ** 2 for a, b in zip(vector, other, strict=True))
            for at, other in enumerate(vectors)
            if at != own
        ]
        scores.append(sum(sorted(distances)[: len(vectors) - num_byzantine - 2]))
    return scores
