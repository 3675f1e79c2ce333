"""Whole tables from simulated bits: false stars and advice, and a second computation."""

import re

import numpy as np
import pytest
from scipy import optimize, stats

from fedprompt.compare import Results, measure, records
from fedprompt.compare.rows import CONSTANT

ALONE, SEEDS, IMAGES, CLIENTS = "Training alone", 5, 120, 3
COLUMNS = {
    "own": "own tests",
    "own_balanced": "own tests, balanced",
    "full": "all tests",
    "balanced": "all tests, balanced",
}


class World:
    """Test images of any class frequencies, and clients with their own mixes of classes.

    Args:
        draw: Source of randomness.
        shares: Frequencies of the classes.
        own: Whether clients have their own tests, of which a third are missing in each seed, and
            the last client has no tests in the first seed. Otherwise, images have weights.
    """

    def __init__(self, draw, shares, own=False, seeds=SEEDS):
        self.draw, self.shares, self.seeds, self.own = draw, np.array(shares), seeds, own
        self.labels = draw.choice(len(shares), IMAGES, p=self.shares)
        self.labels[: len(shares)] = np.arange(len(shares))  # each class has a test image
        mixes = draw.dirichlet(2 * self.shares + 0.2, (seeds, CLIENTS))
        self.counts = draw.multinomial(60, mixes)
        self.tests = [self.weights(seed) for seed in range(seeds)]
        self.chance = draw.random((1, IMAGES))
        self.found, self.bits = [], {}

    def weights(self, seed):
        """Return the weight of each image in the own tests of each client."""
        if self.own:
            owner = self.draw.integers(0, CLIENTS * 3 // 2, IMAGES)
            owner[:CLIENTS] = np.arange(CLIENTS)
            return owner == np.arange(CLIENTS - (seed == 0))[:, None]
        return (self.counts[seed] / np.bincount(self.labels))[:, self.labels]

    def add(self, row, say, backward=4.0):
        """Add a row whose models say a class for each image, or its probability to be right."""
        for seed in range(self.seeds):
            said = say(seed)
            bits = {"labels": self.labels, "places": np.arange(IMAGES), "weights": self.tests[seed]}
            if not isinstance(said, dict):
                said = {"right": (said == self.labels)[: len(self.tests[seed])]}
            bits |= said
            record = {"partition": "", "row": row, "seed": seed, "trial": None, "values": {}}
            record |= {"backward": backward, "bytes_up": 8.0, **measure.accuracies(bits)}
            self.found.append(record)
            self.bits[records.key(record)] = bits

    def most_frequent(self):
        """Add the row of the constant, of each client on its own tests."""

        def say(seed):
            own, every = self.counts[seed].argmax(1), self.counts[seed].sum(0).argmax()
            own = own[: len(self.tests[seed]), None]
            return {"right": (every == self.labels)[None], "own.right": own == self.labels}

        self.add(CONSTANT, say, backward=0.0)

    def guess(self, seed, share=0.5):
        """Guess each image by the class frequencies; for a share of images, all seeds the same."""
        fresh = self.draw.random((CLIENTS, IMAGES))
        same = self.draw.random((1, IMAGES)) < share
        return np.searchsorted(self.shares.cumsum()[:-1], np.where(same, self.chance, fresh))

    def sees(self, seed, share=0.6):
        """Say the class of a share of the images, and guess the others."""
        known = self.draw.random((CLIENTS, IMAGES)) < share
        return np.where(known, self.labels, self.guess(seed))

    def results(self):
        return Results(self.found, columns=COLUMNS, compared=("own", "full"), bits=self.bits)


def gains(shown):
    """Return the rows that have a star at a gain, or are recommended."""
    (view,) = shown.views().values()
    starred = {
        row
        for column in ("own", "full")
        for row, text in view.starred(column, "training alone").items()
        if text.startswith("+") and text.endswith("*")
    }
    return starred | {*re.findall(r"(?:\*\*Use\*\* |and )([^(,.]*?) (?:\(|for )", view.advice())}


def noise(draw, own):
    """Return the results of methods that know nothing of an image, in a world of any classes."""
    classes = draw.integers(2, 6)
    world = World(draw, draw.dirichlet(np.full(classes, draw.choice([0.3, 1.0, 50.0]))), own)
    world.most_frequent()
    world.add(ALONE, world.guess)
    world.add("Random", lambda seed: world.guess(seed, 0.9))
    most = world.shares.argmax()
    world.add("Constant", lambda seed: np.full((1, IMAGES), most))
    world.add("Own constant", lambda seed: world.counts[seed].argmax(1)[:, None] + 0 * world.labels)
    turn = draw.random()
    world.add(
        "Nearly", lambda seed: np.where(draw.random((1, IMAGES)) < turn, most, world.guess(seed))
    )
    return world.results()


@pytest.mark.parametrize("own", [False, True])
def test_noise_has_few_false_gains_whatever_the_frequencies(own):
    draw = np.random.default_rng(own)
    false = [gains(noise(draw, own)) for _ in range(32)]
    assert np.mean([bool(rows) for rows in false]) <= 0.065, [rows for rows in false if rows]


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.95, 0.05), (0.2,) * 5])
def test_a_method_that_sees_the_images_is_recommended(shares):
    def found(seed):
        world = World(np.random.default_rng(seed), shares)
        world.most_frequent()
        world.add(ALONE, world.guess)
        world.add("Sees", lambda seed: world.sees(seed, 0.95))
        return gains(world.results()) == {"Sees"}

    assert np.mean([*map(found, range(10))]) >= (0.9 if max(shares) < 0.9 else 0.5)


