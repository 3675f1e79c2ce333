"""Run a row of a paper's setting, and measure the columns that the paper prints."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fedprompt as fp
from methods.federation import Federation
from studies.gallery import registry
from studies.gallery.tasks import Trial
from studies.papers import clusters, measure
from studies.papers.backbones import Backbones
from studies.papers.borders import PixelTrunk
from studies.papers.division import divide
from studies.papers.federations import ClipEpochs, NetworkEpochs, Stored, VitEpochs
from studies.papers.floats import FloatPreparation
from studies.papers.pooling import held_out
from studies.papers.setting import Recipe, Row, Setting
from studies.pipeline import Preparation, augment, prepared
from studies.tasks import Images, Task

FLOATS = ("fedmix",)
"""Methods that average images, or differentiate by them."""
NUM_PUBLIC = 500
"""Training images that methods with public data have without labels; clients keep theirs."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Makers of backbones, and the device of models and batches."""

    backbones: Backbones
    device: torch.device


def inputs_of(row: Row) -> str:
    """Return the kind of inputs that a row needs, for `make_trial`."""
    return "floats" if row.method in FLOATS else registry.gallery()[row.method].inputs


def make_trial(
    setting: Setting, task: Task, machine: Machine, *, seed: int, inputs: str = ""
) -> Trial:
    """Divide the images of a data set over the clients of a setting, and make their federation.

    Args:
        setting: Setting.
        task: Its data set.
        machine: Makers of backbones, and the device.
        seed: Seed of the division, initial values, cohorts and batches.
        inputs: "images" if a method of CLIP needs images in place of their tokens, "floats" if a
            method averages images.
    """
    num_classes, num_domains = len(task.class_names), len(task.domain_names)
    rng = np.random.default_rng(seed)
    if setting.test_share is not None:
        task = held_out(task, setting.test_share, generator=rng)
    train, test = task.train, task.test
    shards = divide(
        setting.partition,
        train.labels,
        train.domains,
        num_clients=setting.num_clients,
        generator=rng,
    )
    cells, test_cells = (each.domains * num_classes + each.labels for each in (train, test))
    count = num_classes * num_domains
    mixes = torch.stack([torch.bincount(cells[each], minlength=count) for each in shards])
    used, shards = _used(shards) if setting.family == "CLIP" else (None, shards)
    if used is not None:
        train = Images(*(each[used] for each in train))
    common = {
        "shards": {client: each.to(machine.device) for client, each in enumerate(shards)},
        "labels": train.labels.to(machine.device),
        "clients": range(setting.num_clients),
        "num_classes": num_classes,
        "rounds": setting.rounds,
        "cohort_size": setting.cohort_size,
        "batch_size": setting.recipe.batch_size,
        "epochs": setting.recipe.epochs,
        "drop_last": setting.recipe.drop_last,
        "cosine": setting.recipe.cosine,
        "seed": seed,
        "public": train.pixels[:0],
        "device": machine.device,
        "make_optimizer": _optimizer(setting.recipe),
        "floats": inputs == "floats",
    }
    build = {"CLIP": partial(_clip, inputs), "networks": _networks}.get(setting.family, _vits)
    federation, encoded = build(setting, task._replace(train=train), common, machine)
    # Methods with public data have it as a tensor.
    federation.public = federation.inputs[_spread(len(train.labels), NUM_PUBLIC)]
    return Trial(federation, encoded, test_cells.to(machine.device), mixes, ())


