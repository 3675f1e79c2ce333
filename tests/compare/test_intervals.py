"""Intervals with the errors of seeds and images: by loops, and by simulation of a known truth."""

import numpy as np
import pytest
from scipy import optimize, stats

from fedprompt.compare.intervals import Figure, contributions, harmonic, holm, interval, starred


def loops(d):
    """Mean squares of a table (seeds, images) without missing cells, one cell after the other."""
    seeds, images = d.shape
    by_seed, by_image, mean = d.mean(1), d.mean(0), d.mean()
    rest = sum(
        (d[s, i] - by_seed[s] - by_image[i] + mean) ** 2
        for s in range(seeds) for i in range(images)
    ) / ((seeds - 1) * (images - 1))  # fmt: skip
    seed = images * sum((m - mean) ** 2 for m in by_seed) / (seeds - 1)
    image = seeds * sum((m - mean) ** 2 for m in by_image) / (images - 1)
    variance = max(seed + image - rest, seed, image)
    weights = seed / variance, 1 - seed / variance

    def p_value(t):
        return 2 * (weights[0] * stats.t.sf(t, seeds - 1) + weights[1] * stats.t.sf(t, images - 1))

    error = (variance / (seeds * images)) ** 0.5
    half = optimize.brentq(lambda half: p_value(half / error) - 0.05, 0, 20 * error)
    return mean, half, p_value(mean / error)


@pytest.mark.parametrize("spread", [0, 0.3, 3])
def test_without_missing_images_it_is_the_analysis_of_variance(spread):
    draw = np.random.default_rng(0)
    level = draw.normal(0, spread, 12) + draw.normal(0.5, spread / 3, (4, 1))
    right = (level + draw.normal(0, 1, (4, 12)) > 0).astype(float)
    figure = Figure(*contributions(right[:, None], np.ones((4, 1, 12))))
    assert interval(figure) == pytest.approx(loops(right), rel=1e-10)
    alone = interval(Figure(figure.values))
    expected = stats.ttest_1samp(right.mean(1), 0)
    low, high = expected.confidence_interval()
    assert alone == pytest.approx((right.mean(), (high - low) / 2, expected.pvalue))


def test_contributions_are_those_of_the_equation():
    """Clients of unlike size, one without tests, and an image that two of them test."""
    draw, labels = np.random.default_rng(1), np.array([0, 0, 1, 1, 1, 2])
    right = draw.random((3, 6))
    weights = np.array([[1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0], [0, 0, 2.0, 1, 0, 1]])
    for classes in (None, labels):
        value, parts = contributions(right, weights, classes)
        shares, centers = np.zeros((3, 6)), np.zeros((3, 6))
        for c in (0, 2):
            for i in range(6):
                same = [j for j in range(6) if classes is None or labels[i] == labels[j]]
                whole = 1 if classes is None else len({*labels[weights[c] > 0]})
                if weights[c, i]:
                    shares[c, i] = weights[c, i] / weights[c, same].sum() / whole / 2
        mean = (shares * right).sum()
        for c, i in ((c, i) for c in (0, 2) for i in range(6)):
            same = [j for j in range(6) if labels[i] == labels[j] and weights[c, j] and i != j]
            of_class = np.average(right[c, same], weights=weights[c, same]) if same else mean
            centers[c, i] = mean if classes is None else of_class
        assert value == pytest.approx(mean)
        expected = (shares * (right - centers)).sum(0)  # five images are tested
        scale = (5 / 4) ** 0.5 if classes is None else 1
        np.testing.assert_allclose(parts, scale * expected, atol=1e-12)


class World:
    """Two methods on images and seeds with effects, of which one is better by a gap."""

    def __init__(self, seeds, images, effects, gap=0.0, runs=0):
        self.draw = draw = np.random.default_rng(seeds * images)
        of_image, of_seed = effects
        self.shape = runs, seeds, images
        effect = draw.normal(0, of_image, (runs, 1, images)) / 2
        effect = effect + draw.normal(0, of_seed, (runs, seeds, 1)) / 2
        common = draw.normal(0, 1, (runs, 1, images))
        levels = [stats.norm.ppf(0.7) * 2**0.5, stats.norm.ppf(0.7 - gap) * 2**0.5]
        self.right = [
            (common + sign * effect + draw.standard_normal(self.shape, np.float32) + level > 0)
            for sign, level in zip((1, -1), levels, strict=True)
        ]

    def difference(self, weights=None, labels=None):
        """Return the paired difference of both methods; all images of one client by default."""
        weights = np.ones((1, self.shape[-1])) if weights is None else weights
        first, second = (self.of(right, weights, labels) for right in self.right)
        return first - second

    def of(self, right, weights, labels=None):
        """Return the figure of clients that predict alike."""
        clients = np.broadcast_to(weights, (*self.shape[:2], *weights.shape[-2:]))
        return Figure(*contributions(right[..., None, :], clients, labels))

    def own_tests(self):
        """Divide the images of a seed over three clients of unlike size; a third are missing."""
        drawn = self.draw.random((*self.shape[:2], 1, self.shape[2]))
        edges = np.array([0, 0.1, 0.3, 2 / 3])
        return (drawn >= edges[:-1, None]) & (drawn < edges[1:, None])

    def harmonic(self):
        """Return the difference of H, with two thirds of the images as base classes."""
        base = np.arange(self.shape[2]) % 3 > 0
        sides = [
            [self.of(right[..., part], np.ones((1, part.sum()))) for part in (base, ~base)]
            for right in self.right
        ]
        return harmonic(*sides[0]) - harmonic(*sides[1])

    def mixes(self):
        """Weigh images by the shares of classes of one client, which change with the seed."""
        shares = self.draw.dirichlet(np.full(4, 2.0), self.shape[:2])
        return shares[:, :, None, np.arange(self.shape[2]) % 4]


