"""Server optimizers of Reddi et al. (ICLR 2021), Algorithm 2, number by number in Python floats.

The moments start at 0 and tau**2, the smallest value that the algorithm allows. FedAvgM is the
server momentum of Hsu et al. (2019).
"""

import math
from collections.abc import Sequence


def sign(number: float) -> int:
    return (number > 0) - (number < 0)


def adaptive(
    start: float,
    means: Sequence[float | None],
    *,
    yogi: bool,
    learning_rate: float,
    betas: tuple[float, float],
    tau: float,
) -> list[tuple[float, float, float]]:
    """Return value, first and second moment after each round; None is a round without evidence."""
    x, m, v = start, 0.0, tau**2
    steps = []
    for mean in means:
        if mean is not None:
            change = mean - x
            m = betas[0] * m + (1 - betas[0]) * change
            if yogi:
                v = v - (1 - betas[1]) * change**2 * sign(v - change**2)
            else:
                v = betas[1] * v + (1 - betas[1]) * change**2
            x = x + learning_rate * m / (math.sqrt(v) + tau)
        steps.append((x, m, v))
    return steps


def momentum(
    start: float, means: Sequence[float | None], *, learning_rate: float, momentum: float
) -> list[tuple[float, float]]:
    """Return value and momentum after each round."""
    x, m = start, 0.0
    steps = []
    for mean in means:
        if mean is not None:
            m = momentum * m + (mean - x)
            x = x + learning_rate * m
        steps.append((x, m))
    return steps
