"""Settings in which each paper's mechanism should decide, and the rows that have it or not."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

import build_samples
import fedprompt as fp
from embedded import zoo
from fedprompt import samples
from methods.federation import ClipFederation, Federation, VitFederation
from studies.gallery.tasks import Trial
from studies.papers.federations import NetworkEpochs


@dataclass(frozen=True)
class Row:
    """A method with its hyperparameters."""

    title: str
    method: str
    values: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A federation in which a mechanism should decide, and its rows.

    Attributes:
        title: Title in tables.
        measure: Column of the gains.
        make: Function from a seed to the trial.
        rows: The method, the row without its mechanism, and references.
        columns: Columns of the table, in the order of `mechanisms.COLUMNS`.
    """

    title: str
    measure: str
    make: Callable[[int], Trial]
    rows: Sequence[Row]
    columns: Sequence[str] = ("full", "own", "worst")


@dataclass(frozen=True, kw_only=True)
class Side:
    """Digits with their domains."""

    images: Tensor
    labels: Tensor
    domains: Tensor

    def cells(self) -> Tensor:
        """Return the pair of domain and class of each image, as one number."""
        return self.domains * len(samples.CLASS_NAMES) + self.labels


def sides(seed: int, changes: Sequence[Callable[[Tensor], Tensor]]) -> list[Side]:
    """Split the digits into training and test images, each in one of several domains in turn."""
    split = samples.digits(seed, domain=samples.raw)
    order = torch.randperm(len(split.train_labels), generator=torch.Generator().manual_seed(seed))
    found = []
    for images, labels in (
        (split.train_images[order], split.train_labels[order]),
        (split.test_images, split.test_labels),
    ):
        domains, changed = torch.arange(len(labels)) % len(changes), images.clone()
        for number, change in enumerate(changes):
            changed[domains == number] = change(images[domains == number])
        found.append(Side(images=changed, labels=labels, domains=domains))
    return found


def trial(
    build: Callable[..., Federation],
    train: Side,
    test: Side,
    shards: Iterable[np.ndarray],
    *,
    seed: int,
    **budget: Any,
) -> Trial:
    """Make a federation of clients that all take part, with its test images."""
    owned = {client: torch.as_tensor(shard) for client, shard in enumerate(shards)}
    cells, count = train.cells(), len(samples.CLASS_NAMES) * (1 + int(train.domains.max()))
    federation = build(
        inputs=train.images,
        labels=train.labels,
        shards=owned,
        clients=range(len(owned)),
        num_classes=len(samples.CLASS_NAMES),
        seed=seed,
        public=train.images[:0],
        **budget,
    )
    mixes = torch.stack([torch.bincount(cells[own], minlength=count) for own in owned.values()])
    return Trial(federation, test.images, test.cells(), mixes, ())


@cache
def _trunk(size: str) -> fp.Trunk:
    return fp.vit_trunk(build_samples.vit(size))


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
    if classes < len(samples.CLASS_NAMES):
        shards = fp.pathological(train.labels, classes_per_client=classes, **drawn)
    else:
        shards = fp.iid(train.labels, **drawn)
    build = partial(VitFederation, trunks=[_trunk(size) for size in "SBL"], num_features=48)
    few = [shard[:images] for shard in shards]
    return trial(build, train, test, few, seed=seed, rounds=20, cohort_size=6, **VIT)


def one_client(seed: int) -> Trial:
    """Make one client that has all images."""
    train, test = sides(seed, [samples.inverted_rotated])
    build = partial(VitFederation, trunks=[_trunk("B")])
    budget = VIT | {"rounds": 10, "steps": 45, "cohort_size": 1}
    return trial(build, train, test, [np.arange(len(train.labels))], seed=seed, **budget)