def stars(figure):
    return float(np.mean(interval(figure).p_value < 0.05))


@pytest.mark.parametrize("effects", [(2, 0), (0.5, 0.1)])
@pytest.mark.parametrize(
    ("images", "runs", "seeds"), [(120, 400, 3), (120, 400, 5), (120, 400, 10), (1000, 250, 3)]
)
def test_a_difference_of_0_has_few_stars(images, runs, seeds, effects):
    """5 % are asked for. Each seed has other clients, other shares and other missing images."""
    world = World(seeds, images, effects, runs=runs)
    own, labels = world.own_tests(), np.minimum(np.arange(images) % 4, 2)
    found = {"all": world.difference(), "H": world.harmonic()}
    found |= {"own": world.difference(own), "balanced": world.difference(own, labels)}
    if images == 120:
        found["mixes"] = world.difference(world.mixes())
    shares = {name: stars(figure) for name, figure in found.items()}
    assert max(shares.values()) <= 0.065, shares


def test_over_seeds_alone_stars_come_with_the_seeds():
    """The companion of the test above: the same worlds without the error of images."""
    figure = World(10, 120, (2, 0), runs=600).difference()
    assert stars(Figure(figure.values)) > 0.3


@pytest.mark.parametrize("effects", [(0, 0), (0.5, 0), (0.5, 0.1)])
@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_five_points_on_1000_images_are_seen_as_often_as_over_seeds_alone(seeds, effects):
    figure = World(seeds, 1000, effects, gap=0.05, runs=120).difference()
    assert stars(figure) >= stars(Figure(figure.values)) - 0.05


def test_one_seed_has_no_interval_and_equal_values_have_no_star():
    assert np.isnan(interval(Figure(np.array([0.5]))).half)
    assert interval(Figure(np.zeros(5))).p_value == 1
    almost = Figure(np.array([0.1 + 0.2, 0.3])) - Figure(np.array([0.3, 0.1 + 0.2]))
    assert starred([almost, Figure(np.array([0.1, 0.1]))]) == [False, True]


def test_seeds_without_common_images_have_the_error_over_seeds():
    right = np.array([[1, 1, 0, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 0, 1, 1]])[:, None]
    tests = np.repeat(np.eye(2), 4, 1)[:, None]
    figure = Figure(*contributions(right, tests))
    both, alone = interval(figure), interval(Figure(figure.values))
    assert figure.values.tolist() == [0.75, 0.75]
    assert alone.half == 0
    # by hand: 3/16 * 4/3 of a seed's four images, a half for two seeds, a fourth for four images
    assert both.half == pytest.approx(stats.t.ppf(0.975, 7) * (3 / 16 * 4 / 3 / 2 / 4) ** 0.5)


def test_the_harmonic_mean_is_that_of_the_means():
    """At b = 0.5 and n = 0.5 both slopes are 0.5; at b = 0.9, n = 0.1 they are 0.02 and 1.62."""
    base, new = Figure(np.array([0.9, 0.1])), Figure(np.array([0.1, 0.9]))
    assert harmonic(base, new).values == pytest.approx([0.5, 0.5])
    base = Figure(np.array([0.9, 0.9]), np.array([[0.1], [0.2]]))
    new = Figure(np.array([0.2, 0.0]), np.array([[0.1], [0.3]]))
    found = harmonic(base, new)
    assert found.values == pytest.approx([0.18 + 0.162, 0.18 - 0.162])
    assert found.parts == pytest.approx(np.array([[0.002, 0.162], [0.004, 0.486]]))
    assert harmonic(base, Figure(new.values)).parts is None
    assert harmonic(Figure(np.zeros(2)), Figure(np.zeros(2))).values.tolist() == [0, 0]


def test_figures_of_some_seeds_are_paired():
    first = Figure(np.array([0.1, 0.2, 0.4]), np.arange(6.0).reshape(3, 2))
    found = first.at([0, 2]) - Figure(np.array([0.0, 0.1]), np.ones((2, 2)))
    assert found.values == pytest.approx([0.1, 0.3])
    assert found.parts.tolist() == [[-1, 0], [3, 4]]
    assert (first - Figure(first.values)).parts is None


def test_holm_stops_at_the_first_that_holds():
    """By hand at 5 %: bounds .0125, .0167, .025 and .05 in the order of the p-values."""
    assert holm([0.03, 0.012, 0.02, 0.016]) == [True, True, True, True]
    assert holm([0.03, 0.012, 0.026, 0.016]) == [False, True, False, True]
    assert holm([np.nan, 0.01]) == [False, True]
    assert holm([]) == []
