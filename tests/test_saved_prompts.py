"""Saved prompts are restored exactly, and only for the backbone and classes they belong to."""

import copy

import pytest
import torch
import torch.nn as nn

import fedprompt as fp
from clips import TOKENIZER, make_clip
from fedprompt.wire import Header, save_payload
from models import tiny_vit
from same import assert_identical

CLASSES = ["cat", "dog"]


def make_model(seed, *, dim=12):
    """Deep prompts, a head and a buffer, with numbers of a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.ModuleDict({"prompts": fp.DeepPrompts(2, dim, 3), "head": nn.Linear(dim, 2)})
        model.register_buffer("usage", torch.randint(9, (4,)))
        model.register_buffer("scratch", torch.rand(3), persistent=False)
    return model


def other_vit():
    """A ViT of the same shapes with other weights."""
    model = tiny_vit()
    with torch.no_grad():
        model.blocks[1].mlp.fc1.weight[0, 0] += 1
    return model


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "prompts.safetensors"
    fp.save_prompts(make_model(1), path, trunk=fp.vit_trunk(tiny_vit()), class_names=CLASSES)
    return path


def test_parameters_and_persistent_buffers_are_restored_exactly(saved):
    model, trained = make_model(2), make_model(1)
    scratch = model.scratch.clone()
    fp.load_prompts(model, saved, trunk=fp.vit_trunk(tiny_vit()))  # class names are not compared
    assert_identical(model.state_dict(), trained.state_dict())
    fp.load_prompts(make_model(3), saved, trunk=fp.vit_trunk(tiny_vit()), class_names=CLASSES)
    assert_identical(model.scratch, scratch)
    assert model["prompts"].tokens.requires_grad


@pytest.mark.parametrize(
    ("module", "backbone", "class_names", "part"),
    [
        (make_model(2), other_vit(), CLASSES, "come from the same weights, "),
        (make_model(2), tiny_vit(num_heads=3), CLASSES, "come from the same settings, "),
        (make_model(2), tiny_vit().float(), CLASSES, "come from the same weights, dtype, "),
        (make_model(2, dim=24), tiny_vit(), CLASSES, "hold 'prompts.tokens' in the shape "),
        (make_model(2).double(), tiny_vit(), CLASSES, "hold 'prompts.tokens' as F64; got 'F32'"),
        (make_model(2)["head"], tiny_vit(), CLASSES, "have no other tensors than expected; "),
    ],
)
def test_another_backbone_class_set_or_form_is_refused_by_the_part_that_differs(
    saved, module, backbone, class_names, part
):
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(ValueError, match=r"does not fit `module`: `blob` must ") as refused:
        fp.load_prompts(module, saved, trunk=fp.vit_trunk(backbone), class_names=class_names)
    assert f"`blob` must {part}" in str(refused.value)
    assert_identical(module.state_dict(), before)


def test_a_file_without_class_names_is_refused_where_they_are_given(tmp_path):
    path, trunk = tmp_path / "prompts", fp.vit_trunk(tiny_vit())
    fp.save_prompts(make_model(1), path, trunk=trunk)
    with pytest.raises(ValueError, match=r"`class_names` must be left out, .*; got 2 names"):
        fp.load_prompts(make_model(1), path, trunk=trunk, class_names=CLASSES)


@pytest.mark.parametrize("class_names", [CLASSES[::-1], ["cat", "dogs"], [*CLASSES, "owl"]])
def test_other_class_names_or_another_order_are_refused(saved, class_names):
    model = make_model(2)
    before = copy.deepcopy(model.state_dict())
    count = len(class_names)
    rule = (
        f"be the 2 names of the file, in their order; got {count} names, which differ in spelling"
    )
    with pytest.raises(ValueError, match=f"`class_names` must {rule}"):
        fp.load_prompts(model, saved, trunk=fp.vit_trunk(tiny_vit()), class_names=class_names)
    assert_identical(model.state_dict(), before)


def test_a_damaged_file_is_refused_and_the_module_is_unchanged(saved):
    blob = bytearray(saved.read_bytes())
    blob[200] ^= 1
    saved.write_bytes(blob)
    model = make_model(2)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"prompts\.safetensors' does not fit `module`: `blob`"):
        fp.load_prompts(model, saved, trunk=fp.vit_trunk(tiny_vit()), class_names=CLASSES)
    assert_identical(model.state_dict(), before)


def wrapped(module):
    return torch.nn.DataParallel(nn.ModuleDict({"deep": module}))


@pytest.mark.parametrize("wrap", [lambda prompts: prompts, wrapped])
@pytest.mark.parametrize(
    ("layers", "replace", "got"),
    [((0, 2), False, "(0, 2), replace=False"), ((1, 2), True, "(1, 2), replace=True")],
)
def test_prompts_for_other_layers_are_refused(tmp_path, layers, replace, got, wrap):
    trunk = fp.vit_trunk(tiny_vit())
    saved = wrap(fp.LayeredPrompts(2, 12, layers=(0, 2), replace=True))
    fp.save_prompts(saved, tmp_path / "prompts", trunk=trunk)
    other = fp.LayeredPrompts(2, 12, layers=layers, replace=replace)
    other = other if wrap(None) is None else nn.ModuleDict({"deep": other})
    before = copy.deepcopy(other.state_dict())
    name = next(iter(before))
    with pytest.raises(ValueError, match="does not fit `module`") as refused:
        fp.load_prompts(other, tmp_path / "prompts", trunk=trunk)
    rule = f'prompts at the layers {{"{name}": "2, 12, layers=(0, 2), replace=True"}}; '
    assert str(refused.value).endswith(f'{rule}got {{"{name}": "2, 12, layers={got}"}}.')
    assert_identical(other.state_dict(), before)


def test_group_prompts_of_many_clients_have_their_layers_in_a_file(tmp_path):
    """The text of all layers would be longer than a header may be."""
    trunk = fp.vit_trunk(tiny_vit())

    def clients(last):
        parts = [fp.GroupPrompts(2, 1, 12, layers=(0, 1)) for _ in range(600)]
        return nn.ModuleList([*parts, fp.GroupPrompts(2, 1, 12, layers=(0, last))])

    fp.save_prompts(clients(1), tmp_path / "prompts", trunk=trunk)
    fp.load_prompts(clients(1), tmp_path / "prompts", trunk=trunk)
    with pytest.raises(ValueError, match="`module` must have prompts at the layers"):
        fp.load_prompts(clients(2), tmp_path / "prompts", trunk=trunk)


def test_prompts_are_loaded_into_a_module_with_another_order_of_names(tmp_path):
    trunk = fp.vit_trunk(tiny_vit())
    parts = {name: fp.DeepPrompts(2, 12, 3) for name in "ab"}
    fp.save_prompts(nn.ModuleDict(parts), tmp_path / "prompts", trunk=trunk)
    backwards = nn.ModuleDict(dict(reversed(parts.items())))
    fp.load_prompts(backwards, tmp_path / "prompts", trunk=trunk)


def test_a_text_tower_is_a_backbone_too(tmp_path):
    tower = fp.TextTower(make_clip(), TOKENIZER)
    context = nn.ParameterDict({"context": nn.Parameter(torch.rand(4, tower.dim))})
    fp.save_prompts(context, tmp_path / "context", trunk=tower, class_names=CLASSES)
    empty = nn.ParameterDict({"context": nn.Parameter(torch.zeros(4, tower.dim))})
    fp.load_prompts(empty, tmp_path / "context", trunk=tower, class_names=CLASSES)
    assert_identical(empty.state_dict(), context.state_dict())


# Trunks of one's own.


class OwnTrunk:
    """A trunk with its modules, a tensor and a setting as attributes, and without `model`."""

    prefix, depth, num_features, patch_size = 0, 1, 12, 4

    def __init__(self, seed=0, *, stride=4):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.stem = nn.Conv2d(3, 12, 4, stride=stride)
            self.layers = [nn.Linear(12, 12), nn.GELU()]
            self.positions = torch.rand(4, 12)
        self.dim, self.stride = 12, stride

    def unused(self, *tokens):
        raise AssertionError("a fingerprint calls no method of a trunk")

    embed = block = normalize = pool = unused


def changed(name):
    trunk = OwnTrunk()
    parts = {"stem": trunk.stem.bias, "layers": trunk.layers[0].bias, "positions": trunk.positions}
    with torch.no_grad():
        parts[name].add_(1)
    return trunk


@pytest.mark.parametrize(
    ("other", "part"),
    [
        (changed("stem"), "weights"),
        (changed("layers"), "weights"),
        (changed("positions"), "weights"),
        (OwnTrunk(stride=2), "settings"),
    ],
)
def test_a_trunk_of_ones_own_is_told_apart_by_its_attributes(tmp_path, other, part):
    assert fp.fingerprint(OwnTrunk())["backbone"] == "OwnTrunk"
    assert fp.fingerprint(OwnTrunk()) == fp.fingerprint(OwnTrunk())
    fp.save_prompts(make_model(1), tmp_path / "prompts", trunk=OwnTrunk())
    fp.load_prompts(make_model(2), tmp_path / "prompts", trunk=OwnTrunk())
    with pytest.raises(ValueError, match=f"must come from the same {part}, "):
        fp.load_prompts(make_model(2), tmp_path / "prompts", trunk=other)


def test_a_trunk_that_is_a_module_is_its_own_model():
    class Module(OwnTrunk, nn.Module):
        def __init__(self):
            nn.Module.__init__(self)
            self.stem, self.dim = nn.Linear(2, 2), 12

    trunk = Module()
    parts = fp.fingerprint(trunk)
    assert parts["backbone"] == "Module"
    with torch.no_grad():
        trunk.stem.bias += 1
    assert {part for part in parts if fp.fingerprint(trunk)[part] != parts[part]} == {"weights"}


def test_a_border_of_pixels_is_saved_with_its_convolutional_network(tmp_path):
    class Scaled(nn.Module):
        def __init__(self, scale):
            super().__init__()
            self.model, self.scale = nn.Conv2d(3, 2, 3), nn.Parameter(torch.tensor(scale))
            nn.init.ones_(self.model.weight), nn.init.zeros_(self.model.bias)

    trained, border = fp.PadPrompts(8, padding=2), fp.PadPrompts(8, padding=2)
    fp.save_prompts(trained, tmp_path / "border", trunk=Scaled(1.0))
    fp.load_prompts(border, tmp_path / "border", trunk=Scaled(1.0))
    assert_identical(dict(border.state_dict()), dict(trained.state_dict()))
    assert fp.fingerprint(Scaled(1.0)).keys() == {
        "backbone", "weights", "settings", "activation", "dtype"
    }  # fmt: skip
    with pytest.raises(ValueError, match="must come from the same weights, "):
        fp.load_prompts(border, tmp_path / "border", trunk=Scaled(2.0))


@pytest.mark.bad_input
def test_a_trunk_without_modules_or_tensors_is_refused():
    class Empty(OwnTrunk):
        def __init__(self):
            self.dim = 12

    with pytest.raises(TypeError, match="`backbone` must be a network with weights, keep its"):
        fp.fingerprint(Empty())


def test_a_payload_file_of_another_kind_is_refused(tmp_path):
    path = tmp_path / "values"
    save_payload({"head.bias": torch.zeros(2)}, path, header=Header())
    with pytest.raises(ValueError, match="must come from the same backbone, weights, settings"):
        fp.load_prompts(make_model(1), path, trunk=fp.vit_trunk(tiny_vit()))
