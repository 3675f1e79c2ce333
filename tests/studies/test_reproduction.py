"""Settings of the papers run from files to their figures, and each part does what it should."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import fedprompt as fp
import study
from fabricated import fabricate, unchecked
from fedprompt import methods
from fedprompt.compare import measure
from other_device import other_device
from studies import papers, reproduction, sets
from studies.core import Machine
from studies.division import divide, fewer
from studies.figures import purity
from studies.pipeline import flipped
from studies.reproduction import SUPERCLASSES
from studies.sets import Images, ImageSet
from tiny_backbones import SIZE, tiny
from zoo import TINY as TINY_NETWORKS
from zoo import network

SETTINGS = {name: each for paper in papers.PAPERS for name, each in papers.settings(paper).items()}
CLASSES = {"cifar100": 100, "flowers102": 102, "five-dataset": 50}
COOP = ("dtd-coop", "flowers102-coop", "food101-coop", "pets-coop", "caltech101-coop")
FREE = ("tiny-imagenet", *COOP)
"""Data sets that are written with as many classes as clients."""
DEVICE = ("fedhpl-1-svhn-iid", "sgpt-4-cifar100-s10", "fedl2g-2-htfe2", "fedotp-1-dtd")


def small(setting, root, rows=None):
    """Shrink a setting to two rounds, small images and a tiny data set in `root`."""
    if setting.family == "networks" and rows is not None:
        setting = replace(setting, num_clients=5, cohort_size=5)
    free = setting.data in FREE
    count = setting.num_clients if free else CLASSES.get(setting.data, 10)
    # Batch normalization needs two images in each batch of the smallest client.
    each = 40 if setting.family == "networks" else 8
    per_class = max(4, math.ceil(each * setting.num_clients / count))
    fabricate(setting.data, root, train=per_class, test=2, **({"classes": count} if free else {}))
    with unchecked():
        data = sets.load(setting.data, root, size=SIZE)
    size = 32 if setting.backbones[0].startswith("RN") else SIZE
    last = [row for row in setting.rows if row.method is not None][-(rows or len(setting.rows)) :]
    last = [replace(row, changes={**row.changes, "rounds": 2}) for row in last]
    brief = {"image_size": size, "epochs": min(2, setting.epochs), "last_rounds": 1}
    return replace(setting, rows=tuple(last), **brief), fewer(data, 0.001, setting.num_clients)


def run(setting, data, row, device="cpu"):
    own = replace(setting.of(row), image_size=setting.image_size)
    trial = reproduction.divided(own, data, row, 0, Machine(device), tiny).on(device)
    with torch.device(device):
        method = row.entry.make(trial.setting, **row.values)
    trial = trial._replace(figures=reproduction.figures_of(own, row))
    return measure.run(method, trial, shared=not row.personalized).figures


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_runs_from_files_to_its_figures(name, tmp_path):
    setting, data = small(SETTINGS[name], tmp_path)
    for row in setting.rows:
        found = run(setting, data, row)
        assert all(0 <= found[column] <= 1 for column in row.figures)
        assert math.isfinite(found["bytes_up"])


@pytest.mark.slow
@pytest.mark.parametrize("name", DEVICE)
def test_models_and_batches_are_on_the_device(name, tmp_path):
    setting, data = small(SETTINGS[name], tmp_path, 1)
    with other_device() as device:
        found = run(setting, data, setting.rows[0], device)
    assert math.isfinite(found["bytes_up"])


def test_missing_files_end_the_program_with_one_line(tmp_path, capsys):
    flags = ["--root", str(tmp_path), "--workers", "1", "--records", str(tmp_path)]
    with pytest.raises(SystemExit) as stop:
        study.main(["--study", "fedhpl", "--partitions", "fedhpl-14-homogeneous", *flags])
    assert stop.value.code == 2
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "study.py:" in line)
    assert "is missing. To download the data set to this place, run" in line


def images(count):
    pixels = torch.randint(256, (count, 3, SIZE, SIZE), dtype=torch.uint8)
    return Images(pixels, torch.arange(count) % 10, torch.zeros(count, dtype=torch.long))


def test_a_trial_has_the_recipe_of_its_setting():
    setting = replace(
        SETTINGS["fedhpl-1-cifar10-iid"],
        **{"image_size": SIZE, "rounds": 9, "num_clients": 4, "cohort_size": 2, "num_prompts": 5},
        **{"optimizer_values": {"momentum": 0.5, "weight_decay": 0.2}},
        **{"epochs": 3, "batch_size": 7, "flip": True},
    )
    data = ImageSet("cifar10", images(80), images(20), tuple("0123456789"))
    trial = reproduction.divided(setting, data, setting.rows[-1], 3, Machine(), tiny)
    made = trial.setting
    assert (made.rounds, made.cohort_size, made.batch_size, made.seed) == (9, 2, 7, 3)
    assert made.new_model(0).prompts.tokens.shape[1] == 5
    own = trial.federation.data(made, 0, 3)
    assert [len(labels) for _, labels in own.batches()] == [7, 7, 6] * 3
    group = own.optimizer(made.new_model(0), 0.4).param_groups[0]
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.4, 0.5, 0.2)
    assert made.augment is flipped
    model, pixels = made.new_model(0).eval(), data.train.pixels[:2]
    assert torch.equal(model(pixels), model(pixels.float()))  # the trunk prepares stored images


def test_networks_from_scratch_have_features_of_the_width_of_the_setting():
    setting = replace(SETTINGS["fedl2g-2-htfe3"], image_size=32, num_clients=3, cohort_size=3)
    data = ImageSet("cifar10", images(300), images(30), tuple("0123456789"))
    made = reproduction.divided(setting, data, setting.rows[-1], 0, Machine(), tiny).setting
    models = [made.new_model(client).eval() for client in made.clients]
    widths = [model.features(data.train.pixels[:2]).shape[1] for model in models]
    assert widths == [setting.num_features] * 3


def numbered(labels):
    return Images(torch.arange(len(labels)), labels, torch.zeros(len(labels), dtype=torch.int64))


def test_a_quarter_of_the_images_of_each_client_is_for_testing():
    labels, how = torch.arange(200) % 10, {"num_clients": 5}
    setting = replace(SETTINGS["fedl2g-1-cifar10-pathological"], **how)
    everything = numbered(labels)
    sides = (everything.at(part) for part in torch.arange(200).split([140, 60]))
    data = ImageSet("cifar10", *sides, tuple("0123456789"))
    made, *parts = reproduction.over_clients(setting, data, np.random.default_rng(0))
    how["generator"] = np.random.default_rng(0)
    shards = divide(setting.partition, labels, everything.domains, **how)
    for shard, train, test in zip(shards, *parts, strict=True):
        assert len(test) == round(len(shard) / 4)
        both = torch.cat([made.train.pixels[train], made.test.pixels[test]])
        assert torch.equal(both.sort().values, shard)


def test_groups_are_as_pure_as_counted_by_hand():
    kinds = torch.tensor([0, 0, 1, 1, 1, 2])
    # Group 0 has kinds 0, 0 and 1; group 2 has 1, 1 and 2; group 1 is empty.
    assert purity(torch.tensor([0, 0, 0, 2, 2, 2]), kinds) == pytest.approx(4 / 6)
    assert SUPERCLASSES.bincount().tolist() == [5] * 20
    # Maple, oak, palm, pine and willow; baby, boy, girl, man and woman.
    assert len(SUPERCLASSES[[47, 52, 56, 59, 96]].unique()) == 1
    assert len(SUPERCLASSES[[2, 11, 35, 46, 98]].unique()) == 1
    assert purity(torch.zeros(100, dtype=torch.int64), SUPERCLASSES) == pytest.approx(0.05)


@pytest.mark.parametrize("make", TINY_NETWORKS.values(), ids=TINY_NETWORKS)
def test_tiny_networks_return_features_and_can_be_trained(make):
    tiny = make()
    assert tiny.training
    assert tiny(torch.rand(2, 1, 16, 16)).ndim == 2
    assert 4_000 < sum(parameter.numel() for parameter in tiny.parameters()) < 150_000


NAMES = {name for each in SETTINGS.values() if each.family == "networks" for name in each.backbones}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(NAMES))
def test_networks_of_the_papers_return_features(name):
    known = {"cnn": 512, "resnet4": 64, "resnet8": 256, "resnet152": 2048, "vit_b_32": 768}
    with torch.device("meta"):  # no values are computed
        width = network(name, 32).eval()(torch.zeros(1, 3, 32, 32)).shape[1]
    assert width == known.get(name, width)


CALLS = {"fedhpl": "fedhpl-1-cifar10-iid", "sgpt": "sgpt-1-cifar100-s10"}
CALLS |= {"fedl2g": "fedl2g-1-cifar10-dirichlet", "fedotp": "fedotp-1-dtd"}
MODELS = {"fedhpl": "trunks", "sgpt": "trunk", "fedl2g": "networks", "fedotp": "tower"}
DATA = ("num_classes", "class_names", "seed", "public", "prepare")
VALUES = ("clients", "rounds", "epochs", "steps", "drop_last", "batch_size")
VALUES += ("num_prompts", "num_features", "length")


@pytest.mark.parametrize("paper", CALLS)
def test_the_row_of_a_paper_is_its_call(paper, tmp_path):
    """The call has the models and the data of the trial, and no value of the table."""
    setting, data = small(SETTINGS[CALLS[paper]], tmp_path)
    row = next(row for row in SETTINGS[CALLS[paper]].rows if row.method in papers.OWN)
    own = replace(SETTINGS[CALLS[paper]].of(row), image_size=setting.image_size)
    trial = reproduction.divided(own, data, row, 0, Machine(), tiny)
    made, call = trial.setting, getattr(methods.papers, paper)
    given = {name: getattr(made, name) for name in DATA if name in vars(made)}
    if paper == "fedotp":
        del given["num_classes"], given["prepare"]
    two = call(getattr(made, MODELS[paper]), **given), row.entry.make(trial.setting, **row.values)
    fields, optimizers = [], []
    for each in two:
        values = {name: vars(each.setting).get(name) for name in VALUES}
        fields.append(values | {"cohort": [*each.setting.cohort(0)]})
        make = each.setting.make_optimizer
        optimizers.append((getattr(make, "func", make), getattr(make, "keywords", {})))
    assert fields[0] == fields[1]
    assert optimizers[0] == optimizers[1]
    found = [next(fp.run_rounds(each, trial.federation, [[0, 1]])) for each in two]
    for name in ("server", "clients"):
        torch.testing.assert_close(*(getattr(now, name) for now in found), rtol=0, atol=0)
