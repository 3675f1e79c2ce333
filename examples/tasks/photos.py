"""Photographs of solar cells, and MNIST, with pretrained networks whose first blocks run once.

Clients have a frozen DINOv2 ViT-S/14, and train prompts or other parts of its last eleven blocks.
In further partitions, they train three blocks, or have networks of three kinds. The extra
``photographs`` installs the images.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import fedprompt as fp
import photographs
from fedprompt.interfaces import ResumableTrunk, Trunk
from fedprompt.methods import METHODS, Federation
from fedprompt.methods.setting import PromptedModel, Tune
from photographs import HALF, Photographs
from tasks.controls import CONTROLS
from tasks.core import HEAD_RATE, NEWCOMERS, Machine, Row, Task, TaskError, Trial
from tasks.heads import HeadSetting, marked
from tasks.networks import Convolutional, ConvolutionalModel, TailTrunk, as_inputs, small_network
from tasks.tuning import draws, two_rates

IMAGE_SIZE, LATE = 56, 9  # pixels, and first block of a client that trains three blocks
SHORT = 9  # blocks of the network that ends early; it starts as many blocks before its end
ALPHA = 0.3
RATES = {
    "prompts": (1e-3, 1e-1),
    "plain_steps": (3e-3, 3e-1),
    "scaffold": (3e-3, 3e-1),
    "head_tuning": (1e-3, 1e-1),
    "fedlora": (3e-4, 3e-2),
    "fednorms": (1e-3, 1e-1),
    "full_tuning": (1e-5, 1e-3),
}
"""Range of the tuned learning rates for each kind of parameters and steps."""
NUM_IMAGES = {"solar": 2624, "mnist": 3000}
NUM_PUBLIC, NUM_TEST = 64, 480
DINO, EFFICIENTNET = "vit_small_patch14_dinov2", "tf_efficientnet_lite0"

ONE = ("local", "head_tuning", "fedvpt", "fedvpt_d", "sgpt", "pfedme", "perfedavg", "ditto")
TAUGHT = ("local", "fedhpl", "fedhpl_p", "fedhpl_h")
GUIDED = ("local", "fedl2g_l", "fedl2g_f")
DEEP = ("local", "local_24", "head_tuning", "fedvpt_d", "plain_steps", "scaffold", "pfedme", "sgpt")
START = {"head_tuning": 0.01, "plain_steps": 0.03, "scaffold": 0.03}
"""Default learning rates for features of DINOv2, where they differ from the method's file."""


class Division(NamedTuple):
    """How images are divided, the networks of the clients, and the rows.

    Attributes:
        title: Words for tables.
        shifted: Whether each client has one domain. If not, labels are divided by Dirichlet.
        networks: Names in `NETWORKS`, given to the clients in turn.
        methods: Rows.
        rounds: Number of rounds. A step of a convolutional network takes several times as long.
        cohort_size: Number of clients in a round.
        steps: Number of batches of a client in a round.
        batch_size: Number of images in a batch.
        last_rounds: Number of last rounds whose accuracies are averaged.
        num_clients: Number of clients.
        num_newcomers: Number of clients that never train.
        num_images: Number of images. If None, those of `NUM_IMAGES`.
        divide: Function (classes, number of clients, generator) -> positions of each client, in
            place of a division by domains or by Dirichlet.
        common_test: Whether all seeds have the same test images, which no tuning trial sees, and
            heads a learning rate of their own. Without it, heads have a tenth of the rate.
    """

    title: str
    shifted: bool
    networks: tuple[str, ...]
    methods: tuple[str, ...]
    rounds: int = 16
    cohort_size: int = 4
    steps: int = 10
    batch_size: int = 8
    last_rounds: int = 1
    num_clients: int = 12
    num_newcomers: int = 2
    num_images: int | None = None
    divide: Callable[..., Sequence[np.ndarray]] | None = None
    common_test: bool = False


