"""LoRA, adapters, norms and biases: a copy of a model, and its trainable parameters."""

import copy
import sys
from functools import partial

import open_clip
import peft
import pytest
import torch
import torch.nn as nn
import torchvision
import transformers

import fedprompt as fp
from clips import VISION
from fedprompt.methods import METHODS
from fedprompt.tuning import adapters, biases, lora, norms, save_lora
from models import build, perturbed, row_named, tiny_vit
from refusals import refused
from tiny_federations import last, vit_federation
from tolerance import assert_near

LORA, ADAPTERS = partial(lora, rank=2), partial(adapters, width=3)
SIZE = {"image_size": 16, "patch_size": 8}


def dinov2():
    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.Dinov2Model(transformers.Dinov2Config(**sizes, **SIZE))


def open_clip_tower():
    return open_clip.model._build_vision_tower(8, open_clip.CLIPVisionCfg(**VISION))


def torchvision_vit():
    sizes = {"num_layers": 2, "num_heads": 2, "hidden_dim": 12, "mlp_dim": 24}
    model = torchvision.models.VisionTransformer(**SIZE, **sizes)
    model.heads = nn.Identity()
    return model


MODELS = {
    "timm": tiny_vit,
    "timm, Eva": lambda: build(row_named("vit_pe_core_tiny_patch16_384")),
    "transformers": dinov2,
    "open_clip": open_clip_tower,
    "torchvision": torchvision_vit,
}
CASES = [(name, tune) for name in MODELS for tune in (LORA, ADAPTERS, norms, biases)]
CASES.remove(("torchvision", LORA))


@pytest.mark.parametrize(("name", "tune"), CASES)
def test_the_copy_computes_the_same_and_only_its_parameters_have_gradients(name, tune):
    """A layer whose weight is read, but which is not called, would leave LoRA without gradient."""
    model = perturbed(MODELS[name]())
    before = fp.snapshot(model)
    tuned, parameters = tune(model)
    trained = {id(each) for each in tuned.parameters() if each.requires_grad}
    assert trained == {id(each) for each in parameters}
    trunk = fp.vit_trunk(tuned, trainable=parameters)
    side = 64 if "Eva" in name else 16
    images = torch.randn(2, 3, side, side, dtype=torch.float64)
    expected = fp.encode_prompted(fp.vit_trunk(model), images).pooled
    assert_near(fp.encode_prompted(trunk, images).pooled, expected)
    with torch.no_grad():
        for parameter in parameters:
            parameter += 0.1 * torch.randn_like(parameter)
    fp.encode_prompted(trunk, images).pooled.square().sum().backward()
    unused = ("k_proj.bias", "key.bias")  # softmax
    for path, parameter in trunk.trainable.named_parameters():
        if not path.endswith(unused):
            assert parameter.grad.abs().max() > 1e-12, path
    torch.testing.assert_close(fp.snapshot(model), before, rtol=0, atol=0)


def test_lora_adds_a_product_of_its_rank_without_a_scale():
    """A projection of width 12 to 36; the weight changes by B A."""
    tuned, parameters = LORA(tiny_vit())
    qkv = tuned.blocks[0].attn.qkv
    a, b = qkv.lora_A["default"].weight, qkv.lora_B["default"].weight
    assert [tuple(each.shape) for each in parameters[:2]] == [(2, 12), (36, 2)]
    assert parameters[0] is a
    with torch.no_grad():
        b.normal_()
        tokens = torch.randn(5, 12, dtype=torch.float64)
        base = qkv.base_layer
        assert_near(qkv(tokens), tokens @ (base.weight + b @ a).T + base.bias)


@pytest.mark.parametrize("tune", [LORA, ADAPTERS])
def test_initial_values_depend_on_the_generator_alone(tune):
    stream = torch.get_rng_state()
    first, again, other = (
        tune(tiny_vit(), generator=torch.Generator().manual_seed(seed))[1][0] for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), stream)


def test_blocks_that_share_an_mlp_have_their_own_adapters():
    model = tiny_vit(depth=2)
    model.blocks[1].mlp = model.blocks[0].mlp
    tuned, parameters = ADAPTERS(model)
    first, second = (block.mlp for block in tuned.blocks)
    assert first.mlp is second.mlp
    expected = [*first.adapter.parameters(), *second.adapter.parameters()]
    assert list(map(id, parameters)) == list(map(id, expected))


