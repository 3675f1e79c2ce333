"""Fingerprints of backbones, prompts and classes: which part differs, and what changes nothing."""

import copy
from functools import partial

import pytest
import timm
import torch
import torch.nn as nn

import fedprompt as fp
from clips import TOKENIZER, make_clip
from models import tiny_vit


def of(model):
    return fp.fingerprint(fp.vit_trunk(model))


def changed(change, **options):
    """Change a model after its trunk was made, and return the fingerprint."""
    trunk = fp.vit_trunk(tiny_vit(**options))
    change(trunk.model)
    return fp.fingerprint(trunk)


def with_weights_of(model, **options):
    """Make another model with the same weights."""
    other = tiny_vit(**options)
    other.load_state_dict(model.state_dict(), strict=False)
    return other


def next_number(name):
    def change(model):
        number = model.state_dict()[name].view(-1)[-1:]
        number.copy_(torch.nextafter(number, torch.full_like(number, torch.inf)))

    return change


def setting(place, name, value):
    return lambda model: setattr(model.get_submodule(place), name, value)


def of_the_machine(model):
    model.train()
    model.name_or_path, model._calls = "/home/me/vit", 3
    first, second, _ = model.blocks
    second.attn.dropout = 0.1
    first.attn.fused_attn = not first.attn.fused_attn
    first.attn.scale *= 1 + 2**-52  # the last bit of a root can depend on the machine


MODEL = tiny_vit()
SAME = with_weights_of
# Fingerprints, and the parts that differ from the plain model's.
FINGERPRINTS = {
    "made again": (lambda: of(tiny_vit()), set()),
    "copy": (lambda: of(copy.deepcopy(MODEL)), set()),
    "classifier": (lambda: of(SAME(MODEL, num_classes=7)), set()),
    "dropout": (lambda: of(SAME(MODEL, drop_rate=0.1, drop_path_rate=0.1)), set()),
    "dropout of attention": (lambda: of(SAME(MODEL, attn_drop_rate=0.1)), set()),
    "initialization": (lambda: of(SAME(MODEL, weight_init="skip")), set()),
    "machine": (partial(changed, of_the_machine), set()),
    "bias": (partial(changed, next_number("blocks.2.mlp.fc2.bias")), {"weights"}),
    "class token": (partial(changed, next_number("cls_token")), {"weights"}),
    "norm": (partial(changed, next_number("norm.weight")), {"weights"}),
    "buffer": (
        partial(changed, lambda model: model.register_buffer("mean", torch.zeros(3))),
        {"weights"},
    ),
    "mask": (
        lambda: fp.fingerprint(fp.vit_trunk(MODEL, attention_mask=torch.zeros(5, 5))),
        {"weights"},
    ),
    "dtype": (lambda: of(tiny_vit().float()), {"dtype", "weights"}),
    "ReLU": (lambda: of(tiny_vit(act_layer=nn.ReLU)), {"activation"}),
    "GELU, tanh": (lambda: of(tiny_vit(act_layer=partial(nn.GELU, "tanh"))), {"activation"}),
    "timm's GELU": (lambda: of(tiny_vit(act_layer=timm.layers.GELUTanh)), {"activation"}),
    "heads": (lambda: of(SAME(MODEL, num_heads=3)), {"settings"}),
    "pooling": (lambda: of(SAME(MODEL, global_pool="avg", fc_norm=False)), {"settings"}),
    "epsilon": (lambda: of(SAME(MODEL, norm_layer=partial(nn.LayerNorm, eps=0.1))), {"settings"}),
}


@pytest.mark.parametrize(("make", "parts"), FINGERPRINTS.values(), ids=FINGERPRINTS)
def test_a_change_of_features_changes_its_part_and_nothing_else_does(make, parts):
    expected, found = of(MODEL), make()
    assert {part for part in {**expected, **found} if expected[part] != found[part]} == parts