def six_hundred(cells: Tensor, count: int, rng: np.random.Generator) -> Sequence[np.ndarray]:
    """Divide classes by a Dirichlet distribution, at most 600 images a client."""
    draw = {"alpha": 1.0, "min_size": len(cells) // count // 4, "generator": rng}
    shards = fp.data.dirichlet(cells, num_clients=count, **draw)
    return [rng.permutation(shard)[:600] for shard in shards]


def two_classes(cells: Tensor, count: int, rng: np.random.Generator) -> Sequence[np.ndarray]:
    """Give each client at most 50 images of two classes."""
    shards = fp.data.pathological(cells, count, classes_per_client=2, generator=rng)
    return [rng.permutation(shard)[:50] for shard in shards]


EVERYONE = {"rounds": 24, "cohort_size": 10, "steps": 6, "last_rounds": 3, "common_test": True}
FEDHPL = {
    "rounds": 10,
    "cohort_size": 5,
    "steps": 20,
    "batch_size": 16,
    "last_rounds": 3,
    "num_clients": 5,
    "num_newcomers": 0,
    "num_images": 5000,
    "divide": six_hundred,
    "common_test": True,
}
SGPT = {
    "rounds": 60,
    "cohort_size": 5,
    "steps": 40,
    "last_rounds": 10,
    "num_clients": 100,
    "num_newcomers": 0,
    "num_images": 5000,
    "divide": two_classes,
    "common_test": True,
}
"""Budgets of the partitions, the last two near those of the papers."""
DIVISIONS = {
    "deep-domains": Division("one domain for each client", True, ("deep",), DEEP, **EVERYONE),
    "deep-labels": Division("label shift (Dirichlet .3)", False, ("deep",), DEEP, **EVERYONE),
    "domains": Division("one domain for each client, three blocks", True, ("whole",), ONE),
    "labels": Division("label shift (Dirichlet .3), three blocks", False, ("whole",), ONE),
    "depths": Division(
        "label shift, networks of three widths",
        False,
        ("short", "wide", "convolutional"),
        TAUGHT,
        12,
    ),
    "fedhpl": Division(
        "five clients of 600 images, networks of 12, 10 and 8 blocks",
        False,
        ("deep", "ten", "eight"),
        ("local", "fedhpl", "fedhpl_h"),
        **FEDHPL,
    ),
    "sgpt": Division(
        "100 clients of 50 images and two classes",
        False,
        ("half",),
        ("sgpt", "fedvpt_d", "half_steps"),
        **SGPT,
    ),
    "networks": Division(
        "label shift, three kinds of networks",
        False,
        ("whole", "convolutional", "small"),
        GUIDED,
        12,
    ),
}


@dataclass(kw_only=True)
class PhotographSetting(HeadSetting):
    """Setting whose prompts start at mean tokens, and whose trunks may be convolutional."""

    def new_model(
        self,
        client: int = 0,
        *,
        prompts: Callable[[Trunk], nn.Module | None] | None = None,
        tune: Tune | None = None,
    ) -> PromptedModel:
        """Make a model; the initial values depend on the seed, the network and `prompts` alone."""
        trunk = self.trunk_of(client)
        if isinstance(trunk, Convolutional):
            model = self.seeded(self._convolutional, trunk)
        else:
            model = super().new_model(client, prompts=prompts, tune=tune)
            if model.prompts is not None and trunk.start_tokens is not None:
                draw = torch.Generator().manual_seed(self.seed)
                fp.initialize_at(model.prompts, trunk.start_tokens, generator=draw)
        return marked(model)

    def tuned_trunk(self, trunk: TailTrunk, tune: Tune) -> TailTrunk:
        """Make the trunk with a copy of its blocks, of which some parameters are trained."""
        return trunk.tuned(tune)

    def _convolutional(self, trunk: Convolutional) -> ConvolutionalModel:
        size = {"num_features": self.num_features}
        model = ConvolutionalModel(trunk, None, self.num_classes, **size)
        model.prompts = trunk.prompts()
        return model


TUNED = [
    Row("Norms", "fednorms", {"learning_rate": 0.01}),
    Row("LoRA, rank 1", "fedlora", {"learning_rate": 0.003, "rank": 1}),
    Row("LoRA, rank 4", "fedlora", {"learning_rate": 0.003, "rank": 4}),
    Row("Full tuning", "full_tuning", {"learning_rate": 3e-5}),
]
"""Rows that train parts of the network in place of prompts."""


def make(
    task: str, partition: str, row: Row, *, seed: int, machine: Machine, validate: bool
) -> Trial:
    """Divide the photographs over clients."""
    division, rng = DIVISIONS[partition], np.random.default_rng(seed)
    data, train, test = split(task, division, seed, validate)
    labels, num_classes = classes(data, task, division.shifted)
    public, train = train[:NUM_PUBLIC], train[NUM_PUBLIC:]
    cells = data.domains * num_classes + labels
    num_cells = num_classes * len(data.domain_names)
    shards = [torch.as_tensor(each) for each in divided(division, data, cells, train, rng)]
    mixes = [torch.bincount(cells[train][each], minlength=num_cells) for each in shards]
    sources = Sources.of(machine, division)
    images = images_of(task, division.shifted, division.num_images).images
    where = task, division.shifted, division.num_images
    trunks = [NETWORKS[name](images, where, sources) for name in division.networks]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        trunks = [each.adapted(as_inputs(public)) for each in trunks]
    first = division.num_clients - division.num_newcomers
    setting = PhotographSetting(
        clients=range(first),
        num_classes=num_classes,
        rounds=-(-division.rounds // 2) if validate else division.rounds,
        steps=division.steps,
        batch_size=division.batch_size,
        cohort_size=division.cohort_size,
        seed=seed,
        public=as_inputs(public),
        make_optimizer=partial(torch.optim.AdamW, weight_decay=1e-3),
        head_rate=head_rate(row, division),
        trunks=trunks,
        num_prompts=4,
        num_features=None if len(trunks) == 1 else 64,
    )
    federation = Federation(setting, as_inputs(train), labels[train], dict(enumerate(shards)))
    newcomers = range(first, division.num_clients)
    trial = Trial(setting, federation, as_inputs(test), cells[test], torch.stack(mixes), newcomers)
    return trial.shrunk(machine.shrink)


def head_rate(row: Row, division: Division) -> float | None:
    """Return the learning rate of the head, if it is another one."""
    if HEAD_RATE in row.values or division.common_test:
        return row.values.get(HEAD_RATE)
    return (
        0.003 if row.title in [each.title for each in TUNED] else 0.1 * row.values["learning_rate"]
    )


def classes(data: Photographs, task: str, shifted: bool) -> tuple[Tensor, int]:
    """Return the classes: with domains, solar cells are defective or not."""
    if task == "solar" and shifted:
        return (data.labels >= 2).long(), 2
    return data.labels, len(data.class_names)


def split(
    task: str, division: Division, seed: int, validate: bool
) -> tuple[Photographs, Tensor, Tensor]:
    """Return all images, and the positions of training and test images in random order."""
    data = images_of(task, division.shifted, division.num_images)
    rng = np.random.default_rng([seed, 1])
    train, test = torch.arange(len(data.labels)), torch.arange(0)
    first = np.random.default_rng([0, 1]) if division.common_test else rng
    for source in [first, rng][: 2 if validate else 1]:
        train, test = photographs.split_by_runs(data, train, share=0.25, rng=source)
    train, test = (each[torch.from_numpy(rng.permutation(len(each)))] for each in (train, test))
    return data, train, test[:NUM_TEST]


def divided(
    division: Division, data: Photographs, cells: Tensor, train: Tensor, rng: np.random.Generator
) -> Sequence[np.ndarray]:
    """Divide training images over clients: by domains, by Dirichlet, or as the division says."""
    count = division.num_clients
    if division.divide is not None:
        return division.divide(cells[train], count, rng)
    if not division.shifted:  # the pairs of domain and class
        smallest = len(train) // count // 4
        draw = {"alpha": ALPHA, "min_size": smallest, "generator": rng}
        return fp.data.dirichlet(cells[train], num_clients=count, **draw)
    number = len(data.domain_names)
    shards = fp.data.by_domain(data.domains[train], count, generator=rng)
    each = count // number  # the domains of clients take turns
    return [shards[(client % number) * each + client // number] for client in range(count)]


@cache
def images_of(task: str, shifted: bool, count: int | None = None) -> Photographs:
    """Read the first images of a data set, small enough to stay in memory."""
    try:
        data = photographs.solar_cells() if task == "solar" else photographs.mnist(shifted=shifted)
    except ModuleNotFoundError as error:
        raise TaskError(str(error)) from error
    each = {name: getattr(data, name)[: count or NUM_IMAGES[task]] for name in EACH}
    data = data._replace(**each)
    small = [
        F.interpolate(part.float(), (IMAGE_SIZE, IMAGE_SIZE), mode="bilinear", antialias=True)
        for part in data.images.split(256)
    ]
    return data._replace(images=torch.cat(small).round().clamp(0, 255).to(torch.uint8))


EACH = ("images", "labels", "domains", "runs")


@dataclass(frozen=True)
class Sources:
    """Where the two pretrained networks come from.

    Attributes:
        dino: File of DINOv2, or None.
        efficientnet: File of EfficientNet-Lite0, or None.
        pretrained: Whether timm downloads the missing ones.
        random: Whether tiny random networks take their place, for tests.
    """

    dino: Path | None = None
    efficientnet: Path | None = None
    pretrained: bool = False
    random: bool = False

    @staticmethod
    def of(machine: Machine, division: Division) -> "Sources":
        """Return the sources of the networks of a division.

        Raises:
            TaskError: If there are no weights for one of them.
        """
        needed = [DINO, *([EFFICIENTNET] if "convolutional" in division.networks else [])]
        random = RANDOM in machine.weights
        missing = [name for name in needed if name not in machine.weights]
        if missing and not machine.pretrained and not random:
            raise TaskError(f"`--weights {missing[0]}=FILE` is missing; or add --pretrained.")
        files = [machine.weights.get(name) for name in (DINO, EFFICIENTNET)]
        return Sources(*files, machine.pretrained, random)


RANDOM = "random"
"""With weights of this name, tiny random networks take the place of both, to see that it runs."""


Where = tuple[str, bool, int | None]
"""Arguments of `images_of`."""


def _tail(images: Tensor, where: Where, sources: Sources, **kind: int) -> TailTrunk:
    start, end = kind.get("start", LATE), kind.get("end", 12)
    if sources.random:
        start, end = 1, 3
    tokens = front(where, sources, start)
    return TailTrunk(dino(sources), tokens, start, end, IMAGE_SIZE, bool(kind.get("with_patches")))


def _efficientnet(images: Tensor, where: Where, sources: Sources) -> Convolutional:
    model = efficientnet(sources)
    border = partial(fp.PadPrompts, IMAGE_SIZE, padding=4, mean=HALF[0], std=HALF[1])
    return Convolutional(images, IMAGE_SIZE, model.num_features, border, model)


def _small(images: Tensor, where: Where, sources: Sources) -> Convolutional:
    return Convolutional(images, IMAGE_SIZE, 64, small_network)


NETWORKS: Mapping[str, Callable[..., TailTrunk | Convolutional]] = {
    "whole": _tail,
    "deep": partial(_tail, start=1),
    "ten": partial(_tail, start=1, end=10),
    "eight": partial(_tail, start=1, end=8),
    "half": partial(_tail, start=6),
    "short": partial(_tail, start=SHORT - (12 - LATE), end=SHORT),
    "wide": partial(_tail, with_patches=1),
    "convolutional": _efficientnet,
    "small": _small,
}


@cache
def dino(sources: Sources, image_size: int = IMAGE_SIZE) -> ResumableTrunk:
    """Return DINOv2 in bfloat16, or a tiny random network in float32."""
    if sources.random:
        from timm.models.vision_transformer import VisionTransformer

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = VisionTransformer(
                image_size, image_size // 2, embed_dim=16, depth=3, num_heads=2
            )
        return fp.vit_trunk(model)
    model = photographs.load_dino(
        sources.dino, pretrained=sources.pretrained, image_size=image_size
    )
    return fp.vit_trunk(photographs.in_bfloat16(model))


@cache
def efficientnet(sources: Sources) -> nn.Module:
    """Return EfficientNet-Lite0, or a tiny random network."""
    if sources.random:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            tiny = small_network(12)
            tiny.num_features = 48
        return fp.freeze(tiny)
    return photographs.load_efficientnet(sources.efficientnet, pretrained=sources.pretrained)


@cache
def front(where: Where, sources: Sources, start: int) -> Tensor:
    """Run the first blocks of DINOv2 once for all images of a task."""
    run = partial(fp.encode_front, dino(sources), start=start)
    return photographs.encoded(run, images_of(*where).images, IMAGE_SIZE)


def kept(trial: Trial, method: fp.Method, now: fp.Round) -> dict[str, float]:
    """Measure the bytes that a batch of the first client keeps for its backward pass."""
    data = trial.federation.data(0, now.server_round)
    inputs, labels = next(data.batches())
    model, sizes = now.model(method, data), dict[int, int]()
    parameters = (*model.parameters(), *model.trunk.whole.model.parameters())  # frozen ones, too
    fixed = {each.untyped_storage().data_ptr() for each in parameters}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in fixed:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = F.cross_entropy(model(inputs), labels)
    return {"kept": sum(sizes.values())} if loss.requires_grad else {}


def started(row: Row) -> Row:
    """Give a row its default learning rate for features of DINOv2."""
    rate = START.get(str(row.method), row.values["learning_rate"])
    return replace(row, values={**row.values, "learning_rate": rate})


def task(name: str, title: str, *without: str) -> Task:
    """Make the task of a data set, without some partitions."""

    def rows(partition: str) -> list[Row]:
        division = DIVISIONS[partition]
        known = METHODS | CONTROLS
        own = [Row(known[each].title, each, known[each].defaults) for each in division.methods]
        tuned = TUNED if len(division.networks) == 1 and division.num_images is None else []
        return [two_rates(started(row)) for row in (*own, *tuned)]

    return Task(
        title=title,
        partitions={key: each.title for key, each in DIVISIONS.items() if key not in without},
        hours=lambda partition, row: 40 / 3600,
        family=lambda partition: "one model",
        rows=rows,
        make=partial(make, name),
        trials=lambda partition, row: draws(
            row, f"{name} {partition}", RATES.get(str(row.method), RATES["prompts"])
        ),
        last_rounds=lambda partition, row: DIVISIONS[partition].last_rounds,
        columns={
            "full": "all test images",
            "balanced": "balanced",
            "macro_f1": "macro-F1",
            "own": "own mix",
            "worst": "worst client",
            **NEWCOMERS,
        },
        references={"local": [METHODS["local"].title, CONTROLS["local_24"].title]},
        causes=lambda partition, row: kept if partition.startswith("deep") else None,
        compared=("own", "balanced"),
        bound=0.048,
    )


TASKS = {
    # under label shift, five seeds of solar cells have intervals beyond ± 10 points
    "solar": task("solar", "Solar cells", "labels", "fedhpl", "sgpt"),
    "mnist": task("mnist", "MNIST-5k"),
}
