"""DP-SGD on prompts: each image of a client is protected at a stated epsilon."""

from functools import cache, partial

import numpy as np
import torch
import torch.nn.functional as F

import fedprompt as fp
from fedprompt import samples
from fedprompt.compare import Trial
from fedprompt.methods import Setting, VitSetting
from fedprompt.methods.steps import averaged
from private import MAX_NORM, NO_BOUND, RATE, noise_for, private_step
from studies import digits
from studies.ablations import sides, tested
from studies.core import Machine, Row, study, trial
from studies.figures import Measured, last

EPSILONS = {"no privacy": None, "clipping alone": np.inf, "ε = 8": 8.0, "ε = 3": 3.0, "ε = 1": 1.0}
RATES = [0.9, 100.0, 10.0, 3.0, 0.9]
"""Learning rate of each row, chosen by validation."""
noise = cache(noise_for)


def multiplier_of(title: str, setting: Setting) -> float:
    """Return the noise multiplier of a row."""
    epsilon, steps = EPSILONS[title], setting.rounds * setting.steps
    return 0.0 if epsilon in (None, np.inf) else noise(epsilon, steps=steps)


def private(title: str, setting: VitSetting, *, learning_rate: float) -> fp.Method:
    """Make FedAvg whose clients take private steps on Poisson batches.

    Noise is drawn from seeded generators, so that others can repeat it. Real training must not.
    """
    model = setting.new_model()
    max_norm = NO_BOUND if EPSILONS[title] is None else MAX_NORM
    noise = {"multiplier": multiplier_of(title, setting), "max_norm": max_norm}

    def train(data, answer, state):
        fp.load_values(model, answer)
        optimizer = data.optimizer(model, learning_rate)
        draw, vary, secret = map(data.stream, ("batches", "augmentation", "noise"))
        how = {**noise, "generator": secret, "expected_batch_size": RATE * data.num_examples}
        for _ in range(data.steps):
            chosen = fp.privacy.poisson_batch(data.num_examples, rate=RATE, generator=draw)
            images, labels = data.batch(chosen, vary)
            copies = fp.privacy.per_sample(model, len(images))
            F.cross_entropy(copies(images), labels, reduction="sum").backward()
            private_step(optimizer, model, copies, **how)
        return fp.collect(model, weight=1), {}

    return averaged(model, train)


ROWS = [
    Row(title, "fedvpt_d", {"learning_rate": rate}, instead=partial(private, title))
    for title, rate in zip(EPSILONS, RATES, strict=True)
]


def augment(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Augment digits; a Poisson batch may be empty."""
    return samples.augment(images, generator) if len(images) else images


def make(partition: str, row: Row, *, seed: int, machine: Machine, validate: bool = False) -> Trial:
    """Make five clients with 240 images each and one network.

    With `validate`, they have 180, and a quarter of the training images are the tests.
    """
    train, test = sides(seed, "inverted_rotated")
    places = tested(seed)
    if validate:
        places = torch.arange(len(train.labels)) % 4 == 0
        train, test, places = train.at(~places), train.at(places), places.nonzero()[:, 0]
    steps = {"make_optimizer": torch.optim.SGD, "augment": augment}
    steps["schedule"] = lambda progress: (1 + np.cos(np.pi * progress)) / 2
    build = partial(VitSetting, trunks=[digits.trunk("B")], num_prompts=4, **steps)
    budget = {"rounds": 10, "steps": 4, "cohort_size": 5, "batch_size": 48}
    few = {"of": "iid", "count": 5, "most": 240}
    return trial(build, train, test, few, seed=seed, places=places, **budget)


def noise_of(partition: str, row: Row) -> Measured:
    """Return the function that records the noise of a row."""
    return last(lambda trial, method, now: {"noise": multiplier_of(row.title, trial.setting)})


STUDIES = {"privacy": study("privacy", rows=lambda partition: ROWS, make=make, figures=noise_of)}
