"""A classifier folder is tested for its training images, by the command too."""

import numpy as np
import pytest
import torch
from PIL import Image

import fedprompt as fp
from fedprompt.backbones.pretrained import network
from fedprompt.compare import command
from fedprompt.compare.classifier import save
from fedprompt.methods import METHODS, ClipSetting, Federation, VitSetting

NAMES = ["cat", "dog", "owl"]
KINDS = {
    "vit": ("digits-S", "vit", "L", 16, "full_tuning"),
    "clip": ("emoji", "clip", "RGB", 32, "promptfl"),
}


def written(folder, seed, mode, size, count=12):
    """Write images of noise, as many of each class."""
    draw = np.random.default_rng(seed)
    paths = []
    for k in range(count):
        path = folder / NAMES[k % 3] / f"{k}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        levels = draw.integers(0, 256, (size, size, 3), dtype=np.uint8)
        Image.fromarray(levels).convert(mode).save(path)
        paths.append(path)
    return paths, torch.arange(count) % 3


def trained(folder, kind, paths, labels, **values):
    """Train one client on images, and save the classifier."""
    name, family, *_, method = KINDS[kind]
    frozen = network(name, family)
    images = torch.stack([frozen.preparation(path) for path in paths])
    inputs = frozen.tokens(images) if kind == "clip" else images
    rounds = 1 if kind == "clip" else 12
    given = {"rounds": rounds, "steps": 5, "batch_size": 12, "clients": [0], "public": images[:2]}
    if kind == "clip":
        setting = ClipSetting(tower=frozen.tower, class_names=NAMES, length=2, **given)
    else:
        setting = VitSetting(trunk=frozen.trunk, num_classes=3, **given)
    made = METHODS[method].make(setting, **values)
    federation = Federation(inputs, labels, {0: torch.arange(len(labels))})
    *_, now = fp.run_rounds(made, federation)
    more = {"make": METHODS[method].make, "values": values, "class_names": NAMES, "client": None}
    tests = inputs[:2], images[:2]
    save(folder, now.model(made, federation, 0), network=frozen, setting=setting, method=method,
         inputs="tokens" if kind == "clip" else "images", tests=tests, **more)  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("leakage")
    for kind, (_, _, mode, size, _) in KINDS.items():
        for seed, side in enumerate(("in", "out")):
            paths, labels = written(root / kind / side, seed, mode, size)
            values = {} if kind == "clip" else {"learning_rate": 1e-3}  # larger ones oscillate
            trained(root / kind / f"{side}-model", kind, paths, labels, **values)
    return root


def printed(capsys, *arguments):
    command.leakage([*map(str, arguments)])
    rows = capsys.readouterr().out.strip().splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_an_overfitted_network_is_found_against_both_controls_and_a_context_is_not(folders, capsys):
    found = {}
    for kind in KINDS:
        at = folders / kind
        sides = "--members", at / "in", "--held-out", at / "out"
        found[kind] = printed(capsys, at / "in-model", *sides, "--without", at / "out-model")
        assert [row[:2] for row in found[kind]] == [
            ["classifier", "held-out images"], ["classifier", "one without the members"],
            ["control, memorizes members", "held-out images"],
        ]  # fmt: skip
        assert float(found[kind][2][2]) > 0.95
    assert min(float(row[2]) for row in found["vit"]) > 0.9
    low, high = map(float, found["clip"][0][3].split(" to "))
    assert low < 0.8 < 1.0
    assert high > 0.5


WRONG = {
    ("in-model", "--members", "in", "--held-out", "in"): "--held-out must have no image",
    ("in-model", "--members", "none", "--held-out", "out"): "must be a folder",
    ("none", "--members", "in", "--held-out", "out"): "must be a folder",
    ("in-model", "--members", "in", "--held-out", "other"): "--held-out must have classes of",
    ("in-model", "--members", "in", "--held-out", "out", "--device", "no"): "--device must",
}


@pytest.mark.parametrize("arguments", WRONG)
def test_wrong_folders_are_refused_in_one_line(arguments, folders, capsys):
    at = folders / "vit"
    for name in ("whale", "cat"):
        (at / "other" / name).mkdir(parents=True, exist_ok=True)
        Image.new("L", (16, 16), len(name)).save(at / "other" / name / "1.png")
    flags = [each if each.startswith("--") or each == "no" else at / each for each in arguments]
    with pytest.raises(SystemExit, match="2"):
        command.leakage([*map(str, flags)])
    said = capsys.readouterr().err
    assert said.startswith("fedprompt leakage: ")
    assert said.count("\n") == 1
    assert WRONG[arguments] in said or "none" in arguments, said


def test_a_classifier_of_other_classes_is_no_control(folders, capsys):
    at = folders / "vit"
    flags = "--members", at / "in", "--held-out", at / "out", "--without", folders / "clip/in-model"
    with pytest.raises(SystemExit, match="2"):
        command.leakage([*map(str, (at / "in-model", *flags))])
    assert "--without must have the classes and the preparation" in capsys.readouterr().err
