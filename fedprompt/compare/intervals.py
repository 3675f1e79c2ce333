r"""Means over seeds with the errors of both seeds and test images, and tests of paired differences.

A figure of a seed is a weighted mean over test images. Another seed gives another value, and so do
other test images. If all seeds have the same test images, their values do not show the error of
these images. So each image has its contribution to the figure of each seed,

.. math:: x_{si} = N w_{si} (d_{si} - D_s) + D_s, \qquad D_s = \textstyle\sum_i w_{si} d_{si},

and the variance of the mean is the variance of two crossed factors, seeds and images.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Integer, Shaped
from scipy import special  # of scipy, `stats` takes seconds to import

from fedprompt.metrics import balanced_weights

ROUNDING = 1e-9
"""Smallest difference of two accuracies that is not 0."""

Numbers = Float[np.ndarray, "..."] | np.float64
Table = Shaped[np.ndarray, "*batch clients images"]


@dataclass(frozen=True, eq=False)
class Figure:
    """A figure of each seed, and the contributions of test images to it.

    Differences are paired: ``method - reference`` has the values and the parts of each seed
    subtracted. Leading axes are a batch of figures.

    Args:
        values: Figure D of each seed.
        parts: For each seed and image ``w (d - D)``, which is 0 where a seed does not test the
            image. All figures of a difference have the same order of images. If None, intervals
            are over seeds alone.

    Example:
        >>> right = np.array([[1, 1, 0, 1], [0, 0, 1, 1]])
        >>> own = np.array([[1, 1, 0, 0], [0, 0, 1, 1]])
        >>> Figure.of([(right, own), (right[:, ::-1], own)]).values
        array([1.  , 0.25])
    """

    values: Float[np.ndarray, "*batch seeds"]
    parts: Float[np.ndarray, "*batch seeds images"] | None = None

    @classmethod
    def of(
        cls, seeds: Iterable[tuple[Any, Any]], labels: Integer[np.ndarray, " images"] | None = None
    ) -> "Figure":
        """Make a figure from the arguments `right` and `weights` of :func:`contributions`."""
        found = [contributions(*seed, labels) for seed in seeds]
        values, parts = zip(*found, strict=True)
        return cls(np.stack(values), np.stack(parts))

    def at(self, seeds: Sequence[int]) -> "Figure":
        """Return the figure of some seeds, by their positions."""
        parts = None if self.parts is None else self.parts[..., seeds, :]
        return Figure(self.values[..., seeds], parts)

    def __sub__(self, other: "Figure") -> "Figure":
        parts = None
        if self.parts is not None and other.parts is not None:
            parts = self.parts - other.parts
        return Figure(self.values - other.values, parts)

    def interval(self) -> "Interval":
        """Return the mean with its 95 % interval, see :func:`interval`."""
        return interval(self)

    def percent(self, *, signed: bool = False) -> str:
        """Write the mean in percent, with its 95 % interval if there are three values or more."""
        mean, half, _ = self.interval()
        text = f"{100 * float(mean):{'+' if signed else ''}z.1f}"
        return text if len(self.values) < 3 else f"{text} ± {100 * float(half):.1f}"


class Interval(NamedTuple):
    """A mean over seeds.

    Attributes:
        mean: Mean over seeds.
        half: Half of the 95 % interval; NaN for one seed.
        p_value: p-value of the two-sided test of a mean of 0; 1 if all values are 0.
    """

    mean: Numbers
    half: Numbers
    p_value: Numbers


def contributions(
    right: Table, weights: Table, labels: Integer[np.ndarray, " images"] | None = None
) -> tuple[Numbers, Numbers]:
    """Return the mean accuracy of clients, and the part of each test image in it.

    Args:
        right: 1 where a client predicts an image right, and 0 elsewhere; or a probability.
        weights: Weight of an image in the tests of a client, at least 0. A client without any
            does not count. Images that nobody tests in this seed have weight 0.
        labels: Class of each image. If given, the figure is the mean balanced accuracy: all classes
            in the tests of a client count the same.

    Returns:
        Accuracy ``(*batch,)``, and parts ``(*batch, images)``: each image's weight times its
        difference to the mean, and for balanced accuracy to the other images of its class. They
        are scaled so that sums of their squares are not too small for few images.

    Example:
        One client has half of the first image right, and the second one tests two images.

        >>> right, weights = np.array([[0.5, 0, 0], [0, 1, 0]]), np.array([[1, 0, 0], [0, 1, 1]])
        >>> value, parts = contributions(right, weights)
        >>> float(value), parts.round(3).tolist()
        (0.5, [0.0, 0.153, -0.153])
    """
    weights = np.asarray(weights, dtype=np.float64)
    if labels is not None:
        weights = balanced_weights(torch.tensor(weights), torch.as_tensor(labels)).numpy()
    total = weights.sum(-1, keepdims=True)
    shares = weights / np.where(total > 0, total, 1) / (total > 0).sum(-2, keepdims=True)
    value = (shares * right).sum((-2, -1))
    moved = shares * (right - value[..., None, None])
    if labels is None:
        tested = (shares > 0).any(-2).sum(-1)
        return value, np.sqrt(tested / np.maximum(tested - 1, 1))[..., None] * moved.sum(-2)
    # An image moves the recall of its class: it is compared with the others of its class.
    _, classes = np.unique(labels, return_inverse=True)
    member = np.eye(classes.max() + 1)[classes]
    sizes, hits = ((each @ member)[..., classes] for each in (shares, shares * right))
    others = sizes - shares
    alone = others <= ROUNDING * sizes
    rest = np.where(alone, 0, hits - shares * right) / np.where(alone, 1, others)
    return value, np.where(alone, moved, shares * (right - rest)).sum(-2)


def harmonic(base: Figure, new: Figure) -> Figure:
    """Return a figure whose mean is the harmonic mean H of the mean accuracies of two figures.

    It is linear in the two accuracies (the delta method), so that means, intervals and paired
    differences belong to one H. The two have other test images.

    Args:
        base: Accuracy on base classes.
        new: Accuracy on new classes, of the same seeds.

    Example:
        >>> base, new = Figure(np.array([0.75, 0.25])), Figure(np.array([0.25, 0.75]))
        >>> harmonic(base, new).values
        array([0.5, 0.5])
    """
    means = [side.values.mean(-1, keepdims=True) for side in (base, new)]
    total = np.maximum(sum(means), 1e-12)
    slopes = [2 * (mean / total) ** 2 for mean in reversed(means)]
    sides = [*zip((base, new), means, slopes, strict=True)]
    value = 2 * means[0] * means[1] / total
    value = value + sum(slope * (side.values - mean) for side, mean, slope in sides)
    parts = [slope[..., None] * side.parts for side, _, slope in sides if side.parts is not None]
    return Figure(value, np.concatenate(parts, -1) if len(parts) == 2 else None)


def interval(figure: Figure) -> Interval:
    r"""Estimate a mean over seeds, with the errors of seeds and of test images.

    .. math:: \widehat{\mathrm{Var}} = (MS_{seed} + MS_{image} - MS_{rest}) \big/ (S N)

    It is at least the variance over seeds alone and over images alone. With missing images, the
    difference of the last two mean squares follows from the covariance of each pair of seeds over
    the images that both test.

    The share of the seeds in this variance has S - 1 degrees of freedom, and the rest N - 1. The
    p-value is the mean of both tails of Student's t, weighted by these shares (Cochran). In
    simulations without a difference it has at most 5.6 % of stars. One t with Satterthwaite's
    degrees of freedom has up to 8.1 % with three seeds if both errors are large, and finds fewer
    true differences if images have no error of their own.

    Example:
        Two seeds have the same images right, so over seeds alone the mean would be exact.

        >>> figure = Figure.of([(np.array([[1, 1, 0, 1]]), np.ones((1, 4)))] * 2)
        >>> mean, half, p_value = interval(figure)
        >>> round(float(mean), 2), round(float(half), 2)
        (0.75, 0.8)
        >>> float(interval(Figure(figure.values)).half)
        0.0

    References:
        Cochran, "Approximate Significance Levels of the Behrens-Fisher Test", Biometrics 1964.
    """
    mean, seeds = figure.values.mean(-1), figure.values.shape[-1]
    if seeds < 2:
        return Interval(mean, np.full_like(mean, np.nan), np.ones_like(mean))
    variance = over_seeds = figure.values.var(-1, ddof=1) / seeds
    images = seeds
    if figure.parts is not None:
        images = max(figure.parts.shape[-1], 2)
        covariance = figure.parts @ figure.parts.swapaxes(-1, -2)
        over_images = covariance.mean((-2, -1))
        rest = (np.trace(covariance, axis1=-2, axis2=-1) / seeds - over_images) / (seeds - 1)
        crossed = over_seeds + over_images - rest
        variance = np.maximum(crossed, np.maximum(over_seeds, over_images))
    share = over_seeds / np.maximum(variance, ROUNDING**2)

    def p_value(t: Numbers) -> Any:
        tails = special.stdtr(seeds - 1, -t), special.stdtr(images - 1, -t)
        return 2 * (share * tails[0] + (1 - share) * tails[1])

    low, high = np.zeros_like(mean), np.full_like(mean, 13)  # t of two seeds is below 13
    for _ in range(50):
        middle = (low + high) / 2
        wide = p_value(middle) < 0.05
        low, high = np.where(wide, low, middle), np.where(wide, middle, high)
    error = np.sqrt(variance)
    t = np.where(np.abs(mean) < ROUNDING, 0, np.abs(mean) / np.maximum(error, ROUNDING))
    return Interval(mean, high * error, p_value(t))


def holm(p_values: Sequence[float], level: float = 0.05) -> list[bool]:
    """Return which hypotheses the step-down procedure of Holm (1979) rejects.

    Example:
        >>> holm([0.04, 0.01, 0.02])
        [True, True, True]
        >>> holm([0.04, 0.02, 0.02])
        [False, False, False]
    """
    rejected = [False] * len(p_values)
    for rank, place in enumerate(np.argsort(p_values)):
        if not p_values[place] <= level / (len(p_values) - rank):
            break
        rejected[place] = True
    return rejected


def starred(differences: Sequence[Figure]) -> list[bool]:
    """Return which differences are not 0 after Holm's correction for all of them."""
    return holm([float(interval(difference).p_value) for difference in differences])
