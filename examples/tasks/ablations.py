"""Where each paper's mechanism can act: two settings a paper, and the row without the mechanism.

The settings were chosen before any of them ran. Hyperparameters are those of the gallery's study,
with models of the same kind; those of FedL2G were chosen on held-out images of other settings.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import fedprompt as fp
from fedprompt import samples
from fedprompt.methods import Setting, VitSetting
from tasks import digits, networks
from tasks.core import COLUMNS, Machine, Row, Task, Trial
from tasks.epochs import EpochFederation, NetworkSetting

CLASSES = len(samples.CLASS_NAMES)


class Side(NamedTuple):
    """Digits with their domains."""

    images: Tensor
    labels: Tensor
    domains: Tensor

    def cells(self) -> Tensor:
        """Return the pair of domain and class of each image, as one number."""
        return self.domains * CLASSES + self.labels


def sides(seed: int, changes: Sequence[Callable[[Tensor], Tensor]]) -> list[Side]:
    """Split the digits into training and test images, each in one of several domains in turn."""
    split = samples.digits(seed, domain=samples.raw)
    order = torch.randperm(len(split.train_labels), generator=torch.Generator().manual_seed(seed))
    found = []
    for images, labels in (
        (split.train_images[order], split.train_labels[order]),
        (split.test_images, split.test_labels),
    ):
        images, domains = digits.changed(images, changes)
        found.append(Side(images, labels, domains))
    return found


def trial(
    build: Callable[..., Setting],
    train: Side,
    test: Side,
    shards: Iterable[np.ndarray],
    *,
    seed: int,
    **budget: Any,
) -> Trial:
    """Make a trial of clients that all take part."""
    owned = {client: torch.as_tensor(shard) for client, shard in enumerate(shards)}
    cells, count = train.cells(), CLASSES * (1 + int(train.domains.max()))
    setting = build(
        clients=range(len(owned)),
        num_classes=CLASSES,
        seed=seed,
        public=train.images[:0],
        **budget,
    )
    federation = EpochFederation(setting, train.images, train.labels, owned)
    mixes = torch.stack([torch.bincount(cells[own], minlength=count) for own in owned.values()])
    return Trial(setting, federation, test.images, test.cells(), mixes)


VIT = {
    "steps": 8,
    "batch_size": 32,
    "augment": samples.augment,
    "make_optimizer": partial(torch.optim.AdamW, weight_decay=1e-3),
}


def unlike_trunks(seed: int, *, classes: int, images: int | None) -> Trial:
    """Make 15 clients with three unlike trunks and a few classes each, or a few images of all."""
    train, test = sides(seed, [samples.inverted_rotated])
    drawn = {"num_clients": 15, "generator": np.random.default_rng(seed)}
    if classes < CLASSES:
        shards = fp.pathological(train.labels, classes_per_client=classes, **drawn)
    else:
        shards = fp.iid(train.labels, **drawn)
    trunks = [digits.trunk(size) for size in "SBL"]
    build = partial(VitSetting, trunks=trunks, num_features=48)
    few = [shard[:images] for shard in shards]
    return trial(build, train, test, few, seed=seed, rounds=20, cohort_size=6, **VIT)


def one_client(seed: int) -> Trial:
    """Make one client that has all images."""
    train, test = sides(seed, [samples.inverted_rotated])
    budget = VIT | {"rounds": 10, "steps": 45, "cohort_size": 1}
    build = partial(VitSetting, trunks=[digits.trunk("B")])
    return trial(build, train, test, [np.arange(len(train.labels))], seed=seed, **budget)


def few_kinds(seed: int, changes: Sequence[Callable[[Tensor], Tensor]]) -> Trial:
    """Make twenty clients of a few domains, one domain each."""
    train, test = sides(seed, changes)
    owned = fp.by_domain(train.domains)
    parts = [np.array_split(images, 20 // len(owned)) for images in owned]
    shards = [part for domain in parts for part in domain]
    build = partial(VitSetting, trunks=[digits.trunk("S")])
    return trial(build, train, test, shards, seed=seed, rounds=40, cohort_size=5, **VIT)


def unlike_networks(seed: int, *, alpha: float | None) -> Trial:
    """Make sixteen clients with eight kinds of networks and 40 images each."""
    train, test = sides(seed, [samples.inverted_rotated])
    drawn = {"num_clients": 16, "generator": np.random.default_rng(seed)}
    if alpha is None:
        shards = fp.iid(train.labels, **drawn)
    else:
        shards = fp.dirichlet(train.labels, alpha=alpha, min_size=40, **drawn)
    build = partial(
        NetworkSetting,
        makers=list(networks.TINY.values()),
        num_features=32,
        prepare=lambda images: 2 * images - 1,
        epochs=2,
        augment=samples.augment,
        make_optimizer=torch.optim.SGD,
    )
    rng = np.random.default_rng(seed)
    few = [rng.permutation(shard)[:40] for shard in shards]
    budget = {"rounds": 20, "steps": 0, "cohort_size": 8, "batch_size": 10}
    return trial(build, train, test, few, seed=seed, **budget)


def few_shots(seed: int, *, shots: int, classes: int, domains: Sequence[str]) -> Trial:
    """Make ten clients with a few images of each of their classes, small and among clutter."""
    split, rng = samples.digits(seed, domain=samples.raw), torch.Generator().manual_seed(seed)
    order = torch.randperm(len(split.train_labels), generator=rng)
    placed = []
    for images, labels in (
        (split.train_images[order], split.train_labels[order]),
        (split.test_images, split.test_labels),
    ):
        canvases, of = samples.on_canvases(images, rng, domains=domains, smallest=12, largest=20)
        placed.append(Side(digits.tokens(canvases), labels, of))
    train, test = placed
    draw = np.random.default_rng(seed)
    if len(domains) > 1:
        owned = fp.by_domain(train.domains)
        parts = [np.array_split(own, -(-10 // len(domains))) for own in owned]
        shards = [parts[client % len(parts)][client // len(parts)] for client in range(10)]
    else:
        shards = fp.pathological(train.labels, 10, classes_per_client=classes, generator=draw)
    few = [
        shard[fp.data.few_shot(train.labels[torch.as_tensor(shard)], shots=shots, generator=draw)]
        for shard in shards
    ]
    budget = {"rounds": 15, "steps": 8, "batch_size": 32, "cohort_size": 5}
    return trial(digits.clip, train, test, few, seed=seed, **budget)
