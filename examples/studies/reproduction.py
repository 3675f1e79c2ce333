"""Studies of the papers: the division of a data set, and models as the papers have them."""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import fedprompt as fp
from fedprompt.backbones.pretrained import tokens_of
from fedprompt.compare import Trial
from fedprompt.interfaces import TrainableTrunk
from fedprompt.methods import ClipSetting, NetworkSetting, VitSetting
from fedprompt.methods import Setting as Run
from fedprompt.methods.models import tuned_trunk
from studies import estimate, figures, papers, sets
from studies.backbones import Make, backbone, pretrained
from studies.core import COLUMNS, Images, Machine, Row, Study, content, trial
from studies.division import divide, fewer, only_used, split_shards
from studies.figures import Joined, Measured, last
from studies.pipeline import Preparation, flipped
from studies.sets.readers import ImageSet

FLOATS = ("fedmix",)
"""Methods that average images, or differentiate by them."""
SCALED = ("pfedpt",)
"""Methods that add values of their own to images, whose levels are from -1 to 1."""
SUPERCLASSES = torch.tensor(content("sizes")["superclasses"]["cifar100"], device="cpu")
NUM_PUBLIC = 500
"""Training images that methods with public data have without labels; clients keep theirs."""


@dataclass
class Floats:
    """Values of another dtype, whose batches have single precision."""

    values: Any

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, positions: Tensor) -> Tensor:
        return self.values[positions].float()


class Few(Trial):
    """Trial that was made of few images and rounds."""

    def shrunk(self, share: float) -> "Few":
        """Return the trial."""
        return self


@dataclass(kw_only=True)
class PaperClip(ClipSetting):
    """A CLIP with contexts.

    Attributes:
        prepare: Function from stored images to inputs of the CLIP.
    """

    prepare: Preparation


def make(paper: str, partition: str, row: Row, *, seed: int, machine: Machine) -> Trial:
    """Divide the images of a data set over the clients of a setting.

    Args:
        paper: Name of the paper.
        partition: Name of the setting.
        row: Row with a method.
        seed: Seed of the division, initial values, cohorts and batches.
        machine: Where the data set is, and the device.
    """
    setting = papers.settings(paper)[partition].of(row)
    of = partial(backbone, weights=machine.weights)
    return divided(setting, loaded(setting, machine), row, seed, machine, of)


def loaded(setting: papers.Setting, machine: Machine) -> ImageSet:
    """Read the data set of a setting.

    Raises:
        ValueError: If a file is missing.
    """
    try:
        return sets.load(setting.data, machine.root)
    except FileNotFoundError as error:
        raise ValueError(f"`--root` must have the data set {setting.data}: {error}") from error


def divided(
    setting: papers.Setting, data: ImageSet, row: Row, seed: int, machine: Machine, of: Make
) -> Trial:
    """Make the trial of a setting on a data set, with the function that makes its backbones."""
    if machine.shrink != 1:
        setting = replace(setting, rounds=max(2, math.ceil(machine.shrink * setting.rounds)))
        data = fewer(data, machine.shrink, setting.num_clients)
    rng = np.random.default_rng(seed)
    data, shards, own = over_clients(setting, data, rng)
    train, test = data.train, data.test
    fields = common(setting, len(data.class_names), seed) | {"device": machine.device}
    if setting.family == "CLIP":
        run, sides = _clip(setting, data, fields, row.inputs, of)
    else:
        build = _networks if setting.family == "networks" else _vits
        run, sides = build(setting, fields, of), (train.pixels, test.pixels)
    count = len(train.labels)
    public = torch.linspace(0, count - 1, min(count, NUM_PUBLIC)).long()
    run = replace(run, public=sides[0][public])
    if row.method in SCALED:
        sides = [side.float() / 127.5 - 1 for side in sides]
        size = {"size": (setting.image_size,) * 2, "mode": "bilinear", "antialias": True}
        run = replace(run, prepare=partial(F.interpolate, **size))
    pixels = Floats(sides[0]) if row.method in FLOATS else sides[0]
    train, test = train._replace(pixels=pixels), test._replace(pixels=sides[1])
    if setting.own_tests:
        own = divided_tests(run.num_classes, train, test, shards, rng)
    how = {"domain_names": data.domain_names, "own": own}
    made = Few(*trial(lambda **fields: run, train, test, shards, seed=seed, **how))
    if setting.partition.kind != "domains":
        return made
    firsts = [data.domain_names[train.domains[part[0]]] for part in shards]
    return made._replace(names=[f"{name}-{client}" for client, name in enumerate(firsts)])