def test_norms_leave_out_the_other_layers_inside_of_a_normalization():
    class NormBlock(nn.LayerNorm):
        def __init__(self):
            super().__init__(2)
            self.gate = nn.Linear(2, 2)

    tuned, parameters = norms(NormBlock())
    assert list(map(id, parameters)) == list(map(id, (tuned.weight, tuned.bias)))


def test_a_model_with_adapters_gets_one_more_behind_each_mlp():
    _, parameters = adapters(ADAPTERS(tiny_vit(depth=2))[0], width=2)
    assert [len(parameter) for parameter in parameters] == [2, 2, 12, 12] * 2


def trunk_in_bfloat16():
    model = tiny_vit().bfloat16()
    return fp.vit_trunk(model, trainable=[model.norm])


def unread():
    """EVA with a bias of queries reads the weights of its projections without calling them."""
    model, parameters = LORA(build(row_named("eva02_tiny_patch14_224")))
    return fp.vit_trunk(model, trainable=parameters)


def norms_alone():
    return nn.Sequential(nn.LayerNorm(2, bias=False))


test_wrong_calls_are_refused_by_name = refused(globals())("""
lora(torchvision_vit(), rank=1) -> ValueError: `model` must have linear layers named qkv, q_proj,
unread() -> ValueError: `trainable` must be read by the features; leave out the others; got
lora(tiny_vit(), rank=0) -> ValueError: `rank` must be at least 1; got 0
lora(tiny_vit(), rank=1, generator=3) -> TypeError: `generator` must be a torch.Generator; got 3
lora([], rank=1) -> TypeError: `model` must be an nn.Module; got a list of length 0
lora(LORA(tiny_vit())[0], rank=1) -> ValueError: `model` must have no LoRA yet; merge it first
save_lora([], "folder") -> TypeError: `model` must be an nn.Module; got a list of length 0
save_lora(LORA(tiny_vit())[0], "folder", base_model=3) -> TypeError: `base_model` must
save_lora(LORA(tiny_vit())[0], __file__) -> FileExistsError: test_tuning.py
save_lora(tiny_vit(), "folder") -> ValueError: `model` must have LoRA, as of `lora`; got Vision
trunk_in_bfloat16() -> ValueError: `trainable` must be in float32 or float64, because half precision
adapters(norms_alone(), width=1) -> ValueError: `model` must have modules named mlp with linear
adapters([], width=1) -> TypeError: `model` must be an nn.Module; got a list of length 0
adapters(tiny_vit(), width=1, generator=3) -> TypeError: `generator` must be a torch.Generator
adapters(tiny_vit(), width=0) -> ValueError: `width` must be at least 1; got 0
norms(nn.Linear(2, 2)) -> ValueError: `model` must have normalization layers; got Linear.
biases([]) -> TypeError: `model` must be an nn.Module; got a list of length 0
biases(norms_alone()) -> ValueError: `model` must have parameters named bias; got Sequential.
norms([]) -> TypeError: `model` must be an nn.Module; got a list of length 0
""")


def test_without_peft_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match=r"needs PEFT: pip install 'fedprompt\[peft\]'"):
        LORA(tiny_vit())


@pytest.mark.parametrize("name", ["fedlora", "ffa_lora", "fedsa_lora"])
def test_peft_loads_the_lora_of_a_client_and_computes_the_same(name, tmp_path):
    federation = vit_federation(rounds=1)
    tuned = last(METHODS[name].make, federation, rank=3).of(federation.cohort(0)[0]).trunk.model
    folder = tmp_path / "run" / "lora"
    for base_model in ("", "me/vit"):  # the second one takes the place of the first
        save_lora(tuned, folder, base_model=base_model)
    config = peft.LoraConfig.from_pretrained(folder)
    assert config.inference_mode
    assert (config.r, config.lora_alpha, config.base_model_name_or_path) == (3, 3, "me/vit")
    model = copy.deepcopy(federation.trunk.model)
    before = model(federation.inputs)
    loaded = peft.PeftModel.from_pretrained(model, folder)
    assert torch.equal(loaded(federation.inputs), tuned(federation.inputs))
    assert not torch.allclose(tuned(federation.inputs), before)