# A second computation: from records and bits, by the equations of the page, one cell at a time.


def accuracy(right, weights, labels, balanced):
    """Return the mean accuracy of clients, and the contribution of each image."""
    clients, images = weights.shape
    tested = [c for c in range(clients) if weights[c].sum() > 0]
    shares = np.zeros((clients, images))
    for c in tested:
        known = [k for k in np.unique(labels) if weights[c, labels == k].sum() > 0]
        for i in range(images):
            of = labels == labels[i] if balanced else labels >= 0
            whole = weights[c, of].sum() * (len(known) if balanced else 1)
            shares[c, i] = weights[c, i] / whole / len(tested) if weights[c, i] else 0
    value, parts = (shares * right).sum(), np.zeros(images)
    for c in tested:
        for i in np.flatnonzero(shares[c]):
            center, others = value, (labels == labels[i]) & (shares[c] > 0)
            others[i] = False
            if balanced and others.any():
                center = np.average(right[c, others], weights=shares[c, others])
            parts[i] += shares[c, i] * (right[c, i] - center)
    count = (shares > 0).any(0).sum()
    return value, parts if balanced else parts * (count / (count - 1)) ** 0.5


def of_row(world, row, column):
    """Return the figure of each seed, and its contributions."""
    found = []
    for record in world.found:
        if record["row"] == row:
            bits = world.bits[records.key(record)]
            own, weights = column.startswith("own"), bits["weights"].astype(float)
            right = bits.get("own.right", bits["right"]) if own else bits["right"]
            weights = weights if own else np.ones(right.shape)
            right = np.broadcast_to(right, weights.shape)
            found.append(accuracy(right, weights, bits["labels"], "balanced" in column))
    return np.array([value for value, _ in found]), np.array([parts for _, parts in found])


def minus(one, other):
    return one[0] - other[0], one[1] - other[1]


def estimated(figure):
    """Return the mean, half of its interval and its p-value, by crossed mean squares."""
    values, parts = figure
    seeds, images = parts.shape
    over_seeds = values.var(ddof=1) / seeds
    pairs = [parts[s] @ parts[t] for s in range(seeds) for t in range(seeds)]
    same = [parts[s] @ parts[s] for s in range(seeds)]
    over_images = np.mean(pairs)
    rest = (np.mean(same) - over_images) / (seeds - 1)
    variance = max(over_seeds + over_images - rest, over_seeds, over_images)
    if variance == 0:
        return values.mean(), 0.0, float(values.mean() == 0)
    share, error = over_seeds / variance, variance**0.5

    def p_value(t):
        return 2 * (share * stats.t.sf(t, seeds - 1) + (1 - share) * stats.t.sf(t, images - 1))

    half = optimize.brentq(lambda t: p_value(t) - 0.05, 0, 20)
    return values.mean(), half * error, p_value(abs(values.mean()) / error)


def held(found):
    """Return the rows whose hypothesis Holm's procedure rejects."""
    order = sorted(found, key=lambda row: found[row][2])
    kept = [found[row][2] <= 0.05 / (len(order) - rank) for rank, row in enumerate(order)]
    return set(order[: kept.index(False)] if False in kept else order)


def test_a_second_computation_gives_the_same_table():
    draw = np.random.default_rng(3)
    world = World(draw, (0.5, 0.3, 0.2), own=True)
    world.most_frequent()
    world.add(ALONE, lambda seed: world.sees(seed, 0.5))
    for share in (0.05, 0.6, 0.8):
        world.add(f"Sees {share}", lambda seed, share=share: world.sees(seed, share))
    world.add("Constant", lambda seed: np.zeros((1, IMAGES)))
    (view,) = world.results().views().values()
    assert view.mean("Constant", "uses") == 0.0  # no record has it
    header, body = view.lines()
    table = {line[0]: dict(zip(header, line, strict=True)) for line in body}
    compared = [row for row in table if row not in (CONSTANT, ALONE)]
    figures = {(row, column): of_row(world, row, column) for row in table for column in COLUMNS}

    def better(column, rows):
        found = set(rows)
        for each in (column, {"own": "own_balanced", "full": "balanced"}[column]):
            to_constant = {
                row: estimated(minus(figures[row, each], figures[CONSTANT, each])) for row in rows
            }
            found &= {row for row in held(to_constant) if to_constant[row][0] > 0}
        return found

    for (row, column), figure in figures.items():
        mean, half, _ = estimated(figure)
        assert table[row][COLUMNS[column]] == f"{100 * mean:.1f} ± {100 * half:.1f}"
    starred = set()
    for column in ("own", "full"):
        gain = {
            row: estimated(minus(figures[row, column], figures[ALONE, column])) for row in compared
        }
        stars = {row for row in held(gain) if gain[row][0] < 0 or row in better(column, compared)}
        for row, (mean, half, _) in gain.items():
            written = f"{100 * mean:+.1f} ± {100 * half:.1f}{' *' if row in stars else ''}"
            assert table[row][f"{COLUMNS[column]}, to training alone"] == written
        starred |= stars
        best = max(
            better(column, [*compared, ALONE]), key=lambda row: figures[row, column][0].mean()
        )
        assert best == "Sees 0.8"
        gained = f"{100 * gain[best][0]:+.1f} ± {100 * gain[best][1]:.1f}"
        assert f"{best} ({gained} points to training alone)" in view.advice()
    assert starred == {"Sees 0.05", "Sees 0.6", "Sees 0.8", "Constant"}
