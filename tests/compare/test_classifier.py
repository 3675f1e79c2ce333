"""A trained classifier comes back from its folder as the one that was trained."""

import csv
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image

import fedprompt as fp
from fedprompt.backbones.pretrained import network
from fedprompt.compare import Classifier
from fedprompt.compare.classifier import function_of, load, save
from fedprompt.compare.command import predict
from fedprompt.methods import METHODS, ClipSetting, Federation, VitSetting
from other_device import other_device

NAMES = ["cat", "polar_bear", "fox"]
KINDS = {"one model": ("digits-S", "vit", 16, "L"), "CLIP": ("emoji", "clip", 32, "RGB")}
LIKE = {"one model": {"one model", "mixed models"}, "CLIP": {"CLIP"}}
ROWS = [
    (name, family)
    for name, entry in METHODS.items()
    for family, kinds in LIKE.items()
    if kinds & {*entry.families}
]
SMALLER = {
    name: {"sizes": {1: 1}} if "sizes" in entry.defaults else {} for name, entry in METHODS.items()
}
"""A smaller client, whose folder has a model of its size."""


@pytest.fixture(scope="module")
def made():
    return {family: network(name, kind) for family, (name, kind, *_) in KINDS.items()}


def photos(family, count, seed=0):
    *_, size, mode = KINDS[family]
    draw = np.random.default_rng(seed).integers(0, 256, (count, size, size, 3), dtype=np.uint8)
    return [Image.fromarray(levels).convert(mode) for levels in draw]


def trained(name, family, frozen, **changes):
    """Run two rounds of two clients."""
    entry = METHODS[name]
    images = torch.stack(list(map(frozen.preparation, photos(family, 12))))
    tokens = family == "CLIP" and entry.inputs != "images"
    inputs = frozen.tokens(images) if tokens else images
    given = {"rounds": 2, "steps": 1, "batch_size": 4, "clients": range(2), **changes}
    given["public"] = images[:4]
    if family == "CLIP":
        names = [each.replace("_", " ") for each in NAMES]
        setting = ClipSetting(tower=frozen.tower, class_names=names, length=2, **given)
    else:
        setting = VitSetting(trunk=frozen.trunk, num_classes=3, num_prompts=2, **given)
    labels, shards = torch.arange(12) % 3, dict(enumerate(torch.arange(12).split(6)))
    federation = Federation(inputs, labels, shards)
    method = entry.make(setting, **SMALLER[name])
    *_, now = fp.run_rounds(method, federation)
    return setting, now, federation, method, "tokens" if tokens else "images"


def saved(folder, name, family, frozen, client=1, **changes):
    setting, now, federation, method, inputs = trained(name, family, frozen, **changes)
    model = now.model(method, federation, client)
    save(
        folder,
        model,
        network=frozen,
        setting=setting,
        method=name,
        make=METHODS[name].make,
        values=METHODS[name].defaults | SMALLER[name],
        class_names=NAMES,
        client=client,
        inputs=inputs,
        tests=(
            federation.inputs[:5],
            torch.stack(list(map(frozen.preparation, photos(family, 5)))),
        ),
    )
    return model, federation


@pytest.mark.parametrize(("name", "family"), ROWS)
def test_the_classifier_of_each_method_predicts_as_it_was_trained(name, family, made, tmp_path):
    """It needs neither data nor gradients."""
    model, federation = saved(tmp_path / "a", name, family, made[family])
    with torch.no_grad():
        expected = model.eval()(federation.inputs[:5]).softmax(1)
        loaded = load(tmp_path / "a", network=made[family])
    assert loaded.class_names == NAMES
    names, probabilities = loaded.predict(photos(family, 5))
    torch.testing.assert_close(probabilities, expected, rtol=0, atol=1e-6)
    assert names == [NAMES[k] for k in expected.argmax(1)]


@pytest.fixture(scope="module")
def folders(made, tmp_path_factory):
    root = tmp_path_factory.mktemp("classifiers")
    saved(root / "vit", "fedper", "one model", made["one model"])
    saved(root / "clip", "promptfl", "CLIP", made["CLIP"])
    saved(root / "zero", "zero_shot", "CLIP", made["CLIP"])
    return root


def test_a_folder_alone_is_enough_in_any_precision(folders):
    for name, family in (("vit", "one model"), ("clip", "CLIP")):
        images = photos(family, 4, seed=1)
        expected = load(folders / name).predict(images).probabilities
        one = load(folders / name).predict(images[2])
        torch.testing.assert_close(one.probabilities, expected[2:3])
        assert load(folders / name).predict([]).probabilities.shape == (0, 3)
        assert isinstance(load(folders / name), Classifier)  # one for both families
        for model in (load(folders / name, dtype=torch.bfloat16), load(folders / name).half()):
            found = model.predict(images).probabilities
            torch.testing.assert_close(found, expected, rtol=0, atol=0.05)
            assert found.dtype == torch.float32