def divided_tests(
    num_classes: int, train: Images, test: Images, shards: Sequence[Any], rng: np.random.Generator
) -> list[Tensor]:
    """Divide the test inputs of each cell over the clients, as its training inputs are."""
    cells, known = train.cells(num_classes), test.cells(num_classes)
    count = 1 + int(max(cells.max(), known.max()))
    mixes = torch.stack([cells[torch.as_tensor(part)].bincount(minlength=count) for part in shards])
    shares = (mixes / mixes.sum(0).clamp(min=1).double()).numpy()
    parts = fp.data.allocate(known, shares, min_size=0, generator=rng)
    return list(map(torch.as_tensor, parts))


def over_clients(
    setting: papers.Setting, data: ImageSet, rng: np.random.Generator
) -> tuple[ImageSet, list[Tensor], list[Tensor] | None]:
    """Return images, and the training images and held-out images of each client among them."""
    share, own = setting.test_share, None
    if share is not None:
        pairs = zip(data.train, data.test, strict=True)
        data = data._replace(train=Images(*map(torch.cat, pairs)))
    train = data.train
    how = {"num_clients": setting.num_clients, "generator": rng}
    shards = divide(setting.partition, train.labels, train.domains, **how)
    if share is not None:
        shards, own = split_shards(shards, share, generator=rng)
        test, own = only_used(train, own)
        data = data._replace(test=test)
    if share is not None or setting.family == "CLIP":  # whose tokens are computed once
        train, shards = only_used(train, shards)
    return data._replace(train=train), shards, own


def common(setting: papers.Setting, num_classes: int, seed: int) -> dict[str, Any]:
    """Return the fields that runs of all families have."""
    same = ("rounds", "cohort_size", "batch_size", "epochs", "drop_last")
    return {name: getattr(setting, name) for name in same} | {
        "clients": range(setting.num_clients),
        "num_classes": num_classes,
        "seed": seed,
        "public": torch.empty(0),
        "augment": flipped if setting.flip else None,
        "make_optimizer": partial(torch.optim.SGD, **setting.optimizer_values),
    }


