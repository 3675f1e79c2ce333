"""Weights of the papers' networks come from files, without a network, or are refused."""

import re

import open_clip
import pytest
import timm
import torch

import study
from studies.backbones import backbone


def file_of(model, path, before=""):
    named = {f"{before}{name}": value for name, value in model.state_dict().items()}
    torch.save({"state_dict": named}, path)
    return path


def equal(model, other):
    found, wanted = model.state_dict(), other.state_dict()
    return all(torch.equal(found[name], wanted[name]) for name in found)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224.augreg_in21k", "resnet18.tv_in1k"])
def test_a_network_of_timm_has_the_weights_of_its_file(name, tmp_path):
    model = timm.create_model(name, num_classes=0).eval()
    made = backbone(name, 224, weights={name: file_of(model, tmp_path / "weights.pth")})
    assert equal(made.model, model)
    assert made.mean == model.pretrained_cfg["mean"]


def test_a_clip_has_the_weights_of_its_file(tmp_path):
    model = open_clip.create_model("ViT-S-32-alt").eval()
    name = "ViT-S-32-alt:own"
    made = backbone(name, 224, weights={name: file_of(model, tmp_path / "clip.pt")})
    assert equal(made.model, model)
    assert made.tokenizer(["a cat"]).shape == (1, model.context_length)


def test_the_base_encoder_of_moco_is_taken_and_has_twelve_heads(tmp_path):
    name = "vit_small_patch16_224.mocov3"
    base, momentum = (
        timm.create_model("vit_small_patch16_224", num_classes=5, num_heads=12) for _ in range(2)
    )
    named = {
        f"module.{kind}_encoder.{key}": value
        for kind, model in (("base", base), ("momentum", momentum))
        for key, value in model.state_dict().items()
    }
    torch.save({"epoch": 300, "state_dict": named}, tmp_path / "vit-s-300ep.pth.tar")
    made = backbone(name, 224, weights={name: tmp_path / "vit-s-300ep.pth.tar"})
    assert equal(made.model, base)
    assert made.model.blocks[0].attn.num_heads == 12
    assert made.mean == [0.485, 0.456, 0.406]
    with pytest.raises(ValueError, match=r"vit_small_patch16_224\.mocov3=FILE` is missing"):
        backbone(name, 224)


def test_a_file_of_another_network_is_refused(tmp_path):
    model = timm.create_model("vit_tiny_patch16_224", num_classes=0)
    path = file_of(model, tmp_path / "tiny.pth")
    name = "vit_small_patch16_224.augreg_in21k"
    with pytest.raises(ValueError, match="`--weights` must have weights of vit_small"):
        backbone(name, 224, weights={name: path})


FEDOTP = ["--study", "fedotp", "--partitions", "fedotp-1-dtd", "--weights"]
MOCO = ["--study", "fedhpl", "--rows", "MoCo-v3 (Table 12)"]
REFUSED = {
    "ViT-B-16:openai=a.pt": "must name each of RN50:openai at most once; got ViT-B-16:openai.",
    "RN50:openai=none.pt": "must name a file that exists; got none.pt.",
}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        *(([*FEDOTP, given], said) for given, said in REFUSED.items()),
        (
            [*FEDOTP, "RN50:openai=a", "--weights", "RN50:openai=b"],
            "must name each of RN50:openai at most once; got RN50:openai.",
        ),
        ([*FEDOTP, "RN50:openai=a", "--estimate"], "must be left out here; got RN50:openai."),
        (["--study", "digits", "--weights", "vit=a"], "must be left out here; got vit."),
        (
            [*MOCO, "--partitions", "fedhpl-1-cifar10-iid", "--weights", "vit=a"],
            "must name each of vit_base_patch16_224.mocov3 at most once; got vit.",
        ),
        (
            ["--study", "solar", "--partitions", "deep-domains", "--weights", "vit=a"],
            "must name each of random, vit_small_patch14_dinov2 at most once; got vit.",
        ),
    ],
)
def test_weights_are_read_or_refused(flags, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        study.main(flags)
    assert re.search(re.escape(f"`--weights` {said}"), capsys.readouterr().err)
