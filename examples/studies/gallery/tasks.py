"""Tasks of the study: federations of handwritten digits, with their test inputs.

A task is a kind of model. It has three settings, which are ways to divide the same digits over the
clients. One client in six never trains.
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
from methods.federation import ClipFederation, Federation, VitFederation


@dataclass(frozen=True)
class Settings:
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


QUICK = Settings(
    rounds=2, steps=2, batch_size=8, cohort_size=2, num_clients=6, num_public=20, num_test=60
)
ALPHA = 0.3
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


class Trial(NamedTuple):
    """A federation and its test inputs.

    A cell is a pair of domain and class. The own mix of a client has its shares of the cells.

    Attributes:
        federation: Federation of a method.
        test: Test inputs.
        test_cells: Cell of each test input.
        mixes: Number of training inputs of each client in each cell, (clients, cells).
        newcomers: Ids of the clients that never train.
    """

    federation: Federation
    test: Tensor
    test_cells: Tensor
    mixes: Tensor
    newcomers: Sequence[int]


def digits_vit(split: Digits, common: dict[str, Any], inputs: str) -> Federation:
    """One frozen ViT for all clients."""
    return VitFederation(
        inputs=split.train,
        public=split.public,
        augment=samples.augment,
        trunks=[_trunk("S")],
        **common,
    )


def digits_mixed(split: Digits, common: dict[str, Any], inputs: str) -> Federation:
    """Three frozen ViTs of different sizes, given to the clients in turn."""
    return VitFederation(
        inputs=split.train,
        public=split.public,
        augment=samples.augment,
        trunks=[_trunk(size) for size in "SBL"],
        num_features=48,
        **common,
    )


def digits_clip(split: Digits, common: dict[str, Any], inputs: str) -> Federation:
    """One frozen CLIP, whose image tokens are computed once."""
    model = samples.clip()
    tower = fp.TextTower(model, samples.tokenize)
    return ClipFederation(
        inputs=split.train,
        public=split.public,
        clip=model,
        tower=tower,
        class_names=samples.CLASS_NAMES,
        scale=model.logit_scale.exp().item(),
        template=samples.TEMPLATES[""][0],
        **(common | {"make_optimizer": torch.optim.Adam}),
    )


class Task(NamedTuple):
    """A kind of model, the family of methods that can use it, and the two references.

    Attributes:
        family: Family of the methods.
        build: Function that makes the federation.
        local: Name of local training.
        average: Name of FedAvg, or None if models cannot be averaged.
        on_canvases: Whether the digits are put on cluttered canvases.
    """

    family: str
    build: Callable[[Digits, dict[str, Any], str], Federation]
    local: str
    average: str | None
    on_canvases: bool = False


TASKS = {
    "digits": Task("one model", digits_vit, "local", "fedvpt_d"),
    "heterogeneous-digits": Task("mixed models", digits_mixed, "local", None),
    "clip-digits": Task("CLIP", digits_clip, "coop", "promptfl", on_canvases=True),
}


def make_trial(
    task: str,
    partition: str,
    *,
    seed: int,
    settings: Settings,
    validate: bool = False,
    inputs: str = "",
) -> Trial:
    """Divide the digits over clients.

    Args:
        task: Name in `TASKS`.
        partition: Name in `PARTITIONS`.
        seed: Seed of the test split, the partition, initial values, cohorts and batches.
        settings: Budget.
        validate: Whether to test on a quarter of the training inputs, which then do not train.
        inputs: "images" if a method of CLIP needs images in place of their tokens.
    """
    split = _digits(task, partition == "domains", seed, settings.num_public, validate, inputs)
    num_cells = 10 * split.num_domains
    cells, test_cells = (
        domains * 10 + labels
        for domains, labels in (
            (split.domains, split.labels),
            (split.test_domains, split.test_labels),
        )
    )
    count, rng = settings.num_clients, np.random.default_rng(seed)
    shards = [torch.as_tensor(each) for each in _shards(split, partition, count, rng)]
    mixes = torch.stack([torch.bincount(cells[each], minlength=num_cells) for each in shards])
    first = count - settings.num_newcomers
    common = {
        "labels": split.labels,
        "shards": dict(enumerate(shards)),
        "clients": range(first),
        "num_classes": 10,
        "rounds": settings.rounds,
        "steps": settings.steps,
        "cohort_size": settings.cohort_size,
        "batch_size": settings.batch_size,
        "seed": seed,
        "make_optimizer": partial(torch.optim.AdamW, weight_decay=1e-3),
    }
    federation = TASKS[task].build(split, common, inputs)
    count_test = settings.num_test
    return Trial(
        federation, split.test[:count_test], test_cells[:count_test], mixes, range(first, count)
    )


def _shards(
    split: Digits, partition: str, count: int, rng: np.random.Generator
) -> list[np.ndarray]:
    if partition == "dirichlet":
        smallest = len(split.labels) // count // 4
        return fp.dirichlet(
            split.labels, num_clients=count, alpha=ALPHA, min_size=smallest, generator=rng
        )
    if partition == "few":
        return [each[:50] for each in fp.iid(split.labels, num_clients=count, generator=rng)]
    owned, domains = fp.by_domain(split.domains), split.num_domains
    parts = [np.array_split(each, len(range(k, count, domains))) for k, each in enumerate(owned)]
    return [parts[client % domains][client // domains] for client in range(count)]


@cache
def _trunk(size: str) -> fp.Trunk:
    return fp.vit_trunk(build_samples.vit(size))


@cache
def _digits(
    task: str, shifted: bool, seed: int, num_public: int, validate: bool, inputs: str
) -> Digits:
    """Split the digits, in one domain or in several."""
    on_canvases = TASKS[task].on_canvases
    plain = not shifted and not on_canvases
    split = samples.digits(seed, domain=samples.inverted_rotated if plain else samples.raw)
    order = torch.randperm(len(split.train_labels), generator=torch.Generator().manual_seed(seed))
    images, labels = split.train_images[order], split.train_labels[order]
    public, images, labels = images[:num_public], images[num_public:], labels[num_public:]
    test, test_labels = split.test_images, split.test_labels
    if validate:
        cut = len(labels) * 3 // 4
        test, test_labels, images, labels = images[cut:], labels[cut:], images[:cut], labels[:cut]
    rng = fp.stream_generator(seed, server_round=0, purpose="domains")
    sides, domains = [], []
    for side in (images, public, test):
        side, domain = _in_domains(side, shifted, on_canvases, rng)
        sides.append(_tokens(side, inputs) if on_canvases else side)
        domains.append(domain)
    count = 1 + int(domains[0].max())
    return Digits(sides[0], labels, domains[0], sides[1], sides[2], test_labels, domains[2], count)


def _in_domains(
    images: Tensor, shifted: bool, on_canvases: bool, rng: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return the images in their domains, and the domains."""
    if on_canvases:
        names = list(samples.DOMAINS) if shifted else ["inverted"]
        return samples.on_canvases(images, rng, domains=names, smallest=16, largest=24)
    truth = torch.zeros(len(images), dtype=torch.long)
    if not shifted:
        return images, truth
    changes = [
        samples.raw,
        samples.inverted,
        samples.rotated,
        samples.inverted_rotated,
        partial(samples.noisy, generator=rng),
    ]
    truth, images = torch.arange(len(images)) % len(changes), images.clone()
    for number, change in enumerate(changes):
        images[truth == number] = change(images[truth == number])
    return images, truth


@torch.no_grad()
def _tokens(canvases: Tensor, inputs: str) -> Tensor:
    """Return the image tokens of CLIP with the pooled one first, or its preprocessed images."""
    images = samples.preprocess(canvases)
    if inputs == "images":
        return images
    model, pieces = samples.clip(), []
    for batch in images.split(256):
        pooled, patches = fp.image_tokens(model, batch)
        pieces.append(torch.cat([pooled[:, None], patches], 1))
    return torch.cat(pieces)