def test_numbers_names_shapes_and_places_are_told_apart():
    """All weights have the same bytes, and all settings look alike."""
    weights, settings = set(), [of(MODEL)["settings"]]
    for shape, name in (((2, 3), "a"), ((3, 2), "a"), ((2, 3), "b")):
        model = nn.Module()
        model.register_parameter(name, nn.Parameter(torch.arange(6.0).reshape(shape)))
        weights.add(fp.fingerprint(model)["weights"])
    assert len(weights) == 3
    places = [("", "grid", each) for each in (0.5, 7, "7", (7, 8), (7, 9), (0.5, "a"), (), 8)]
    places += [("blocks.1", "grid", 7), ("blocks.0", "grid", 7), ("", "grids", 7)]
    settings += [changed(setting(*each))["settings"] for each in places]
    assert len(set(settings)) == len(places) + 1
    buffers = [changed(lambda m, v=v: m.register_buffer("mean", v)) for v in torch.eye(2)]
    assert buffers[0] != buffers[1]


def test_the_order_of_registration_does_not_matter():
    prints = []
    for names, dtype in (("ab", torch.float16), ("ba", torch.float16), ("ab", torch.bfloat16)):
        model = nn.Module()
        for name in names:
            model.register_buffer(name, torch.zeros(2, dtype=dtype))
            model.register_module(f"{name}_norm", nn.LayerNorm(2))
        prints.append(fp.fingerprint(model))
    assert prints[0] == prints[1]
    assert prints[0] != prints[2]


def test_parts_are_readable():
    model = tiny_vit(act_layer=timm.layers.GELUTanh)
    model.pretrained_cfg = {"architecture": "vit_tiny"}
    trunk = fp.vit_trunk(model)
    late, early = (fp.LayeredPrompts(2, 12, layers=(layer,))() for layer in (2, 0))
    found = fp.fingerprint(trunk, late, early)
    assert found["prompts"] == "2 at layers 2, kept; 2 at layers 0, kept"
    assert (found["backbone"], found["dtype"]) == ("VisionTransformer vit_tiny", "float64")
    assert found["activation"] == "GELUTanh()"
    assert not {"classes", "name_position"} & found.keys()


def test_streams_and_class_names_are_told_apart():
    trunk = fp.vit_trunk(MODEL)
    plans = [fp.DeepPrompts(2, 12, 3), fp.DeepPrompts(3, 12, 3)]
    plans += [fp.LayeredPrompts(2, 12, layers=layers) for layers in ((0, 1, 2), (0, 2), (0,), (2,))]
    streams = [(each(),) for each in plans]
    streams += [(), (plans[-1](), plans[-2]()), (plans[-2](), plans[-1]())]
    prints = {fp.fingerprint(trunk, *each).get("prompts") for each in streams}
    assert len(prints) == len(streams)
    sets = [
        ["cat", "dog"], ["dog", "cat"], ["cat"], ["cat", "cat"], ["cat", "dog", "yurt"],
        ["cat, dog"], ['cat", "dog'],
    ]  # fmt: skip
    assert len({fp.fingerprint(trunk, class_names=names)["classes"] for names in sets}) == len(sets)


def test_the_fingerprint_of_a_text_tower_covers_the_whole_model_and_the_place_of_names():
    tower, quick, other = (
        fp.TextTower(make_clip(quick_gelu=quick), TOKENIZER) for quick in (False, True, False)
    )
    expected = fp.fingerprint(tower)
    with torch.no_grad():
        other.model.visual.proj += 1
    assert fp.fingerprint(other) == expected | {"weights": fp.fingerprint(other)["weights"]}
    assert fp.fingerprint(quick) == expected | {"activation": "QuickGELU()"}
    assert expected["name_position"] == "after the context"
    for place in (0, 2):
        found = fp.fingerprint(tower, name_position=place)
        assert found == expected | {"name_position": str(place)}
