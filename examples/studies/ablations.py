"""Where each paper's mechanism can act: two settings a paper, and the row without the mechanism.

The settings were chosen before any of them ran. Hyperparameters are those of an earlier study,
with models of the same kind; those of FedL2G were chosen on held-out images of other settings.
"""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import photographs
from fedprompt import samples
from fedprompt.compare import Trial
from fedprompt.methods import NetworkSetting, VitSetting
from studies import digits
from studies.core import COLUMNS, Images, Machine, Row, Study, content, trial
from studies.figures import Joined, Measured, groups, last, mechanism, rise, two_losses
from zoo import IMAGE_SIZE, TINY

SMALL = {"smallest": 12, "largest": 20}
"""Sides of digits among clutter, in pixels of 32."""


@cache
def sides(seed: int, *domains: str, on_canvases: bool = False) -> list[Images]:
    """Split the digits into training and test images, each in one of several domains in turn.

    On canvases, digits are small and among clutter, and images are the tokens of CLIP.
    """
    split = samples.digits(seed, domain=samples.raw)
    rng = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(split.train_labels), generator=rng)
    train, test = split.train_images[order], split.test_images
    sizes = SMALL if on_canvases else None
    (train, truth), (test, known) = (
        digits.in_domains(images, domains, rng, sizes) for images in (train, test)
    )
    return [Images(train, split.train_labels[order], truth), Images(test, split.test_labels, known)]


def tested(seed: int) -> Tensor:
    """Return the numbers of the test images of :func:`sides`, which differ between seeds."""
    return samples.digits(seed, domain=lambda images: torch.arange(len(images))).test_images


def mnist(seed: int) -> list[Images]:
    """Split the digits of MNIST, small, three to one."""
    data = photographs.mnist()
    images = F.interpolate(data.images.float() / 255, (IMAGE_SIZE, IMAGE_SIZE), mode="area")
    found = Images(images, data.labels, data.domains)
    return [found.at(part) for part in mnist_order(seed)]


def mnist_order(seed: int) -> tuple[Tensor, ...]:
    """Return the numbers of the training and the test images of MNIST."""
    count = len(photographs.mnist().labels)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return order.split(count * 3 // 4)


VIT = {
    "batch_size": 32,
    "augment": samples.augment,
    "make_optimizer": partial(torch.optim.AdamW, weight_decay=1e-3),
}


def build(models: Sequence[str], augmented: bool) -> Any:
    """Return the function that makes the setting of trunks, of a CLIP, or of small networks."""
    if list(models) == ["CLIP"]:
        return digits.clip
    if {*models} & {*"SBL"}:
        width = 48 if len(models) > 1 else None
        return partial(VitSetting, trunks=[*map(digits.trunk, models)], num_features=width, **VIT)
    return partial(
        NetworkSetting,
        networks=[TINY[name] for name in models or TINY],
        num_features=32,
        prepare=lambda images: 2 * images - 1,
        make_optimizer=torch.optim.SGD,
        augment=samples.augment if augmented else None,
    )


CONTENT = content("ablations")
ABLATIONS = CONTENT["ablations"]
"""Settings in which a mechanism should decide; `compared` is the column of the differences."""
ROWS = {
    name: [Row(title, *values) for title, values in rows.items()]
    for name, rows in CONTENT["rows"].items()
}
"""The method, the row without its mechanism, and references."""


def make(partition: str, row: Row, *, seed: int, machine: Machine) -> Trial:
    """Make the trial of an ablation."""
    chosen = ABLATIONS[partition]
    domains, canvases = chosen.get("domains"), chosen["models"] == ["CLIP"]
    train, test = sides(seed, *domains, on_canvases=canvases) if domains else mnist(seed)
    division = dict(chosen["division"])
    if division.pop("mixed", False):
        division["mix"] = np.random.default_rng(seed)
    made = build(chosen["models"], augmented=bool(domains))
    places = tested(seed) if domains else mnist_order(seed)[1]
    return trial(made, train, test, division, seed=seed, places=places, **chosen["budget"])


GROUPED = ("SGPT", "SGPT, mean readout", "SGPT as printed")


def figures_of(partition: str, row: Row) -> Measured | None:
    """Return what explains a row."""
    if row.title in GROUPED:
        return last(groups)
    own = last(two_losses) if row.title == "FedL2G-f" else mechanism(row)
    return Joined(rise(), own) if partition.startswith("fedl2g") else own


BOUNDS = {"fedl2g": 0.04}
"""Largest difference of an accuracy between two processors, measured; elsewhere 0.01."""
FURTHER = {"lowest": "lowest client", "highest": "highest client"}
RISE = {"fedl2g": {"rise": "rise, 0.01 nats"}}


def study_of(name: str) -> Study:
    """Make the study of the ablations of a paper."""
    settings = {key: values for key, values in ABLATIONS.items() if key.startswith(name)}
    first = next(iter(settings.values()))
    title = ROWS[first["rows"]][0].title
    return Study(
        title=title,
        partitions={key: values["title"] for key, values in settings.items()},
        hours=lambda partition, row: settings[partition].get("seconds", 15) / 3600,
        rows=lambda partition: ROWS[settings[partition]["rows"]],
        make=make,
        columns=COLUMNS | FURTHER | RISE.get(name, {}),
        references={title: [title]},
        compared=[first["compared"]],
        figures=figures_of,
        bound=BOUNDS.get(name, 0.01),
    )


STUDIES = {f"ablations-{name}": study_of(name) for name in ("fedhpl", "sgpt", "fedl2g", "fedotp")}
