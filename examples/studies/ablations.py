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

import fedprompt as fp
import photographs
from build_samples import digits_clip
from fedprompt import samples
from fedprompt.compare.problems import Measured as Causes
from fedprompt.compare.trials import Trial
from fedprompt.methods import NetworkSetting, VitSetting
from studies import digits
from studies.core import (
    COLUMNS,
    Images,
    Machine,
    Row,
    Task,
    content,
    divided,
    explained,
    guides,
    trial,
)
from zoo import IMAGE_SIZE, TINY

CLASSES = len(digits_clip.CLASS_NAMES)
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


def make(partition: str, row: Row, *, seed: int, machine: Machine, validate: bool) -> Trial:
    """Make the trial of an ablation."""
    chosen, (rng, mix) = ABLATIONS[partition], (np.random.default_rng(seed) for _ in range(2))
    domains, canvases = chosen.get("domains"), chosen["models"] == ["CLIP"]
    train, test = sides(seed, *domains, on_canvases=canvases) if domains else mnist(seed)
    division = dict(chosen["division"])
    owned = divided(train, rng=rng, mix=mix if division.pop("mixed", False) else None, **division)
    made = build(chosen["models"], augmented=bool(domains))
    fields = {"seed": seed, "places": tested(seed) if domains else mnist_order(seed)[1]}
    return trial(made, train, test, owned, **fields, **chosen["budget"]).shrunk(machine.shrink)


@torch.no_grad()
def groups(trial: Trial, method: fp.Method, now: fp.Round) -> dict[str, float]:
    """Measure how the groups of SGPT are selected, and what their prompts change."""
    model = now.model(method, trial.federation, 0)
    domains, labels = trial.tests.cells // CLASSES, trial.tests.labels
    batches, num_groups = trial.tests.inputs.split(256), len(model.selector.keys)
    chosen = [model.selector(model.query(batch)).indices for batch in batches]
    found = torch.cat(chosen), domains, num_groups, 1 + int(domains.max())
    table = fp.metrics.contingency_table(*found).float()
    used, health = table[table.any(1)], fp.selection.selection_health(table.sum(1))
    shares = used.amax(1) / used.sum(1)
    pairs = list(zip(batches, chosen, strict=True))
    selected = torch.cat([model.logits(*pair).argmax(1) for pair in pairs])
    none = torch.cat([model.logits(batch).argmax(1) for batch in batches])
    other = torch.cat([model.logits(batch, (of + 1) % num_groups).argmax(1) for batch, of in pairs])
    return {
        "effective groups": health["effective_groups"],
        "dead groups": health["dead_groups"],
        "images in the group of their domain": fp.selection.clustering_accuracy(table),
        "smallest share of the main domain of a group": shares.min().item(),
        "groups of one domain": (shares == 1).sum().item(),
        "accuracy with the selected groups": (selected == labels).float().mean().item(),
        "accuracy without groups": (none == labels).float().mean().item(),
        "predictions that the next group changes": (selected != other).float().mean().item(),
    }


@torch.no_grad()
def losses(trial: Trial, method: fp.Method, now: fp.Round) -> dict[str, float]:
    """Measure how far the guides of FedL2G-f moved, and the two losses of the first client."""
    data = trial.federation.data(trial.setting, 0, now.server_round)
    model = now.model(method, data)
    images, labels = data.own()
    model.eval()
    features = model.features(images)
    return guides(trial, method, now) | {
        "guide loss": F.mse_loss(features, now.server["guides"][labels]).item(),
        "cross-entropy": F.cross_entropy(model.head(features), labels).item(),
    }


CAUSES: dict[str, Causes] = {
    **dict.fromkeys(("SGPT", "SGPT, mean readout", "SGPT as printed"), groups),
    "FedL2G-f": losses,
}
"""What explains a row: the rows of :data:`ABLATIONS` by their title."""


BOUNDS = {"fedl2g": 0.04}
"""Largest difference of an accuracy between two processors, measured; elsewhere 0.01."""
RISE = {"fedhpl": {}, "sgpt": {}, "fedl2g": {"rise": "rise, 0.01 nats"}, "fedotp": {}}


def task(name: str) -> Task:
    """Make the task of the ablations of a paper."""
    settings = {key: values for key, values in ABLATIONS.items() if key.startswith(name)}
    first = next(iter(settings.values()))
    title = ROWS[first["rows"]][0].title
    return Task(
        title=title,
        partitions={key: values["title"] for key, values in settings.items()},
        hours=lambda partition, row: settings[partition].get("seconds", 15) / 3600,
        rows=lambda partition: ROWS[settings[partition]["rows"]],
        make=make,
        columns=COLUMNS | {"lowest": "lowest client", "highest": "highest client"} | RISE[name],
        references={title: [title]},
        compared=[first["compared"]],
        causes=lambda partition, row: CAUSES.get(row.title) or explained(partition, row),
        bound=BOUNDS.get(name, 0.01),
    )


TASKS = {f"ablations-{name}": task(name) for name in ("fedhpl", "sgpt", "fedl2g", "fedotp")}