def few_kinds(seed: int, changes: Sequence[Callable[[Tensor], Tensor]]) -> Trial:
    """Make twenty clients of a few domains, one domain each."""
    train, test = sides(seed, changes)
    owned = fp.by_domain(train.domains)
    parts = [np.array_split(images, 20 // len(owned)) for images in owned]
    shards = [part for domain in parts for part in domain]
    build = partial(VitFederation, trunks=[_trunk("S")])
    return trial(build, train, test, shards, seed=seed, rounds=40, cohort_size=5, **VIT)


def unlike_networks(seed: int, *, alpha: float | None) -> Trial:
    """Make sixteen clients with eight kinds of networks and 40 images each."""
    train, test = sides(seed, [samples.inverted_rotated])
    drawn = {"num_clients": 16, "generator": np.random.default_rng(seed)}
    shards = (
        fp.iid(train.labels, **drawn)
        if alpha is None
        else fp.dirichlet(train.labels, alpha=alpha, min_size=40, **drawn)
    )
    rng = np.random.default_rng(seed)
    build = partial(
        NetworkEpochs,
        makers=list(zoo.TINY.values()),
        num_features=32,
        prepare=lambda images: 2 * images - 1,
        epochs=2,
        device=torch.device("cpu"),
        changed=samples.augment,
        make_optimizer=torch.optim.SGD,
    )
    few = [rng.permutation(shard)[:40] for shard in shards]
    return trial(build, train, test, few, seed=seed, rounds=20, cohort_size=8, batch_size=10)


@cache
def _clip() -> tuple[Any, fp.TextTower]:
    model = samples.clip()
    return model, fp.TextTower(model, samples.tokenize)


@torch.no_grad()
def _tokens(canvases: Tensor) -> Tensor:
    pieces = [
        fp.image_tokens(_clip()[0], batch) for batch in samples.preprocess(canvases).split(256)
    ]
    return torch.cat([torch.cat([pooled[:, None], patches], 1) for pooled, patches in pieces])


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
        placed.append(Side(images=_tokens(canvases), labels=labels, domains=of))
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
    clip, tower = _clip()
    build = partial(
        ClipFederation,
        clip=clip,
        tower=tower,
        class_names=samples.CLASS_NAMES,
        scale=clip.logit_scale.exp().item(),
        template=samples.TEMPLATES[""][0],
        make_optimizer=torch.optim.Adam,
    )
    budget = {"rounds": 15, "steps": 8, "batch_size": 32, "cohort_size": 5}
    return trial(build, train, test, few, seed=seed, **budget)


FEDHPL = (
    Row("FedHPL", "fedhpl", {"learning_rate": 0.01, "distillation_weight": 1.0}),
    Row("FedHPL, no distillation", "fedhpl", {"learning_rate": 0.01, "distillation_weight": 0.0}),
    Row(
        "FedHPL +P +H",
        "fedhpl",
        {
            "learning_rate": 0.01,
            "distillation_weight": 1.0,
            "share": ["prompts", "projection", "head"],
        },
    ),
)
CENTRAL = (
    Row("deep prompts and head", "fedvpt_d", {"learning_rate": 0.01}),
    Row("shallow prompts and head", "fedvpt", {"learning_rate": 0.01}),
    Row("head", "head_tuning", {"learning_rate": 0.03}),
)
SHARED, GROUPS = ["shared", "head"], ["groups", "selector", "head"]
SGPT_VALUES = {"learning_rate": 0.00481, "num_groups": 10}
LEFT_OUT = {
    "one group": {"num_groups": 1},
    "shared only": {"blocks": [SHARED]},
    "group only": {"blocks": [GROUPS]},
    "joint": {"blocks": [["shared", *GROUPS]]},
    "inverted order": {"blocks": [GROUPS, SHARED]},
    "no calibration": {"offset": 1e6},
    "no momentum": {"decay": 0.0},
    "averaged tokens": {"averaged": True},
    **{f"groups at layer {layer}": {"layers": [layer]} for layer in range(3)},
}
SGPT = (
    Row("SGPT", "sgpt", SGPT_VALUES),
    *(Row(f"SGPT, {title}", "sgpt", SGPT_VALUES | new) for title, new in LEFT_OUT.items()),
    Row("FedVPT-D", "fedvpt_d", {"learning_rate": 0.01}),
)
FEDL2G = (
    Row("FedL2G-f", "fedl2g_f", {"learning_rate": 0.2, "guide_weight": 3.0, "server_rate": 10.0}),
    Row(
        "fixed random features",
        "fedl2g_f",
        {"learning_rate": 0.2, "guide_weight": 3.0, "server_rate": 0.0},
    ),
    Row("FedL2G-l", "fedl2g_l", {"learning_rate": 0.2, "guide_weight": 1.0, "server_rate": 10.0}),
    Row(
        "fixed random logits",
        "fedl2g_l",
        {"learning_rate": 0.2, "guide_weight": 1.0, "server_rate": 0.0},
    ),
    Row("Local training", "local", {"learning_rate": 0.2}),
    Row("Local training, quiz held back", "fedl2g_f", {"learning_rate": 0.2, "guide_weight": 0.0}),
)
FEDOTP = (
    Row("FedOTP", "fedotp", {"learning_rate": 0.00928, "mass": 0.897}),
    Row("FedOTP, no transport", "fedotp_average", {"learning_rate": 0.00306}),
    *(
        Row(f"FedOTP, mass {mass}", "fedotp", {"learning_rate": 0.00928, "mass": mass})
        for mass in (0.2, 0.8, 1.0)
    ),
    Row(
        "shared and private context, class token",
        "fedotp_average",
        {"learning_rate": 0.00306, "pooled": True},
    ),
    Row("local, two contexts", "fedotp", {"learning_rate": 0.00928, "mass": 0.897, "local": True}),
    Row("PromptFL", "promptfl", {"learning_rate": 0.00188}),
    Row("CoOp (local)", "coop", {"learning_rate": 0.00346}),
)
SPREAD = ("full", "lowest", "highest", "own", "worst")
RISE = ("full", "own", "worst", "rise")
SETTINGS = {
    "fedhpl-classes": Setting(
        title="unlike trunks, four classes a client",
        measure="full",
        make=partial(unlike_trunks, classes=4, images=None),
        rows=FEDHPL,
        columns=SPREAD,
    ),
    "fedhpl-few": Setting(
        title="unlike trunks, 30 images a client",
        measure="full",
        make=partial(unlike_trunks, classes=10, images=30),
        rows=FEDHPL,
        columns=SPREAD,
    ),
    "fedhpl-central": Setting(
        title="one client with all images",
        measure="full",
        make=one_client,
        rows=CENTRAL,
        columns=("full",),
    ),
    "sgpt-two": Setting(
        title="20 clients of two domains, 40 rounds",
        measure="worst",
        make=partial(few_kinds, changes=[samples.inverted_rotated, samples.raw]),
        rows=SGPT,
    ),
    "sgpt-four": Setting(
        title="20 clients of four domains, 40 rounds",
        measure="worst",
        make=partial(
            few_kinds,
            changes=[samples.raw, samples.inverted, samples.rotated, samples.inverted_rotated],
        ),
        rows=SGPT,
    ),
    "fedl2g-iid": Setting(
        title="unlike networks, 40 images a client, all classes",
        measure="own",
        make=partial(unlike_networks, alpha=None),
        rows=FEDL2G,
        columns=RISE,
    ),
    "fedl2g-dirichlet": Setting(
        title="unlike networks, 40 images a client, Dirichlet .3",
        measure="own",
        make=partial(unlike_networks, alpha=0.3),
        rows=FEDL2G,
        columns=RISE,
    ),
    "fedotp-domains": Setting(
        title="small digits among clutter, four shots, three domains",
        measure="own",
        make=partial(few_shots, shots=4, classes=10, domains=list(samples.DOMAINS)),
        rows=FEDOTP,
    ),
    "fedotp-classes": Setting(
        title="small digits among clutter, eight shots, two classes a client",
        measure="own",
        make=partial(few_shots, shots=8, classes=2, domains=["inverted"]),
        rows=FEDOTP,
    ),
}
