"""Where each paper's mechanism can act: two settings a paper, and the row without the mechanism.

The settings were chosen before any of them ran. Hyperparameters are those of an earlier study,
with models of the same kind; those of FedL2G were chosen on held-out images of other settings.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import fedprompt as fp
import photographs
from build_samples import digits_clip
from build_samples.canvas import on_canvases as put
from fedprompt import samples
from fedprompt.compare.problems import COLUMNS, Causes
from fedprompt.compare.rows import Row
from fedprompt.compare.trials import Images, Trial
from fedprompt.methods import VitSetting
from tasks import digits
from tasks.core import Machine, Task, content, explained, guides, trial
from tasks.epochs import NetworkSetting
from zoo import IMAGE_SIZE, TINY

CLASSES = len(digits_clip.CLASS_NAMES)


def sides(seed: int, *domains: str, on_canvases: bool = False) -> list[Images]:
    """Split the digits into training and test images, each in one of several domains in turn.

    On canvases, digits are small and among clutter, and images are the tokens of CLIP.
    """
    split = samples.digits(seed, domain=samples.raw)
    rng = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(split.train_labels), generator=rng)
    found = []
    for images, labels in (
        (split.train_images[order], split.train_labels[order]),
        (split.test_images, split.test_labels),
    ):
        if on_canvases:
            sizes = {"smallest": 12, "largest": 20}
            canvases, truth = put(images, rng, domains=domains, **sizes)
            images = digits.tokens(canvases)
        else:
            images, truth = digits.changed(images, [getattr(samples, name) for name in domains])
        found.append(Images(images, labels, truth))
    return found


VIT = {
    "steps": 8,
    "batch_size": 32,
    "augment": samples.augment,
    "make_optimizer": partial(torch.optim.AdamW, weight_decay=1e-3),
}


def unlike_trunks(seed: int, *, classes: int, images: int | None = None) -> Trial:
    """Make 15 clients with three unlike trunks and a few classes each, or a few images of all."""
    train, test = sides(seed, "inverted_rotated")
    drawn = {"num_clients": 15, "generator": np.random.default_rng(seed)}
    if classes < CLASSES:
        shards = fp.data.pathological(train.labels, classes_per_client=classes, **drawn)
    else:
        shards = fp.data.iid(train.labels, **drawn)
    trunks = [digits.trunk(size) for size in "SBL"]
    build = partial(VitSetting, trunks=trunks, num_features=48)
    few = [shard[:images] for shard in shards]
    return trial(build, train, test, few, seed=seed, rounds=20, cohort_size=6, **VIT)


def few_kinds(seed: int, *, domains: Sequence[str]) -> Trial:
    """Make twenty clients of a few domains, one domain each."""
    train, test = sides(seed, *domains)
    owned = fp.data.by_domain(train.domains)
    parts = [np.array_split(images, 20 // len(owned)) for images in owned]
    shards = [part for domain in parts for part in domain]
    build = partial(VitSetting, trunks=[digits.trunk("S")])
    return trial(build, train, test, shards, seed=seed, rounds=40, cohort_size=5, **VIT)


def networks(names: Iterable[str], **options: Any) -> Any:
    """Make a function that makes the setting of small networks, trained from random values."""
    return partial(
        NetworkSetting,
        makers=[TINY[name] for name in names],
        num_features=32,
        prepare=lambda images: 2 * images - 1,
        make_optimizer=torch.optim.SGD,
        **options,
    )


def unlike_networks(seed: int, *, alpha: float | None = None) -> Trial:
    """Make sixteen clients with eight kinds of networks and 40 images each."""
    train, test = sides(seed, "inverted_rotated")
    drawn = {"num_clients": 16, "generator": np.random.default_rng(seed)}
    if alpha is None:
        shards = fp.data.iid(train.labels, **drawn)
    else:
        shards = fp.data.dirichlet(train.labels, alpha=alpha, min_size=40, **drawn)
    build = networks(TINY, epochs=2, augment=samples.augment)
    rng = np.random.default_rng(seed)
    few = [rng.permutation(shard)[:40] for shard in shards]
    budget = {"rounds": 20, "steps": 0, "cohort_size": 8, "batch_size": 10}
    return trial(build, train, test, few, seed=seed, **budget)


def many_rounds(seed: int) -> Trial:
    """Make twenty clients with four kinds of networks, which divide MNIST by Dirichlet .1."""
    data = photographs.mnist()
    images = F.interpolate(data.images.float() / 255, (IMAGE_SIZE, IMAGE_SIZE), mode="area")
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    parts = order.split(len(order) * 3 // 4)
    train, test = (Images(images, data.labels, data.domains).at(part) for part in parts)
    draw = {"alpha": 0.1, "min_size": 40, "generator": np.random.default_rng(seed)}
    shards = fp.data.dirichlet(train.labels, num_clients=20, **draw)
    build = networks(["cnn", "resnet", "mobilenet", "wide_resnet"], epochs=1, drop_last=True)
    budget = {"rounds": 200, "steps": 0, "cohort_size": 20, "batch_size": 10}
    return trial(build, train, test, shards, seed=seed, **budget)


def few_shots(seed: int, *, shots: int, classes: int, domains: Sequence[str]) -> Trial:
    """Make ten clients with a few images of each of their classes, small and among clutter."""
    train, test = sides(seed, *domains, on_canvases=True)
    draw = np.random.default_rng(seed)
    if len(domains) > 1:
        owned = fp.data.by_domain(train.domains)
        parts = [np.array_split(images, -(-10 // len(domains))) for images in owned]
        shards = [parts[client % len(parts)][client // len(parts)] for client in range(10)]
    else:
        shards = fp.data.pathological(train.labels, 10, classes_per_client=classes, generator=draw)
    few = [
        shard[fp.data.few_shot(train.labels[torch.as_tensor(shard)], shots=shots, generator=draw)]
        for shard in shards
    ]
    budget = {"rounds": 15, "steps": 8, "batch_size": 32, "cohort_size": 5}
    return trial(digits.clip, train, test, few, seed=seed, **budget)


MAKERS = {
    make.__name__: make
    for make in (unlike_trunks, few_kinds, unlike_networks, many_rounds, few_shots)
}
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
    chosen = ABLATIONS[partition]
    return MAKERS[chosen["make"]](seed, **chosen["values"]).shrunk(machine.shrink)


@torch.no_grad()
def groups(trial: Trial, method: fp.Method, now: fp.Round) -> dict[str, float]:
    """Measure how the groups of SGPT are selected, and what their prompts change."""
    model = now.model(method, trial.federation.data(0, now.server_round))
    domains, labels = trial.test_cells // CLASSES, trial.test_cells % CLASSES
    batches, num_groups = trial.test.split(256), len(model.selector.keys)
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
    data = trial.federation.data(0, now.server_round)
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
    )


TASKS = {f"ablations-{name}": task(name) for name in ("fedhpl", "sgpt", "fedl2g", "fedotp")}
