"""Photographs of solar cells, and MNIST, with pretrained networks whose first blocks run once.

Clients have a frozen DINOv2 ViT-S/14, and train prompts or other parts of its last eleven blocks.
In further partitions, they have networks of three kinds and train less of them. The extra
``photographs`` installs the images.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import fedprompt as fp
import photographs
from build_samples.build import new_model
from fedprompt.compare import Trial
from fedprompt.interfaces import ResumableTrunk
from fedprompt.methods.models import PromptedModel
from photographs import HALF, Photographs
from studies.core import Images, Machine, Row, Study, content, divided, study, trial
from studies.figures import Joined, Measured, averaged, bytes_kept, last, mechanism
from studies.networks import (
    BorderSetting,
    Convolutional,
    TailTrunk,
    as_inputs,
    positions_of,
    small_network,
)
from studies.tuning import HeadSetting, two_rates

IMAGE_SIZE = 56  # pixels
CONTENT = content("photographs")
START = CONTENT["start"]
"""Default learning rates for features of DINOv2, where they differ from the method's file."""
NUM_IMAGES = {"solar": 2624, "mnist": 3000}
NUM_PUBLIC, NUM_TEST = 64, 480
BUDGET = ("rounds", "steps", "batch_size", "cohort_size")
DINO, EFFICIENTNET = "vit_small_patch14_dinov2", "tf_efficientnet_lite0"


DIVISIONS = {
    name: SimpleNamespace(**CONTENT["default"] | fields)
    for name, fields in CONTENT["divisions"].items()
}
"""How images are divided, the networks of the clients, and the rows; see the file."""


@dataclass(kw_only=True)
class PhotographSetting(HeadSetting, BorderSetting):
    """Setting whose prompts start at mean tokens, and whose trunks may be convolutional."""

    def new_model(self, client: int | None = None, **options: Any) -> PromptedModel:
        """Make a model; the initial values depend on the seed, the network and `prompts` alone."""
        model = super().new_model(client, **options)
        start = getattr(self.trunk_of(client), "start_tokens", None)
        if model.prompts is not None and start is not None:
            draw = torch.Generator().manual_seed(self.seed)
            fp.initialize_at(model.prompts, start, generator=draw)
        return model


TUNED = [Row(title, *values) for title, values in CONTENT["tuned"].items()]
"""Rows that train parts of the network in place of prompts."""


def make(task: str, partition: str, row: Row, *, seed: int, machine: Machine) -> Trial:
    """Divide the photographs over clients."""
    division = DIVISIONS[partition]
    data, train, test = split(task, division, seed)
    labels, num_classes = classes(data, task, division.shifted)
    data = Images(as_inputs(torch.arange(len(labels))), labels, data.domains)
    public, train, places = train[:NUM_PUBLIC], data.at(train[NUM_PUBLIC:]), test
    shards = shards_of(division, train, num_classes, np.random.default_rng(seed))
    where = task, division.shifted, division.num_images
    trunks = [NETWORKS[name](where, machine) for name in division.networks]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        trunks = [trunk.adapted(as_inputs(public)) for trunk in trunks]
    return trial(
        PhotographSetting,
        train,
        data.at(places),
        shards,
        seed=seed,
        places=places,
        newcomers=division.num_newcomers,
        num_classes=num_classes,
        **{name: getattr(division, name) for name in BUDGET},
        public=as_inputs(public),
        make_optimizer=partial(torch.optim.AdamW, weight_decay=1e-3),
        trunks=trunks,
        num_prompts=4,
        num_features=None if len(trunks) == 1 else 64,
    )


def classes(data: Photographs, task: str, shifted: bool) -> tuple[Tensor, int]:
    """Return the classes: with domains, solar cells are defective or not."""
    if task == "solar" and shifted:
        return (data.labels >= 2).long(), 2
    return data.labels, len(data.class_names)


def split(task: str, division: SimpleNamespace, seed: int) -> tuple[Photographs, Tensor, Tensor]:
    """Return all images, and the positions of training and test images in random order.

    Test images are a random part of those that no choice of hyperparameters saw, and all seeds
    choose among the same ones.
    """
    data = images_of(task, division.shifted, division.num_images)
    rng = np.random.default_rng([seed, 1])
    every, first = torch.arange(len(data.labels)), np.random.default_rng([0, 1])
    train, test = photographs.split_by_runs(data, every, share=0.25, rng=first)
    train, test = (part[torch.from_numpy(rng.permutation(len(part)))] for part in (train, test))
    return data, train, test[:NUM_TEST]


