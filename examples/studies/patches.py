"""FedOTP without CLIP: transport between patches of DINOv2 and two prototypes of each class.

Digits of MNIST are at random places on larger canvases with clutter. An image belongs to the class
whose shared and private prototypes match its patches best. Ten clients have two classes each, and
all take part in each round.
"""

from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import fedprompt as fp
import photographs
from fedprompt.compare import Trial
from fedprompt.methods import Setting
from fedprompt.methods.fedotp import two_contexts
from studies.core import Images, Machine, Row, content, study, trial
from studies.photos import DINO, RANDOM, dino, source_of

CANVAS, DIGIT, PIECE = 98, 42, 14  # pixels
NUM_TRAIN, NUM_TEST, NUM_PUBLIC = 1000, 500, 64


@cache
def canvases() -> tuple[Tensor, Tensor]:
    """Place each digit and four pieces of other digits on a canvas; return canvases and labels."""
    data, rng, count = photographs.mnist(), np.random.default_rng(2), NUM_TRAIN + NUM_TEST
    digits = data.images[:count].float()
    digits = F.interpolate(digits, (DIGIT, DIGIT), mode="bilinear", antialias=True).clamp(0, 255)
    sheets = torch.zeros(count, 1, CANVAS, CANVAS)
    for sheet, digit in zip(sheets, digits, strict=True):
        corners = rng.integers(0, DIGIT - PIECE, size=(4, 2))
        pieces = [
            digits[rng.integers(count), :, top : top + PIECE, left : left + PIECE]
            for top, left in corners
        ]
        for part in (*pieces, digit):
            size = part.shape[-1]
            top, left = rng.integers(0, CANVAS - size, size=2)
            place = sheet[:, top : top + size, left : left + size]
            place.copy_(torch.maximum(place, part))
    return sheets.round().to(torch.uint8), data.labels[:count]


@cache
def tokens(source: Path | str | None) -> Tensor:
    """Encode the canvases: class token and patches, minus their mean over public images."""

    def encode(images: Tensor) -> Tensor:
        encoded = fp.encode_prompted(dino(source, CANVAS), images)
        return torch.cat([encoded.pooled[:, None], encoded.patches], 1).float()

    found = photographs.encoded(encode, canvases()[0], CANVAS)
    return found - found[:NUM_PUBLIC].mean(0)


class Prototypes(nn.Module):
    """Classifier of tokens with a shared and a private prototype of each class.

    Args:
        dim: Width of the tokens.
        num_classes: Number of classes.
        match: Function from tokens and prototypes to logits.
        read: Tokens that are read, of the class token and the patches behind it.
    """

    def __init__(self, dim: int, num_classes: int, match: Any, read: slice) -> None:
        super().__init__()
        self.shared, self.private = (nn.Linear(dim, num_classes, bias=False) for _ in range(2))
        self.match, self.read = match, read

    def forward(self, inputs: Tensor) -> Tensor:
        """Classify the tokens of images."""
        prototypes = torch.stack([self.shared.weight, self.private.weight])
        return self.match(inputs[:, self.read], prototypes)


def prototypes(
    setting: Setting, *, learning_rate: float, scale: float, local: bool = False, **values: Any
) -> fp.Method:
    """Make a method with transport if it has a mass, otherwise with the mean of the tokens."""
    transport = {"solver": partial(fp.transport.newton, epsilon=0.1), "mass": values.get("mass")}
    mean = {"solver": fp.transport.independent, "mass": 1.0}
    options = transport if "mass" in values else mean
    match = partial(fp.transport_logits, scale=scale, **options)
    read = slice(1) if values.get("pooled") else slice(1, None)
    made = Prototypes, setting.public.shape[-1], setting.num_classes, match, read
    return two_contexts(setting.seeded(*made), learning_rate, local=local)


def make(partition: str, row: Row, *, seed: int, machine: Machine) -> Trial:
    """Give each of ten clients a few images of two classes; all seeds have the same test images."""
    found, labels = tokens(source_of(machine, DINO)), canvases()[1]
    images = Images(found, labels, torch.zeros_like(labels))
    train, test = images.at(slice(NUM_PUBLIC, NUM_TRAIN)), images.at(slice(NUM_TRAIN, None))
    few = {"of": "pathological", "count": 10, "classes_per_client": 2}
    few["shots"] = int(partition.removeprefix("shots-"))
    budget = {"rounds": 10, "epochs": 5, "cohort_size": 10, "batch_size": 32}
    build = partial(Setting, make_optimizer=torch.optim.Adam, **budget)
    places = torch.arange(NUM_TRAIN, NUM_TRAIN + NUM_TEST)
    return trial(build, train, test, few, seed=seed, places=places)


ROWS, EQUAL = (
    [Row(title, *values, instead=prototypes) for title, values in content("patches")[name].items()]
    for name in ("rows", "equal")
)
"""Rows that are tuned, and rows with the rate and the scale of the mean of patches."""


STUDIES = {
    "patches": study(
        "patches",
        rows=lambda partition: [*ROWS, *EQUAL],
        make=make,
        networks=lambda partition, row: [DINO, RANDOM],
    )
}