def prepared_trunk(trunk: TrainableTrunk, prepare: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of a trunk that takes stored images; both have the same model."""
    ours: Any = copy.copy(trunk)
    ours.prepare, ours.embed = prepare, lambda images: trunk.embed(prepare(images))
    ours.tuned = lambda tune: prepared_trunk(tuned_trunk(trunk, tune), prepare)
    return ours


def _vits(setting: papers.Setting, fields: dict[str, Any], of: Make) -> Run:
    """Make vision transformers with prompts, or convolutional networks with a border of pixels."""
    made = [of(name, setting.image_size) for name in setting.backbones]
    prepares = [Preparation(setting.image_size, *each[1:4]) for each in made]
    pairs = [*zip((each.model for each in made), prepares, strict=True)]
    if hasattr(made[0].model, "patch_embed"):
        trunks = [prepared_trunk(fp.vit_trunk(model), prepare) for model, prepare in pairs]
        sizes = {"num_prompts": setting.num_prompts, "num_features": setting.num_features}
        return VitSetting(trunks=trunks, **sizes, **fields)
    look = {"padding": setting.num_prompts, "mean": made[0].mean, "std": made[0].std}
    return NetworkSetting(
        networks=[each.model for each in made],
        border=partial(fp.PadPrompts, setting.image_size, **look),
        num_features=setting.num_features,
        prepare=prepares[0].to(fields["device"]),
        **fields,
    )


def _networks(setting: papers.Setting, fields: dict[str, Any], of: Make) -> Run:
    size = setting.image_size
    return NetworkSetting(
        networks=[partial(lambda name: of(name, size).model, name) for name in setting.backbones],
        num_features=setting.num_features,
        prepare=Preparation(size, *of(setting.backbones[0], size)[1:4]).to(fields["device"]),
        **fields,
    )


def _clip(
    setting: papers.Setting, data: ImageSet, fields: dict[str, Any], kind: str, of: Make
) -> tuple[Run, Sequence[Any]]:
    """Make the run, and compute the tokens of all images once, or prepare them."""
    model, *normal, tokenizer = of(setting.backbones[0], setting.image_size)
    clip = fp.freeze(model.to(fields["device"]))
    prepare = Preparation(setting.image_size, *normal).to(fields["device"])

    def encode(pixels: Tensor) -> Tensor:
        """Encode a batch on the device, and keep it in the memory of the host."""
        images = prepare(pixels)
        return (images if kind == "images" else tokens_of(clip, images)).cpu()

    how = {"batch_size": 64, "dtype": torch.float16}
    sides = [Floats(fp.precompute(encode, each.pixels, **how)) for each in (data.train, data.test)]
    with torch.device(fields["device"]):
        tower = fp.TextTower(clip, tokenizer)
        names = {"class_names": data.class_names, "length": setting.length, "prepare": prepare}
        run = PaperClip(tower=tower, **names, **fields)
    return run, sides


def figures_of(setting: papers.Setting, row: Row) -> Measured:
    """Return the figures of a row: of last rounds, of curves, of classes and of mechanisms."""
    setting, shared = setting.of(row), not row.personalized
    domains = setting.partition.kind == "domains"
    found = [figures.mechanism(row), figures.averaged(setting.last_rounds, shared, domains)]
    if setting.curve:
        every, column = max(1, setting.rounds // papers.POINTS), setting.curve
        points = figures.loss_curve if column == "loss" else partial(figures.curve, column, shared)
        found.append(points(every=every))
    if setting.per_class:
        found.append(last(figures.classes))
    if setting.per_group and row.method == "sgpt":
        found += [figures.selections_of_client(), last(figures.congruence)]
    if "clusters" in getattr(row, "figures", ()):
        found.append(last(figures.clusters(SUPERCLASSES)))
    return Joined(*found)


def study_of(paper: str) -> Study:
    """Make the study of a paper, whose partitions are its settings."""
    settings = papers.settings(paper)
    title = next(iter(settings.values())).source.partition(" (")[0]
    rows = [row for setting in settings.values() for row in setting.rows]
    names = dict.fromkeys(name for row in rows for name in row.figures)
    own = {"own": "own tests"} if any(each.own_tests for each in settings.values()) else {}
    curves = {each.curve for each in settings.values()} - {"", "loss"}
    own |= {f"{name}, best round": f"{(COLUMNS | own)[name]}, best round" for name in curves}

    def networks(partition: str, row: Row) -> Sequence[str]:
        return [*filter(pretrained, settings[partition].of(row).backbones)]

    return Study(
        title=title,
        partitions={name: setting.source for name, setting in settings.items()},
        family=lambda partition: papers.FAMILIES.get(kind := settings[partition].family, kind),
        rows=lambda partition: settings[partition].rows,
        make=partial(make, paper),
        networks=networks,
        columns=COLUMNS | own | {name: name for name in names if name not in COLUMNS},
        figures=lambda partition, row: figures_of(settings[partition], row),
        hours=lambda partition, row: estimate.paper_hours(settings[partition], row),
        processor=estimate.GPU,
        choices=lambda partition: settings[partition].choices,
    )


STUDIES = {paper: study_of(paper) for paper in papers.PAPERS}
