"""DP-SGD by explicit loops.

Gradients are computed sample by sample with the plain model, and clipped number by number. Privacy
is computed by numerical integration.
"""

import math

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.stats import norm


def looped(model, loss, *batch):
    """Return each sample's gradient of `loss(model, *sample)`, one backward pass a sample."""
    parameters = {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    rows = []
    for index in range(len(batch[0])):
        own = loss(model, *(each[index : index + 1] for each in batch))
        rows.append(torch.autograd.grad(own, list(parameters.values())))
    return {
        name: torch.stack([row[position] for row in rows])
        for position, name in enumerate(parameters)
    }


def clipped_and_added(gradients, max_norm):
    """Return the sum of the clipped gradients, in Python floats."""
    batch = len(next(iter(gradients.values())))
    flat = [
        [gradient[index].double().flatten().tolist() for gradient in gradients.values()]
        for index in range(batch)
    ]
    lengths = [
        math.sqrt(math.fsum(number**2 for part in sample for number in part)) for sample in flat
    ]
    shares = [min(1.0, max_norm / length) if length else 1.0 for length in lengths]
    sums = {}
    for position, (name, gradient) in enumerate(gradients.items()):
        columns = zip(*(sample[position] for sample in flat), strict=True)
        numbers = [
            math.fsum(share * number for share, number in zip(shares, column, strict=True))
            for column in columns
        ]
        sums[name] = torch.tensor(numbers, dtype=torch.float64).reshape(gradient.shape[1:])
    return sums


def gaussian_delta(epsilon, sigma):
    """Return the smallest delta of a Gaussian mechanism of sensitivity 1, in closed form.

    Balle and Wang, "Improving the Gaussian Mechanism for Differential Privacy", ICML 2018,
    Theorem 8.
    """
    return norm.cdf(1 / (2 * sigma) - epsilon * sigma) - math.exp(epsilon) * norm.cdf(
        -1 / (2 * sigma) - epsilon * sigma
    )


def sampled_delta(epsilon, sigma, rate):
    """Return the smallest delta of one step that samples each record with probability `rate`.

    This is the larger one of the two hockey-stick divergences, by numerical integration.
    """
    x = np.linspace(-12 * sigma, 1 + 12 * sigma, 100_001)
    plain = norm.pdf(x, 0, sigma)
    mixture = (1 - rate) * plain + rate * norm.pdf(x, 1, sigma)
    pairs = ((mixture, plain), (plain, mixture))
    return max(
        np.trapezoid(np.maximum(0.0, first - math.exp(epsilon) * second), x)
        for first, second in pairs
    )


def epsilon_at(delta, curve):
    """Return the epsilon at which the decreasing function `curve` has the value `delta`."""
    return brentq(lambda epsilon: curve(epsilon) - delta, 0.0, 50.0, xtol=1e-9)
