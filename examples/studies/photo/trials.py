"""Federations of photographs: partitions, networks, and the budget of a run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import fedprompt as fp
import photographs
from fedprompt.interfaces import ResumableTrunk
from methods.federation import PromptedModel, VitFederation
from photographs import HALF, Photographs
from studies.gallery.tasks import Settings, Trial
from studies.photo.networks import (
    Convolutional,
    ConvolutionalModel,
    TailTrunk,
    as_inputs,
    small_network,
)
from studies.photo.settings import (
    ALPHA,
    HEAD_RATE,
    IMAGE_SIZE,
    NUM_IMAGES,
    SETTINGS,
    SHORT,
    START,
    Sources,
)


@dataclass(kw_only=True)
class PhotographFederation(VitFederation):
    """Federation whose prompts start at mean tokens, and whose trunks may be convolutional."""

    def new_model(
        self, client: int = 0, *, prompts: Callable[[fp.Trunk], nn.Module | None] | None = None
    ) -> PromptedModel:
        """Make a model; the initial values depend on the seed, the network and `prompts` alone."""
        trunk = self.trunk_of(client)
        if isinstance(trunk, Convolutional):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.seed)
                model = ConvolutionalModel(
                    trunk, None, self.num_classes, num_features=self.num_features
                )
                model.prompts = trunk.prompts()
        else:
            model = super().new_model(client, prompts=prompts)
            if model.prompts is not None and trunk.start_tokens is not None:
                draw = torch.Generator().manual_seed(self.seed)
                fp.start_at_tokens(model.prompts, trunk.start_tokens, generator=draw)
        for parameter in (*model.projection.parameters(), *model.head.parameters()):
            parameter.of_head = True
        return model


def two_rates(parameters: Sequence[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """Make AdamW with a tenth of the learning rate for projections and heads."""
    parameters = list(parameters)
    heads = [each for each in parameters if getattr(each, "of_head", False)]
    others = [each for each in parameters if not getattr(each, "of_head", False)]
    groups = [{"params": others, "lr": lr}, {"params": heads, "lr": HEAD_RATE * lr}]
    return torch.optim.AdamW([each for each in groups if each["params"]], weight_decay=1e-3)


def make_trial(
    task: str,
    partition: str,
    *,
    seed: int,
    settings: Settings,
    sources: Sources,
    validate: bool = False,
) -> Trial:
    """Divide the photographs over clients.

    Args:
        task: "solar" or "mnist".
        partition: Name in `SETTINGS`.
        seed: Seed of the test split, the partition, initial values, cohorts and batches.
        settings: Budget.
        sources: Networks.
        validate: Whether to test on a part of the training images, which then do not train.
    """
    setting, rng = SETTINGS[partition], np.random.default_rng(seed)
    data, train, test = split(task, setting.shifted, seed, settings.num_test, validate)
    labels, num_classes = classes(data, task, setting.shifted)
    public, train = train[: settings.num_public], train[settings.num_public :]
    count, cells = settings.num_clients, data.domains * num_classes + labels
    num_cells = num_classes * len(data.domain_names)
    divide = _by_domain if setting.shifted else _by_label
    shards = [torch.as_tensor(each) for each in divide(data, cells, train, count, rng)]
    mixes = torch.stack(
        [torch.bincount(cells[train][each], minlength=num_cells) for each in shards]
    )
    first = count - settings.num_newcomers
    trunks = [network(name, task, setting.shifted, sources) for name in setting.networks]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        trunks = [each.adapted(as_inputs(public)) for each in trunks]
    federation = PhotographFederation(
        inputs=as_inputs(train),
        labels=labels[train],
        shards=dict(enumerate(shards)),
        clients=range(first),
        num_classes=num_classes,
        rounds=settings.rounds,
        steps=settings.steps,
        cohort_size=settings.cohort_size,
        batch_size=settings.batch_size,
        seed=seed,
        public=as_inputs(public),
        make_optimizer=two_rates,
        trunks=trunks,
        num_prompts=4,
        num_features=None if len(trunks) == 1 else 64,
    )
    return Trial(federation, as_inputs(test), cells[test], mixes, range(first, count))


def classes(data: Photographs, task: str, shifted: bool) -> tuple[Tensor, int]:
    """Return the classes of a setting: with domains, solar cells are defective or not."""
    if task == "solar" and shifted:
        return (data.labels >= 2).long(), 2
    return data.labels, len(data.class_names)


def split(
    task: str, shifted: bool, seed: int, num_test: int, validate: bool
) -> tuple[Photographs, Tensor, Tensor]:
    """Return all images, and the positions of training and test images in random order."""
    data, rng = images_of(task, shifted), np.random.default_rng([seed, 1])
    train, test = torch.arange(len(data.labels)), torch.arange(0)
    for _ in range(2 if validate else 1):
        train, test = photographs.split_by_runs(data, train, share=0.25, rng=rng)
    train, test = (each[torch.from_numpy(rng.permutation(len(each)))] for each in (train, test))
    return data, train, test[:num_test]


def _by_domain(
    data: Photographs, cells: Tensor, train: Tensor, count: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Give each client images of one domain; the domains of clients take turns."""
    number = len(data.domain_names)
    shards = fp.by_domain(data.domains[train], count, generator=rng)
    each = count // number
    return [shards[(client % number) * each + client // number] for client in range(count)]


def _by_label(
    data: Photographs, cells: Tensor, train: Tensor, count: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Divide the pairs of domain and class over clients by a Dirichlet distribution."""
    smallest = len(train) // count // 4
    return fp.dirichlet(
        cells[train], num_clients=count, alpha=ALPHA, min_size=smallest, generator=rng
    )


@cache
def images_of(task: str, shifted: bool) -> Photographs:
    """Read a data set, with images small enough to stay in memory."""
    if task == "solar":
        data = photographs.solar_cells()
    else:
        data = photographs.mnist(shifted=shifted)
        data = data._replace(**{name: getattr(data, name)[: NUM_IMAGES[task]] for name in _EACH})
    small = [
        F.interpolate(part.float(), (IMAGE_SIZE, IMAGE_SIZE), mode="bilinear", antialias=True)
        for part in data.images.split(256)
    ]
    return data._replace(images=torch.cat(small).round().clamp(0, 255).to(torch.uint8))


_EACH = ("images", "labels", "domains", "runs")


def network(name: str, task: str, shifted: bool, sources: Sources) -> TailTrunk | Convolutional:
    """Return a network over the images of a task: a name in `NETWORKS`."""
    images = images_of(task, shifted).images
    return NETWORKS[name](images, (task, shifted), sources)


def _tail(images: Tensor, where: tuple[str, bool], sources: Sources, **kind: int) -> TailTrunk:
    trunk = dino(sources)
    start, end = kind.get("start", START), kind.get("end", 12)
    if sources.random:
        start, end = 1, 3
    tokens = front(*where, sources, start)
    return TailTrunk(trunk, tokens, start, end, IMAGE_SIZE, bool(kind.get("with_patches")))


def _efficientnet(images: Tensor, where: tuple[str, bool], sources: Sources) -> Convolutional:
    model = efficientnet(sources)
    border = partial(fp.PadPrompts, IMAGE_SIZE, padding=4, mean=HALF[0], std=HALF[1])
    return Convolutional(images, IMAGE_SIZE, model.num_features, border, model)


def _small(images: Tensor, where: tuple[str, bool], sources: Sources) -> Convolutional:
    return Convolutional(images, IMAGE_SIZE, 64, small_network)


NETWORKS: Mapping[str, Callable[..., TailTrunk | Convolutional]] = {
    "whole": _tail,
    "short": partial(_tail, start=SHORT - (12 - START), end=SHORT),
    "wide": partial(_tail, with_patches=1),
    "convolutional": _efficientnet,
    "small": _small,
}


@cache
def dino(sources: Sources) -> ResumableTrunk:
    """Return DINOv2 in bfloat16, or a tiny random network in float32."""
    if sources.random:
        from timm.models.vision_transformer import VisionTransformer

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = VisionTransformer(IMAGE_SIZE, 28, embed_dim=16, depth=3, num_heads=2)
        return fp.vit_trunk(model)
    model = photographs.load_dino(
        sources.dino, pretrained=sources.pretrained, image_size=IMAGE_SIZE
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
def front(task: str, shifted: bool, sources: Sources, start: int) -> Tensor:
    """Run the first blocks of DINOv2 once for all images of a task."""
    run = partial(fp.front_tokens, dino(sources), start=start)
    return photographs.encoded(run, images_of(task, shifted).images, IMAGE_SIZE)
