"""A trained classifier comes back from its folder as the one that was trained."""

import numpy as np
import pytest
import torch
from PIL import Image

import fedprompt as fp
from fedprompt.backbones.pretrained import network
from fedprompt.compare.classifier import load, save
from fedprompt.methods import METHODS, ClipSetting, Federation, VitSetting

NAMES = ["cat", "polar_bear", "fox"]
KINDS = {"one model": ("digits-S", "vit", 16, "L"), "CLIP": ("emoji", "clip", 32, "RGB")}
ROWS = [
    (name, family)
    for name, entry in METHODS.items()
    for family in KINDS
    if family in entry.families
]


@pytest.fixture(scope="module")
def made():
    return {family: network(name, kind) for family, (name, kind, *_) in KINDS.items()}


def photos(family, count, seed=0):
    *_, size, mode = KINDS[family]
    draw = np.random.default_rng(seed).integers(0, 256, (count, size, size, 3), dtype=np.uint8)
    return [Image.fromarray(levels).convert(mode) for levels in draw]


def trained(name, family, frozen, **changes):
    """Run two rounds of three clients."""
    entry = METHODS[name]
    images = torch.stack(list(map(frozen.preparation, photos(family, 18))))
    tokens = family == "CLIP" and entry.inputs != "images"
    inputs = frozen.tokens(images) if tokens else images
    given = {"rounds": 2, "steps": 1, "batch_size": 4, "clients": range(3), **changes}
    given["public"] = images[:4]
    if family == "CLIP":
        names = [each.replace("_", " ") for each in NAMES]
        setting = ClipSetting(tower=frozen.tower, class_names=names, length=2, **given)
    else:
        setting = VitSetting(trunk=frozen.trunk, num_classes=3, num_prompts=2, **given)
    labels, shards = torch.arange(18) % 3, dict(enumerate(torch.arange(18).split(6)))
    federation = Federation(inputs, labels, shards)
    method = entry.make(setting)
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
        values=METHODS[name].defaults,
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
