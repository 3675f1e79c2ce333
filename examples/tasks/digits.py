"""Handwritten digits: one network, three networks, or a CLIP, divided in three ways.

One client in six never trains.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import build_samples
import fedprompt as fp
from fedprompt import samples
from fedprompt.interfaces import Trunk
from fedprompt.methods import METHODS, ClipSetting, Federation, Setting
from tasks.controls import CONTROLS
from tasks.core import COLUMNS, HEAD_RATE, NEWCOMERS, Machine, Row, Task, Trial
from tasks.heads import HeadSetting
from tasks.tuning import draws, two_rates


@dataclass(frozen=True)
class Budget:
    """Budget of a run, the same for every method.

    Attributes:
        rounds: Number of rounds.
        steps: Number of batches of a client in a round.
        batch_size: Number of inputs in a batch.
        cohort_size: Number of clients in a round.
        num_clients: Number of clients, with those that never train.
        num_public: Number of public inputs without labels.
        num_test: Maximum number of test inputs.
    """

    rounds: int = 15
    steps: int = 8
    batch_size: int = 32
    cohort_size: int = 5
    num_clients: int = 18
    num_public: int = 100
    num_test: int = 597

    @property
    def num_newcomers(self) -> int:
        """Number of clients that never train, one in six."""
        return self.num_clients // 6


BUDGET = Budget()
ALPHA = 0.3
SECONDS = {"one model": 14, "mixed models": 18, "CLIP": 6}
"""Seconds of a run."""
PARTITIONS = {
    "dirichlet": "label shift (Dirichlet .3)",
    "domains": "feature shift (one domain for each client)",
    "few": "50 images each, IID",
}


class Digits(NamedTuple):
    """Training, public and test digits, with the domain of each training and test input."""

    train: Tensor
    labels: Tensor
    domains: Tensor
    public: Tensor
    test: Tensor
    test_labels: Tensor
    test_domains: Tensor
    num_domains: int


def vits(sizes: str, **common: Any) -> HeadSetting:
    """Make a setting of frozen ViTs, given to the clients in turn."""
    width = None if len(sizes) == 1 else 48
    trunks = [trunk(size) for size in sizes]
    return HeadSetting(augment=samples.augment, trunks=trunks, num_features=width, **common)


def clip(**common: Any) -> ClipSetting:
    """Make a setting of one frozen CLIP, whose image tokens are computed once."""
    model = samples.clip()
    return ClipSetting(
        clip=model,
        tower=fp.TextTower(model, samples.tokenize),
        class_names=samples.CLASS_NAMES,
        scale=model.logit_scale.exp().item(),
        template=samples.TEMPLATES[""][0],
        **{**common, "make_optimizer": torch.optim.Adam},
    )


def make(
    on_canvases: bool,
    build: Callable[..., Setting],
    partition: str,
    row: Row,
    *,
    seed: int,
    machine: Machine,
    validate: bool,
) -> Trial:
    """Divide the digits over clients."""
    shifted = partition == "domains"
    split = digits(on_canvases, shifted, seed, validate, row.entry.inputs)
    num_cells = 10 * split.num_domains
    cells, test_cells = (
        domains * 10 + labels
        for domains, labels in (
            (split.domains, split.labels),
            (split.test_domains, split.test_labels),
        )
    )
    count, rng = BUDGET.num_clients, np.random.default_rng(seed)
    owned = [torch.as_tensor(each) for each in shards(split, partition, count, rng)]
    mixes = torch.stack([torch.bincount(cells[each], minlength=num_cells) for each in owned])
    first = count - BUDGET.num_newcomers
    setting = build(
        clients=range(first),
        num_classes=10,
        rounds=-(-BUDGET.rounds // 2) if validate else BUDGET.rounds,
        steps=BUDGET.steps,
        cohort_size=BUDGET.cohort_size,
        batch_size=BUDGET.batch_size,
        seed=seed,
        public=split.public,
        make_optimizer=partial(torch.optim.AdamW, weight_decay=1e-3),
        **{name: value for name, value in row.values.items() if name == HEAD_RATE},
    )
    federation = Federation(setting, split.train, split.labels, dict(enumerate(owned)))
    trial = Trial(
        setting,
        federation,
        split.test[: BUDGET.num_test],
        test_cells[: BUDGET.num_test],
        mixes,
        range(first, count),
    )
    return trial.shrunk(machine.shrink)


def shards(split: Digits, partition: str, count: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Return the positions of the images of each client."""
    if partition == "dirichlet":
        smallest = len(split.labels) // count // 4
        return fp.data.dirichlet(
            split.labels, num_clients=count, alpha=ALPHA, min_size=smallest, generator=rng
        )
    if partition == "few":
        return [each[:50] for each in fp.data.iid(split.labels, num_clients=count, generator=rng)]
    owned, domains = fp.data.by_domain(split.domains), split.num_domains
    parts = [np.array_split(each, len(range(k, count, domains))) for k, each in enumerate(owned)]
    return [parts[client % domains][client // domains] for client in range(count)]


@cache
def trunk(size: str) -> Trunk:
    """Return a sample network as a trunk: "S", "B" or "L"."""
    return fp.vit_trunk(build_samples.vit(size))


@cache
def digits(on_canvases: bool, shifted: bool, seed: int, validate: bool, inputs: str) -> Digits:
    """Split the digits, in one domain or in several.

    All seeds have the same test images. With `validate`, training images take their place.
    """
    plain = not shifted and not on_canvases
    split = samples.digits(0, domain=samples.inverted_rotated if plain else samples.raw)
    order = torch.randperm(len(split.train_labels), generator=torch.Generator().manual_seed(seed))
    images, labels = split.train_images[order], split.train_labels[order]
    count = BUDGET.num_public
    public, images, labels = images[:count], images[count:], labels[count:]
    test, test_labels = split.test_images, split.test_labels
    if validate:
        cut = len(labels) * 3 // 4
        test, test_labels, images, labels = images[cut:], labels[cut:], images[:cut], labels[:cut]
    rng = fp.stream_generator(seed, server_round=0, purpose="domains")
    sides, domains = [], []
    for side in (images, public, test):
        side, domain = in_domains(side, shifted, on_canvases, rng)
        sides.append(tokens(side, inputs) if on_canvases else side)
        domains.append(domain)
    number = 1 + int(domains[0].max())
    return Digits(sides[0], labels, domains[0], sides[1], sides[2], test_labels, domains[2], number)


def in_domains(
    images: Tensor, shifted: bool, on_canvases: bool, rng: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return the images in their domains, and the domains."""
    if on_canvases:
        names = list(samples.DOMAINS) if shifted else ["inverted"]
        return samples.on_canvases(images, rng, domains=names, smallest=16, largest=24)
    if not shifted:
        return images, torch.zeros(len(images), dtype=torch.long)
    noisy = partial(samples.noisy, generator=rng)
    changes = (samples.raw, samples.inverted, samples.rotated, samples.inverted_rotated, noisy)
    return changed(images, changes)


def changed(images: Tensor, changes: Sequence[Callable[[Tensor], Tensor]]) -> tuple[Tensor, Tensor]:
    """Change the images in turn, and return the number of the change of each."""
    truth, images = torch.arange(len(images)) % len(changes), images.clone()
    for number, change in enumerate(changes):
        images[truth == number] = change(images[truth == number])
    return images, truth


@torch.no_grad()
def tokens(canvases: Tensor, inputs: str = "") -> Tensor:
    """Return the image tokens of CLIP with the pooled one first, or its preprocessed images."""
    images = samples.preprocess(canvases)
    if inputs == "images":
        return images
    pieces = [fp.image_tokens(samples.clip(), batch) for batch in images.split(256)]
    return torch.cat([torch.cat([pooled[:, None], patches], 1) for pooled, patches in pieces])


def task(title: str, family: str, build: Callable[..., Setting], **references: str) -> Task:
    """Make a task with all methods of a family; references are names, separated by spaces."""

    def rows(partition: str) -> list[Row]:
        known = (*METHODS.values(), *CONTROLS.values())
        own = [entry for entry in known if family in entry.families]
        found = [Row(entry.title, entry.name, entry.defaults) for entry in own]
        return found if family == "CLIP" else [two_rates(row) for row in found]

    return Task(
        title=title,
        partitions=PARTITIONS,
        hours=lambda partition, row: SECONDS[family] / 3600,
        family=lambda partition: family,
        rows=rows,
        make=partial(make, family == "CLIP", build),
        trials=lambda partition, row: draws(row, title),
        tuned_on="dirichlet",
        columns=COLUMNS | NEWCOMERS,
        references={
            word: [(METHODS | CONTROLS)[name].title for name in names.split()]
            for word, names in references.items()
        },
    )


LOCAL = "local local_16 local_24"  # each row is compared with the one that takes as many passes
TASKS = {
    "digits": task(
        "digits",
        "one model",
        partial(vits, "S"),
        local="local local_16 local_24",
        FedAvg="fedvpt_d",
    ),
    "networks": task("heterogeneous-digits", "mixed models", partial(vits, "SBL"), local="local"),
    "clip": task("clip-digits", "CLIP", clip, local="coop", FedAvg="promptfl"),
}