def shards_of(
    division: SimpleNamespace, train: Images, num_classes: int, rng: np.random.Generator
) -> Sequence[np.ndarray]:
    """Divide training images over clients: by domains, or the pairs of domain and class."""
    count = division.num_clients
    if not division.shifted:
        pairs = train._replace(labels=train.cells(num_classes))
        mix = rng if "most" in division.divide else None
        return divided(pairs, count=count, rng=rng, mix=mix, **division.divide)
    number = 1 + int(train.domains.max())
    shards = fp.data.by_domain(train.domains, count, generator=rng)
    clients = count // number  # of a domain; the domains of clients take turns
    return [shards[(client % number) * clients + client // number] for client in range(count)]


@cache
def images_of(task: str, shifted: bool, count: int | None = None) -> Photographs:
    """Read the first images of a data set, small enough to stay in memory."""
    try:
        data = photographs.solar_cells() if task == "solar" else photographs.mnist(shifted=shifted)
    except ModuleNotFoundError as error:
        raise ValueError(str(error)) from error
    first = slice(count or NUM_IMAGES[task])
    data = data._replace(**{name: getattr(data, name)[first] for name in data._fields[:4]})
    small = [
        F.interpolate(part.float(), (IMAGE_SIZE, IMAGE_SIZE), mode="bilinear", antialias=True)
        for part in data.images.split(256)
    ]
    return data._replace(images=torch.cat(small).round().clamp(0, 255).to(torch.uint8))


RANDOM = "random"
"""With weights of this name, tiny random networks take the place of both, to see that it runs."""


def source_of(machine: Machine, name: str) -> Path | str | None:
    """Return the file of a pretrained network, `RANDOM`, or None if timm downloads it.

    Raises:
        ValueError: If there are no weights.
    """
    if RANDOM in machine.weights:
        return RANDOM
    if name not in machine.weights and not machine.pretrained:
        raise ValueError(f"`--weights {name}=FILE` is missing; or add --pretrained.")
    return machine.weights.get(name)


Where = tuple[str, bool, int | None]
"""Arguments of `images_of`."""


class Lookup(nn.Module):
    """Images at the positions that inputs of a federation are, resized and normalized.

    Args:
        images: All images, uint8.
    """

    def __init__(self, images: Tensor) -> None:
        super().__init__()
        self.register_buffer("images", images, persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Look up and prepare images."""
        found = self.images[positions_of(inputs)]
        return photographs.prepared(found, IMAGE_SIZE, mean=HALF[0], std=HALF[1])


def _tail(
    where: Where, machine: Machine, start: int = 9, end: int = 12, with_patches: bool = False
) -> TailTrunk:
    source = source_of(machine, DINO)
    if source == RANDOM:
        start, end = 1, 3
    tokens = front(where, source, start)
    return TailTrunk(dino(source), tokens, start, end, IMAGE_SIZE, with_patches)


def _efficientnet(where: Where, machine: Machine) -> Convolutional:
    model = efficientnet(source_of(machine, EFFICIENTNET))
    border = partial(fp.PadPrompts, IMAGE_SIZE, padding=4, mean=HALF[0], std=HALF[1])
    return Convolutional(Lookup(images_of(*where).images), model.num_features, border, model)


def _small(where: Where, machine: Machine) -> Convolutional:
    return Convolutional(Lookup(images_of(*where).images), 64, small_network)


NETWORKS: Mapping[str, Callable[..., TailTrunk | Convolutional]] = {
    "whole": _tail,
    "deep": partial(_tail, start=1),
    "ten": partial(_tail, start=1, end=10),
    "eight": partial(_tail, start=1, end=8),
    "half": partial(_tail, start=6),
    "short": partial(_tail, start=6, end=9),
    "wide": partial(_tail, with_patches=True),
    "convolutional": _efficientnet,
    "small": _small,
}


@cache
def dino(source: Path | str | None, image_size: int = IMAGE_SIZE) -> ResumableTrunk:
    """Return DINOv2, or a tiny random network in float32."""
    if source == RANDOM:
        from timm.models.vision_transformer import VisionTransformer

        sizes = {"img_size": image_size, "patch_size": image_size // 2}
        sizes |= {"embed_dim": 16, "depth": 3, "num_heads": 2}
        return fp.vit_trunk(new_model(VisionTransformer, sizes, 0))
    model = photographs.load_network(DINO, source, img_size=image_size)
    return fp.vit_trunk(photographs.in_fast_precision(model))


@cache
def efficientnet(source: Path | str | None) -> nn.Module:
    """Return EfficientNet-Lite0, or a tiny random network."""
    if source == RANDOM:
        tiny = new_model(small_network, {"width": 12}, 0)
        tiny.num_features = 48
        return fp.freeze(tiny)
    return photographs.load_network(EFFICIENTNET, source)


@cache
def front(where: Where, source: Path | str | None, start: int) -> Tensor:
    """Run the first blocks of DINOv2 once for all images of a task."""
    run = partial(fp.encode_front, dino(source), start=start)
    return photographs.encoded(run, images_of(*where).images, IMAGE_SIZE)


def started(row: Row) -> Row:
    """Give a row its default learning rate for features of DINOv2."""
    rate = START.get(str(row.method), row.values["learning_rate"])
    return replace(row, values={**row.values, "learning_rate": rate})


def study_of(name: str, *without: str) -> Study:
    """Make the study of a data set, without some partitions."""

    def rows(partition: str) -> list[Row]:
        division = DIVISIONS[partition]
        prompted = [Row.of(name) for name in division.methods]
        tuned = TUNED if len(division.networks) == 1 and not division.num_images else []
        fixed = [Row(title, *values) for title, values in division.fixed.items()]
        return [*(two_rates(started(row)) for row in (*prompted, *tuned)), *fixed]

    def networks(partition: str, row: Row) -> Sequence[str]:
        kinds = {*DIVISIONS[partition].networks}
        names = [DINO] * bool(kinds - {"convolutional", "small"})
        return [RANDOM, *names, *[EFFICIENTNET] * ("convolutional" in kinds)]

    def figures(partition: str, row: Row) -> Measured:
        own = last(bytes_kept) if partition.startswith("deep") else mechanism(row)
        return Joined(averaged(DIVISIONS[partition].last_rounds, not row.personalized), own)

    return study(
        name,
        partitions={key: DIVISIONS[key].title for key in DIVISIONS if key not in without},
        rows=rows,
        make=partial(make, name),
        figures=figures,
        networks=networks,
    )


STUDIES = {"solar": study_of("solar", "fedhpl", "sizes"), "mnist": study_of("mnist", "sizes")}
