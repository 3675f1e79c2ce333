"""Fingerprints of backbones, prompts and classes, and payloads that they refuse."""

import copy
from functools import partial

import pytest
import timm
import torch
import torch.nn as nn

import fedprompt as fp
from clips import TOKENIZER, make_clip
from models import tiny_vit

NAMES = ["cat", "dog", "yurt"]


def differing(first, second):
    assert first.keys() == second.keys()
    return {part for part in first if first[part] != second[part]}


def test_equal_backbones_and_copies_have_equal_fingerprints():
    model = tiny_vit()
    assert (
        fp.fingerprint(fp.vit_trunk(model))
        == fp.fingerprint(fp.vit_trunk(tiny_vit()))
        == fp.fingerprint(fp.vit_trunk(copy.deepcopy(model)))
    )
    assert fp.fingerprint(fp.vit_trunk(model))["dtype"] == "float64"
    model.pretrained_cfg = {"architecture": "vit_tiny"}
    assert fp.fingerprint(fp.vit_trunk(model))["backbone"] == "VisionTransformer vit_tiny"


def test_the_last_bit_of_a_weight_or_buffer_changes_the_fingerprint():
    expected = fp.fingerprint(fp.vit_trunk(tiny_vit()))
    for name in ("blocks.2.mlp.fc2.bias", "cls_token", "norm.weight"):
        model = tiny_vit()
        with torch.no_grad():
            number = model.get_parameter(name).view(-1)[-1:]
            number.copy_(torch.nextafter(number, torch.full_like(number, torch.inf)))
        assert differing(fp.fingerprint(fp.vit_trunk(model)), expected) == {"weights"}, name
    model = tiny_vit()
    model.register_buffer("mean", torch.zeros(3))
    with_zeros = fp.fingerprint(fp.vit_trunk(model))
    model.mean += 1
    assert differing(fp.fingerprint(fp.vit_trunk(model)), with_zeros) == {"weights"}


def test_names_and_shapes_of_weights_change_the_fingerprint():
    """The bytes of the weights and their order are equal."""
    trunks = []
    for shape, name in (((2, 3), "a"), ((3, 2), "a"), ((2, 3), "b")):
        model = nn.Module()
        model.register_parameter(name, nn.Parameter(torch.arange(6.0).reshape(shape)))
        trunk = fp.vit_trunk(tiny_vit())
        trunk.model = model
        trunks.append(fp.fingerprint(trunk)["weights"])
    assert len(set(trunks)) == 3


def test_the_fingerprint_depends_on_dtypes_and_not_on_the_order_of_registration():
    trunks = []
    for names, dtype in (("ab", torch.float16), ("ba", torch.float16), ("ab", torch.bfloat16)):
        trunk = fp.vit_trunk(tiny_vit())
        trunk.model = nn.Module()
        for name in names:
            trunk.model.register_buffer(name, torch.zeros(2, dtype=dtype))
            trunk.model.register_module(f"{name}_norm", nn.LayerNorm(2))
        trunks.append(fp.fingerprint(trunk))
    assert trunks[0] == trunks[1]
    assert differing(trunks[0], trunks[2]) == {"weights"}


def test_the_activation_is_part_of_the_fingerprint():
    assert differing(
        fp.fingerprint(fp.vit_trunk(tiny_vit(act_layer=nn.ReLU))),
        fp.fingerprint(fp.vit_trunk(tiny_vit())),
    ) == {"activation"}
    tanh = tiny_vit(act_layer=lambda: nn.GELU(approximate="tanh"))
    assert differing(
        fp.fingerprint(fp.vit_trunk(tanh)), fp.fingerprint(fp.vit_trunk(tiny_vit()))
    ) == {"activation"}
    timms = fp.fingerprint(fp.vit_trunk(tiny_vit(act_layer=timm.layers.GELUTanh)))
    assert (timms["activation"], differing(timms, fp.fingerprint(fp.vit_trunk(tiny_vit())))) == (
        "GELUTanh()",
        {"activation"},
    )
    quick, plain = (
        fp.fingerprint(fp.TextTower(make_clip(quick_gelu=quick), TOKENIZER))
        for quick in (True, False)
    )
    assert differing(quick, plain) == {"activation"}
    assert quick["activation"] == "QuickGELU()"