@pytest.mark.parametrize("name", ["vit", "clip", "zero"])
def test_a_classifier_is_loaded_on_another_device(name, folders):
    images = photos("one model" if name == "vit" else "CLIP", 3)
    expected = load(folders / name).predict(images).probabilities
    with other_device() as device:
        found = load(folders / name, device=device).predict(images).probabilities
    torch.testing.assert_close(found, expected)


def test_a_clip_predicts_other_names_unless_it_learned_something_for_each(folders, made):
    names = ["dog", "owl", "fish", "tree"]
    images = photos("CLIP", 3)
    for name in ("clip", "zero"):
        model = load(folders / name, class_names=names)
        assert model.predict(images).probabilities.shape == (3, 4)
        same = load(folders / name, class_names=["cat", "polar bear", "fox"]).predict(images)
        expected = load(folders / name).predict(images)
        torch.testing.assert_close(same.probabilities, expected.probabilities)
    with pytest.raises(
        ValueError, match="`class_names` must be those of the folder, because it is"
    ):
        load(folders / "vit", class_names=names)


def test_methods_of_a_file_are_found_by_its_path(made, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from fedprompt.methods import fedprox\n\n"
        "def mine(setting, *, learning_rate=0.1):\n"
        "    return fedprox(setting, learning_rate=learning_rate)\n"
    )
    setting, now, federation, method, _ = trained("fedprox", "one model", made["one model"])
    name = f"{tmp_path / 'mine.py'}:mine"
    images = torch.stack(list(map(made["one model"].preparation, photos("one model", 2))))
    given = {"network": made["one model"], "setting": setting, "class_names": NAMES}
    given |= {"method": name, "make": function_of(name), "values": {"learning_rate": 0.1}}
    model = now.model(method, federation, 0)
    tests = federation.inputs[:2], images
    save(tmp_path / "a", model, **given, client=None, inputs="images", tests=tests)
    torch.testing.assert_close(load(tmp_path / "a")(images), model(images))
    with torch.no_grad():
        model.head.bias.add_(1)
        wrong = tests[0], images.flip(0)
    with pytest.raises(ValueError, match="`model` must have a state from which it is made again"):
        save(tmp_path / "b", model, **given, client=None, inputs="images", tests=wrong)
    assert not (tmp_path / "b").exists()
    setting = replace(setting, prompts=partial(fp.ShallowPrompts, 2))
    with pytest.raises(ValueError, match=r"`setting.prompts` must be plain"):
        save(
            tmp_path / "b",
            model,
            **given | {"setting": setting},
            client=None,
            inputs="images",
            tests=tests,
        )


def test_predict_prints_a_table_of_probabilities(folders, tmp_path, capsys):
    (tmp_path / "in").mkdir()
    for number, image in enumerate(photos("CLIP", 3)):
        image.save(tmp_path / "in" / f"{number}, x.png")
    (tmp_path / "in" / "notes.txt").write_text("no image")
    alone = tmp_path / "in" / "1, x.png"
    predict([str(folders / "clip"), str(tmp_path / "in"), str(alone)])
    table = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    paths = [str(tmp_path / "in" / f"{number}, x.png") for number in (0, 1, 2, 1)]
    found = load(folders / "clip").predict(paths)
    assert [row["image"] for row in table] == paths
    assert [row["class"] for row in table] == found.names
    rows = torch.tensor([[float(row[name]) for name in NAMES] for row in table])
    torch.testing.assert_close(rows, found.probabilities, rtol=0, atol=1e-5)
    for arguments in (
        [str(tmp_path), str(alone)],
        [str(folders / "vit"), str(tmp_path / "none.png")],
        [str(folders / "vit"), str(alone), "--max-pixels", "9"],
        [str(folders / "vit"), str(alone), "--device", "cdua"],
        [str(folders / "vit"), str(folders)],  # has no images
    ):
        with pytest.raises(SystemExit, match="2"):
            predict(arguments)
        err = capsys.readouterr().err
        assert err.startswith("fedprompt predict: ")
        assert err.count("\n") == 1


def test_a_classifier_is_exported_with_any_batch(folders):
    model = load(folders / "clip")
    images = torch.stack(list(map(model.preparation, photos("CLIP", 4))))
    batch = {0: torch.export.Dim("batch")}
    with torch.no_grad():
        program = torch.export.export(model, (images[:2],), dynamic_shapes=(batch,)).module()
        torch.testing.assert_close(program(images), model(images), rtol=1e-4, atol=1e-4)


def test_prompts_of_save_prompts_are_a_classifier_too(tmp_path):
    network_of = network("digits-B")
    parts = {"prompts": fp.DeepPrompts(2, network_of.trunk), "head": torch.nn.Linear(64, 2)}
    about = {"trunk": network_of.trunk, "class_names": ["a", "b"], "model": "digits-B"}
    own = network_of.preparation
    fp.save_prompts(torch.nn.ModuleDict(parts), tmp_path / "p", **about, preparation=own)
    model = load(tmp_path / "p")
    assert model.predict(photos("one model", 2)).probabilities.shape == (2, 2)
