"""Where each paper's mechanism can act: two settings a paper, and the row without the mechanism.

The settings were chosen before any of them ran. Hyperparameters are those of the gallery's study,
with models of the same kind; those of FedL2G were chosen on held-out images of other settings.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import fedprompt as fp
import photographs
from fedprompt import samples
from fedprompt.methods import Setting, VitSetting
from tasks import digits
from tasks.core import COLUMNS, Causes, Machine, Row, Task, Trial
from tasks.epochs import EpochFederation, NetworkSetting
from zoo import IMAGE_SIZE, TINY

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
        clients=range(len(owned)), num_classes=CLASSES, seed=seed, public=train.images[:0], **budget
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
        shards = fp.data.pathological(train.labels, classes_per_client=classes, **drawn)
    else:
        shards = fp.data.iid(train.labels, **drawn)
    trunks = [digits.trunk(size) for size in "SBL"]
    build = partial(VitSetting, trunks=trunks, num_features=48)
    few = [shard[:images] for shard in shards]
    return trial(build, train, test, few, seed=seed, rounds=20, cohort_size=6, **VIT)


def few_kinds(seed: int, changes: Sequence[Callable[[Tensor], Tensor]]) -> Trial:
    """Make twenty clients of a few domains, one domain each."""
    train, test = sides(seed, changes)
    owned = fp.data.by_domain(train.domains)
    parts = [np.array_split(images, 20 // len(owned)) for images in owned]
    shards = [part for domain in parts for part in domain]
    build = partial(VitSetting, trunks=[digits.trunk("S")])
    return trial(build, train, test, shards, seed=seed, rounds=40, cohort_size=5, **VIT)


def unlike_networks(seed: int, *, alpha: float | None) -> Trial:
    """Make sixteen clients with eight kinds of networks and 40 images each."""
    train, test = sides(seed, [samples.inverted_rotated])
    drawn = {"num_clients": 16, "generator": np.random.default_rng(seed)}
    if alpha is None:
        shards = fp.data.iid(train.labels, **drawn)
    else:
        shards = fp.data.dirichlet(train.labels, alpha=alpha, min_size=40, **drawn)
    build = partial(
        NetworkSetting,
        makers=list(TINY.values()),
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


def many_rounds(seed: int) -> Trial:
    """Make twenty clients with four kinds of networks, which divide MNIST by Dirichlet .1."""
    data = photographs.mnist()
    images = F.interpolate(data.images.float() / 255, (IMAGE_SIZE, IMAGE_SIZE), mode="area")
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    train, test = (
        Side(images[part], data.labels[part], data.domains[part])
        for part in order.split(len(order) * 3 // 4)
    )
    draw = {"alpha": 0.1, "min_size": 40, "generator": np.random.default_rng(seed)}
    shards = fp.data.dirichlet(train.labels, num_clients=20, **draw)
    build = partial(
        NetworkSetting,
        makers=[TINY[name] for name in ("cnn", "resnet", "mobilenet", "wide_resnet")],
        num_features=32,
        prepare=lambda images: 2 * images - 1,
        epochs=1,
        drop_last=True,
        make_optimizer=torch.optim.SGD,
    )
    budget = {"rounds": 200, "steps": 0, "cohort_size": 20, "batch_size": 10}
    return trial(build, train, test, shards, seed=seed, **budget)


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
        owned = fp.data.by_domain(train.domains)
        parts = [np.array_split(own, -(-10 // len(domains))) for own in owned]
        shards = [parts[client % len(parts)][client // len(parts)] for client in range(10)]
    else:
        shards = fp.data.pathological(train.labels, 10, classes_per_client=classes, generator=draw)
    few = [
        shard[fp.data.few_shot(train.labels[torch.as_tensor(shard)], shots=shots, generator=draw)]
        for shard in shards
    ]
    budget = {"rounds": 15, "steps": 8, "batch_size": 32, "cohort_size": 5}
    return trial(digits.clip, train, test, few, seed=seed, **budget)


FEDHPL = (
    Row("FedHPL", "fedhpl", {"learning_rate": 0.01, "distillation_weight": 1.0}),
    Row("FedHPL, no distillation", "fedhpl", {"learning_rate": 0.01, "distillation_weight": 0.0}),
)
SGPT_VALUES = {"learning_rate": 0.00481, "num_groups": 10}
SGPT = (
    Row("SGPT", "sgpt", SGPT_VALUES),
    Row("SGPT, one group", "sgpt", SGPT_VALUES | {"num_groups": 1}),
    Row("FedVPT-D", "fedvpt_d", {"learning_rate": 0.01}),
)
FEDL2G = (
    Row("FedL2G-f", "fedl2g_f", {"learning_rate": 0.2, "guide_weight": 3.0, "server_rate": 10.0}),
    Row(
        "fixed random features",
        "fedl2g_f",
        {"learning_rate": 0.2, "guide_weight": 3.0, "server_rate": 0.0},
    ),
    Row("Local training", "local", {"learning_rate": 0.2}),
)
PAPER = {"learning_rate": 0.01, "guide_weight": 1.0, "warm_up": 50}
FEDL2G_LONG = (
    Row("FedL2G-f", "fedl2g_f", PAPER | {"server_rate": 100.0}),
    Row("fixed random features", "fedl2g_f", PAPER | {"server_rate": 0.0}),
    Row("FedL2G-l", "fedl2g_l", PAPER | {"server_rate": 0.1}),
    Row("Local training", "local", {"learning_rate": 0.01}),
)
FEDOTP = (
    Row("FedOTP", "fedotp", {"learning_rate": 0.00928, "mass": 0.897}),
    Row("FedOTP, no transport", "fedotp_average", {"learning_rate": 0.00306}),
    Row("FedOTP, rate 0.003", "fedotp", {"learning_rate": 0.00306, "mass": 0.897}),
    Row("FedOTP, no transport, rate 0.009", "fedotp_average", {"learning_rate": 0.00928}),
    Row("PromptFL", "promptfl", {"learning_rate": 0.00188}),
    Row("CoOp (local)", "coop", {"learning_rate": 0.00346}),
)


class Ablation(NamedTuple):
    """Setting in which a mechanism should decide.

    Attributes:
        title: Title in tables.
        compared: Column of the differences to the first row.
        make: Function from a seed to the trial.
        rows: The method, the row without its mechanism, and references.
        seconds: Seconds of a run.
    """

    title: str
    compared: str
    make: Callable[[int], Trial]
    rows: Sequence[Row]
    seconds: int = 15


ABLATIONS = {
    "fedhpl-classes": Ablation(
        title="unlike trunks, four classes a client",
        compared="full",
        make=partial(unlike_trunks, classes=4, images=None),
        rows=FEDHPL,
    ),
    "fedhpl-few": Ablation(
        title="unlike trunks, 30 images a client",
        compared="full",
        make=partial(unlike_trunks, classes=10, images=30),
        rows=FEDHPL,
    ),
    "sgpt-two": Ablation(
        title="20 clients of two domains, 40 rounds",
        compared="worst",
        make=partial(few_kinds, changes=[samples.inverted_rotated, samples.raw]),
        rows=SGPT,
    ),
    "sgpt-four": Ablation(
        title="20 clients of four domains, 40 rounds",
        compared="worst",
        make=partial(
            few_kinds,
            changes=[samples.raw, samples.inverted, samples.rotated, samples.inverted_rotated],
        ),
        rows=SGPT,
    ),
    "fedl2g-iid": Ablation(
        title="unlike networks, 40 images a client, all classes",
        compared="own",
        make=partial(unlike_networks, alpha=None),
        rows=FEDL2G,
    ),
    "fedl2g-dirichlet": Ablation(
        title="unlike networks, 40 images a client, Dirichlet .3",
        compared="own",
        make=partial(unlike_networks, alpha=0.3),
        rows=FEDL2G,
    ),
    "fedl2g-rounds": Ablation(
        title="unlike networks, MNIST, Dirichlet .1, 200 rounds",
        compared="own",
        make=many_rounds,
        rows=FEDL2G_LONG,
        seconds=600,
    ),
    "fedotp-domains": Ablation(
        title="small digits among clutter, four shots, three domains",
        compared="own",
        make=partial(few_shots, shots=4, classes=10, domains=list(samples.DOMAINS)),
        rows=FEDOTP,
    ),
    "fedotp-classes": Ablation(
        title="small digits among clutter, eight shots, two classes a client",
        compared="own",
        make=partial(few_shots, shots=8, classes=2, domains=["inverted"]),
        rows=FEDOTP,
    ),
}


def make(partition: str, row: Row, *, seed: int, machine: Machine, validate: bool) -> Trial:
    """Make the trial of an ablation."""
    return ABLATIONS[partition].make(seed).shrunk(machine.shrink)


@torch.no_grad()
def groups(trial: Trial, method: fp.Method, now: fp.Round) -> dict[str, float]:
    """Measure how the groups of SGPT are selected, and what their prompts change."""
    model = now.model(method, trial.federation.data(0, now.server_round))
    domains, labels = trial.test_cells // CLASSES, trial.test_cells % CLASSES
    batches, num_groups = trial.test.split(256), len(model.selector.keys)
    chosen = [model.selector(model.query(each)).indices for each in batches]
    found = torch.cat(chosen), domains, num_groups, 1 + int(domains.max())
    table = fp.selection.contingency_table(*found).float()
    used, health = table[table.any(1)], fp.selection.selection_health(table.sum(1))
    shares = used.amax(1) / used.sum(1)
    pairs = list(zip(batches, chosen, strict=True))
    own = torch.cat([model.logits(*pair).argmax(1) for pair in pairs])
    none = torch.cat([model.logits(each).argmax(1) for each in batches])
    other = torch.cat([model.logits(each, (of + 1) % num_groups).argmax(1) for each, of in pairs])
    return {
        "effective groups": health["effective_groups"],
        "dead groups": health["dead_groups"],
        "images in the group of their domain": fp.selection.clustering_accuracy(table),
        "smallest share of the main domain of a group": shares.min().item(),
        "groups of one domain": (shares == 1).sum().item(),
        "accuracy with the selected groups": (own == labels).float().mean().item(),
        "accuracy without groups": (none == labels).float().mean().item(),
        "predictions that the next group changes": (own != other).float().mean().item(),
    }


@torch.no_grad()
def guides(trial: Trial, method: fp.Method, now: fp.Round) -> dict[str, float]:
    """Measure how far the guides of FedL2G-f moved, and the two losses of the first client."""
    data = trial.federation.data(0, now.server_round)
    model, (images, labels) = now.model(method, data), data.own()
    first, last = method.server.state["guides"], now.server["guides"]
    model.eval()
    features = model.features(images)
    return {
        "distance of the guides, of their first norm": float((last - first).norm() / first.norm()),
        "guide loss": F.mse_loss(features, last[labels]).item(),
        "cross-entropy": F.cross_entropy(model.head(features), labels).item(),
    }


CAUSES: dict[str, Causes] = {"SGPT": groups, "FedL2G-f": guides}
"""What explains a row: the rows of :data:`ABLATIONS` by their title."""


RISE = {"fedhpl": {}, "sgpt": {}, "fedl2g": {"rise": "rise, 0.01 nats"}, "fedotp": {}}


def task(name: str) -> Task:
    """Make the task of the ablations of a paper."""
    own = {key: each for key, each in ABLATIONS.items() if key.startswith(name)}
    first = next(iter(own.values())).rows[0]
    return Task(
        title=first.title,
        partitions={key: each.title for key, each in own.items()},
        hours=lambda partition, row: own[partition].seconds / 3600,
        family=lambda partition: "one model",
        rows=lambda partition: own[partition].rows,
        make=make,
        columns=COLUMNS | {"lowest": "lowest client", "highest": "highest client"} | RISE[name],
        references={first.title: [first.title]},
        compared=[next(iter(own.values())).compared],
        causes=lambda partition, row: CAUSES.get(row.title),
    )


TASKS = {f"ablations-{name}": task(name) for name in ("fedhpl", "sgpt", "fedl2g", "fedotp")}