def _used(shards: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return the images that clients have, and the positions of the shards among them."""
    used = torch.cat(shards).unique()
    return used, [torch.searchsorted(used, each) for each in shards]


def _spread(count: int, size: int) -> Tensor:
    return torch.linspace(0, count - 1, min(count, size)).long()


def _optimizer(recipe: Recipe) -> Callable[..., torch.optim.Optimizer]:
    return partial(getattr(torch.optim, recipe.optimizer), **recipe.values)


def _vits(
    setting: Setting, task: Task, common: dict[str, Any], machine: Machine
) -> tuple[Federation, Stored]:
    trunks = []
    for name in setting.backbones:
        model, *normal = machine.backbones.vit(name, setting.image_size)
        prepare = _preparation(setting, *normal, machine)
        model = model.to(machine.device)
        if hasattr(model, "patch_embed"):
            trunks.append(prepared(fp.vit_trunk(model), FloatPreparation(prepare)))
        else:
            trunks.append(_pixel_trunk(setting, model, *normal[:2], prepare))
    federation = VitEpochs(
        inputs=Stored(task.train.pixels, machine.device),
        trunks=trunks,
        num_prompts=setting.num_prompts,
        num_features=setting.num_features,
        changed=_changed(setting, prepare, machine),
        **common,
    )
    return federation, Stored(task.test.pixels, machine.device)


def _pixel_trunk(
    setting: Setting,
    model: torch.nn.Module,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    prepare: Preparation,
) -> PixelTrunk:
    border = partial(
        fp.PadPrompts, setting.image_size, padding=setting.num_prompts, mean=mean, std=std
    )
    return PixelTrunk(fp.freeze(model).eval(), model.num_features, prepare, border)


def _networks(
    setting: Setting, task: Task, common: dict[str, Any], machine: Machine
) -> tuple[Federation, Stored]:
    make, size = machine.backbones.network, setting.image_size
    prepare = _preparation(setting, *make(setting.backbones[0], size)[1:], machine)
    federation = NetworkEpochs(
        inputs=Stored(task.train.pixels, machine.device),
        makers=[partial(_model, make, name, size) for name in setting.backbones],
        num_features=setting.num_features,
        prepare=prepare,
        changed=_changed(setting, prepare, machine),
        **common,
    )
    return federation, Stored(task.test.pixels, machine.device)


def _model(make: Callable[[str, int], Any], name: str, size: int) -> torch.nn.Module:
    return make(name, size).model


def _clip(
    inputs: str, setting: Setting, task: Task, common: dict[str, Any], machine: Machine
) -> tuple[Federation, Stored]:
    (name,) = setting.backbones
    model, tokenizer, *normal = machine.backbones.clip(name, setting.image_size)
    clip = fp.freeze(model.to(machine.device))
    tower = fp.TextTower(clip, tokenizer)
    prepare = _preparation(setting, *normal, machine)
    encode = prepare if inputs == "images" else partial(_tokens, clip, prepare)
    sides = [
        Stored(
            fp.precompute(encode, each, batch_size=64, dtype=torch.float16).cpu(),
            machine.device,
            torch.float32,
        )
        for each in (task.train.pixels, task.test.pixels)
    ]
    federation = ClipEpochs(
        inputs=sides[0],
        clip=clip,
        tower=tower,
        class_names=task.class_names,
        scale=clip.logit_scale.exp().item(),
        template=setting.template,
        length=setting.length,
        **common,
    )
    return federation, sides[1]


def _tokens(clip: torch.nn.Module, prepare: Preparation, pixels: Tensor) -> Tensor:
    """Return the image tokens of CLIP with the pooled one first, in the memory of the host."""
    pooled, patches = fp.image_tokens(clip, prepare(pixels))
    return torch.cat([pooled[:, None], patches], 1).cpu()


def _preparation(
    setting: Setting,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    interpolation: str,
    machine: Machine,
) -> Preparation:
    prepare = Preparation(setting.image_size, mean=mean, std=std, interpolation=interpolation)
    return prepare.to(machine.device)


def _changed(
    setting: Setting, prepare: Preparation, machine: Machine
) -> Callable[[Tensor, torch.Generator], Tensor] | None:
    recipe = setting.recipe
    if recipe.crop == 1 and not recipe.flip:
        return None
    how = {"interpolation": prepare.interpolation, "device": machine.device}
    return partial(augment, size=setting.image_size, crop=recipe.crop, flip=recipe.flip, **how)


def run_row(
    row: Row,
    trial: Trial,
    task: Task,
    *,
    last_rounds: int = 1,
    finished_round: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Run all rounds of a row's method, and measure the last predictions.

    Args:
        row: Row with a method.
        trial: Trial of its setting.
        task: Data set.
        last_rounds: Number of last rounds whose accuracies are averaged.
        finished_round: Called after each round.

    Returns:
        Accuracy by column, with the bytes of a client and round, and the seconds.
    """
    federation = replace(trial.federation, ledger=fp.Ledger())
    method, measured = registry.gallery()[row.method], []
    began = time.perf_counter()
    with torch.device(federation.device):
        torch.manual_seed(federation.seed)
        for server_round, predictions in enumerate(method.function(federation, **row.values)):
            finished_round()
            if server_round >= federation.rounds - last_rounds:
                measured.append(measure.columns(predictions, trial, task.domain_names))
                if "clusters" in row.figures:
                    measured[-1]["clusters"] = clusters.cluster_accuracy(predictions, trial)
    turns, sent = federation.rounds * federation.cohort_size, federation.ledger
    figures = {name: float(np.mean([each[name] for each in measured])) for name in measured[0]}
    return figures | {
        "bytes_up": sent.total(direction="up") / turns,
        "bytes_down": sent.total(direction="down") / turns,
        "seconds": time.perf_counter() - began,
    }