@pytest.mark.parametrize(
    "other",
    [
        {"num_heads": 3},
        {"global_pool": "avg", "fc_norm": False},
        {"norm_layer": partial(nn.LayerNorm, eps=0.1)},
    ],
    ids=["heads", "pooling", "epsilon"],
)
def test_settings_that_change_features_change_the_fingerprint(other):
    """Each model computes other features with the same weights."""
    model = tiny_vit()
    images = torch.rand(
        2, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    changed = tiny_vit(**other)
    changed.load_state_dict(model.state_dict())
    trunks = fp.vit_trunk(model), fp.vit_trunk(changed)
    first, second = (fp.encode_prompted(trunk, images).pooled for trunk in trunks)
    assert (first - second).abs().max() > 1e-3
    assert differing(*map(fp.fingerprint, trunks)) == {"settings"}


def test_settings_of_training_and_of_the_machine_do_not_change_the_fingerprint():
    model = tiny_vit()
    expected = fp.fingerprint(fp.vit_trunk(model))
    for other in (
        {"drop_rate": 0.1, "drop_path_rate": 0.1, "attn_drop_rate": 0.1},
        {"weight_init": "skip"},
    ):
        again = tiny_vit(**other)
        again.load_state_dict(model.state_dict())
        assert fp.fingerprint(fp.vit_trunk(again)) == expected, other
    trunk = fp.vit_trunk(tiny_vit())
    trunk.model.train()
    trunk.model.name_or_path = "/home/me/vit"
    trunk.model._calls = 3
    trunk.model.blocks[1].attn.dropout = 0.1
    trunk.model.blocks[0].attn.fused_attn = not trunk.model.blocks[0].attn.fused_attn
    trunk.model.blocks[0].attn.scale *= 1 + 2**-52
    assert fp.fingerprint(trunk) == expected


def test_plain_settings_of_all_modules_are_part_of_the_fingerprint():
    trunk = fp.vit_trunk(tiny_vit())
    values = (0.5, 7, "7", (7, 8), (7, 9), (0.5, "a"), (), 8)
    settings = [("", "grid", value) for value in values]
    settings += [("blocks.1", "grid", 7), ("blocks.0", "grid", 7), ("", "grids", 7)]
    prints = [fp.fingerprint(trunk)]
    for name, key, value in settings:
        module = trunk.model.get_submodule(name)
        setattr(module, key, value)
        prints.append(fp.fingerprint(trunk))
        delattr(module, key)
    assert len({parts["settings"] for parts in prints}) == len(prints)
    assert all(differing(prints[0], parts) == {"settings"} for parts in prints[1:])


def test_the_dtype_is_part_of_the_fingerprint():
    assert differing(
        fp.fingerprint(fp.vit_trunk(tiny_vit().float())), fp.fingerprint(fp.vit_trunk(tiny_vit()))
    ) == {"dtype", "weights"}


def test_the_classifier_is_not_part_of_the_fingerprint():
    with_head, without = tiny_vit(num_classes=7), tiny_vit()
    with_head.load_state_dict(without.state_dict(), strict=False)
    assert fp.fingerprint(fp.vit_trunk(with_head)) == fp.fingerprint(fp.vit_trunk(without))


def test_the_fingerprint_of_a_text_tower_covers_the_whole_model():
    model, other = make_clip(), make_clip()
    with torch.no_grad():
        other.visual.proj += 1
    assert differing(*(fp.fingerprint(fp.TextTower(one, TOKENIZER)) for one in (model, other))) == {
        "weights"
    }


def test_the_attention_mask_is_part_of_the_weights():
    model = tiny_vit()
    plain, masked = fp.vit_trunk(model), fp.vit_trunk(model, attention_mask=torch.zeros(5, 5))
    assert differing(*map(fp.fingerprint, (plain, masked))) == {"weights"}


def test_streams_and_their_layers_are_part_of_the_fingerprint():
    trunk = fp.vit_trunk(tiny_vit())
    plans = [
        (),
        (fp.DeepPrompts(2, 12, 3)(),),
        (fp.DeepPrompts(3, 12, 3)(),),
        (fp.LayeredPrompts(2, 12, layers=(0, 1, 2))(),),
        (fp.LayeredPrompts(2, 12, layers=(0, 2))(),),
        (fp.LayeredPrompts(2, 12, layers=(0,))(), fp.LayeredPrompts(2, 12, layers=(2,))()),
        (fp.LayeredPrompts(2, 12, layers=(2,))(), fp.LayeredPrompts(2, 12, layers=(0,))()),
    ]
    assert len({fp.fingerprint(trunk, *plan).get("prompts") for plan in plans}) == len(plans)
    assert (
        fp.fingerprint(trunk, *plans[-1])["prompts"] == "2 at layers 2, kept; 2 at layers 0, kept"
    )


def test_names_order_and_number_of_classes_are_part_of_the_fingerprint():
    trunk = fp.vit_trunk(tiny_vit())
    sets = [
        ["cat", "dog"], ["dog", "cat"], ["cat"], ["cat", "cat"], ["cat", "dog", "yurt"],
        ["cat, dog"], ['cat", "dog'],
    ]  # fmt: skip
    assert len({fp.fingerprint(trunk, class_names=names)["classes"] for names in sets}) == len(sets)
    assert "classes" not in fp.fingerprint(trunk)


def test_the_name_position_is_part_of_the_fingerprint_of_a_text_tower():
    tower = fp.TextTower(make_clip(), TOKENIZER)
    assert differing(fp.fingerprint(tower), fp.fingerprint(tower, name_position=0)) == {
        "name_position"
    }
    assert differing(
        fp.fingerprint(tower, name_position=2), fp.fingerprint(tower, name_position=0)
    ) == {"name_position"}
    assert fp.fingerprint(tower)["name_position"] == "after the context"
    assert "name_position" not in fp.fingerprint(fp.vit_trunk(tiny_vit()))
