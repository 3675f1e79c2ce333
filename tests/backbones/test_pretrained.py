"""Networks by name, from files and folders as people have them."""

import argparse
import json
import re
import shutil
import warnings

import numpy as np
import open_clip
import pytest
import timm
import torch
from huggingface_hub import constants
from safetensors.torch import save_file
from transformers import (
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPTokenizer,
    ViTConfig,
    ViTImageProcessor,
    ViTModel,
)

import fedprompt as fp
from clips import NAMES, TEXT, TOKENIZER, VISION
from fedprompt import samples
from fedprompt.backbones.preparation import Preparation, of_open_clip, of_timm
from fedprompt.backbones.pretrained import network
from same import assert_identical

TINY = "test_vit"
ACCESS = {"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6)}
SMALL = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
SMALL |= {"num_attention_heads": 2, "image_size": 16, "patch_size": 8}
WORDS = {"max_position_embeddings": 24, **SMALL, "vocab_size": 49408}
WORDS |= {"bos_token_id": 49406, "eos_token_id": 49407}
CLIP = {"embed_dim": 12, "vision_cfg": VISION, "text_cfg": TEXT}


@pytest.fixture(scope="module", autouse=True)
def _offline():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        patch.setitem(open_clip.factory._MODEL_CONFIGS, "tiny-clip", CLIP)
        tag = ACCESS | {"interpolation": "bilinear", "quick_gelu": True, "url": "https://a/b"}
        patch.setitem(open_clip.pretrained._PRETRAINED, "tiny-clip", {"mine": tag})
        yield


@pytest.fixture(scope="module")
def vit():
    torch.manual_seed(0)
    return timm.create_model(TINY, num_classes=3).eval()


@pytest.fixture(scope="module")
def clip():
    torch.manual_seed(1)
    return open_clip.model.CLIP(**CLIP).eval()


class Mine:
    """Class that a reader does not have."""

    def __init__(self):
        self.items = [1]


def traced(model, *inputs):
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(model, inputs, check_trace=False, strict=False)


def renamed(model, prefix):
    return {f"{prefix}{name}": value for name, value in model.state_dict().items()}


STORED = {
    "weights.safetensors": lambda m, path: save_file(m.state_dict(), path),
    "safetensors.pth": lambda m, path: save_file(m.state_dict(), path),
    "old.pth": lambda m, path: torch.save(
        m.state_dict(), path, _use_new_zipfile_serialization=False
    ),
    "script.pt": lambda m, path: traced(m, torch.zeros(1, 3, 160, 160)).save(str(path)),
    "whole.pt": lambda m, path: torch.save(m, path),
    "arguments.pt": lambda m, path: torch.save(
        {"state_dict": renamed(m, "module."), "args": argparse.Namespace(lr=1), "own": Mine()}, path
    ),
    "lightning.ckpt": lambda m, path: torch.save(
        {"state_dict": renamed(m, "model.vit."), "best": np.float64(0.5), "epoch": 3}, path
    ),
    "compiled.tar": lambda m, path: torch.save(renamed(m, "_orig_mod.module."), path),
    "optimizer.bin": lambda m, path: torch.save(
        {"model": m.state_dict(), "optimizer": torch.optim.Adam(m.parameters()).state_dict()}, path
    ),
}


@pytest.mark.parametrize("name", STORED)
def test_a_file_of_weights_is_read_as_people_have_it(name, vit, tmp_path):
    STORED[name](vit, tmp_path / name)
    made = network(f"{TINY}={tmp_path / name}")
    expected = {key: value for key, value in vit.state_dict().items() if "head" not in key}
    assert_identical(dict(made.model.state_dict()), expected)
    assert (made.name, made.source) == (TINY, f"timm:{TINY}")
    assert made.preparation == of_timm(timm.get_pretrained_cfg(TINY).to_dict())
    assert made.trunk.dim == 64


def test_the_weights_of_a_clip_may_be_an_archive_of_openai_in_half_precision(clip, tmp_path):
    """Its other attributes are left out, and the activation is that of the tag."""
    saved = traced(clip, torch.zeros(1, 3, 16, 16), torch.ones(1, 24, dtype=torch.long))
    saved.save(str(tmp_path / "ViT.pt"))
    torch.save(
        {"state_dict": {k: v.half() for k, v in clip.state_dict().items()}}, tmp_path / "h.pt"
    )
    images = torch.rand(2, 3, 16, 16)
    for name, quick in (("tiny-clip", False), ("tiny-clip:mine", True)):
        made = network(f"{name}={tmp_path / 'ViT.pt'}", "clip")
        expected = open_clip.model.CLIP(**CLIP, quick_gelu=quick).eval()
        expected.load_state_dict(clip.state_dict())
        torch.testing.assert_close(made.tokens(images)[:, 0], expected.encode_image(images))
        assert made.source == f"open_clip:{name}"
        changes = {**ACCESS, "interpolation": "bilinear"} if quick else {}
        assert made.preparation == of_open_clip(changes, 16)
        assert network(f"{name}={tmp_path / 'h.pt'}").trunk.dim == 16  # its image tower
    made = network(f"tiny-clip={tmp_path / 'h.pt'}", "clip", size=24)
    assert made.tokens(made.inputs).shape == (1, 1 + 9, 12)


def test_arguments_and_a_size_are_those_of_the_library(vit, tmp_path):
    save_file(vit.state_dict(), tmp_path / "test_vit.safetensors")
    alone = network(str(tmp_path / "test_vit.safetensors"), size=(96, 64))
    assert (alone.name, alone.preparation.size) == (TINY, (96, 64))
    gray = network(TINY, weights=tmp_path / "test_vit.safetensors", arguments={"in_chans": 1})
    assert (len(gray.preparation.mean), gray.inputs.shape[1]) == (1, 1)
    assert network(gray.model).preparation == gray.preparation


@pytest.fixture(scope="module")
def folders(vit, clip, tmp_path_factory):
    """Folders as `save_pretrained` and `push_to_hf_hub` write them."""
    root = tmp_path_factory.mktemp("folders")
    vision = ViTModel(ViTConfig(**SMALL))
    vision.save_pretrained(root / "hub-vit")
    normal = {"image_mean": ACCESS["mean"], "image_std": ACCESS["std"]}
    ViTImageProcessor(size={"height": 16, "width": 16}, **normal).save_pretrained(root / "hub-vit")
    config = CLIPConfig(text_config=WORDS, vision_config=SMALL, projection_dim=6)
    CLIPModel(config).save_pretrained(root / "hub-clip")
    size = {"size": {"shortest_edge": 18}, "crop_size": 16}
    CLIPImageProcessor(**size, **normal).save_pretrained(root / "hub-clip")
    special = {"<start_of_text>": "<|startoftext|>", "<end_of_text>": "<|endoftext|>"}
    ids = {special.get(token, token): index for token, index in TOKENIZER.encoder.items()}
    CLIPTokenizer(vocab=ids, merges=list(TOKENIZER.bpe_ranks)).save_pretrained(root / "hub-clip")
    (root / "clip").mkdir()
    about = {"model_cfg": CLIP, "preprocess_cfg": ACCESS | {"resize_mode": "squash"}}
    (root / "clip/open_clip_config.json").write_text(json.dumps(about))
    save_file(clip.state_dict(), root / "clip/open_clip_model.safetensors")
    (root / "timm").mkdir()
    save_file(vit.state_dict(), root / "timm/model.safetensors")
    cfg = {"input_size": [3, 160, 160], "interpolation": "bilinear", "classifier": "head"} | ACCESS
    about = {"architecture": TINY, "num_classes": 3, "pretrained_cfg": cfg}
    (root / "timm/config.json").write_text(json.dumps(about))
    return root


def test_a_folder_has_its_own_preparation(folders):
    made = {name: network(str(folders / name)) for name in ("hub-vit", "timm", "clip")}
    for name, how in (("hub-vit", "squash"), ("timm", "shortest"), ("clip", "squash")):
        found = made[name].preparation
        assert (found.mean, found.std, found.resize) == (*ACCESS.values(), how)
    assert [made[name].trunk.dim for name in made] == [8, 64, 16]
    assert network(f"facebook/vit={folders / 'hub-vit'}").source == "transformers:facebook/vit"
    assert made["timm"].source == ""
    theirs = network(str(folders / "hub-clip"), "clip")
    images = torch.rand(2, 3, 16, 16)
    expected = theirs.model.get_image_features(images).pooler_output
    torch.testing.assert_close(theirs.tokens(images)[:, 0], expected)
    assert (theirs.preparation.resized, theirs.preparation.kernel) == ((18, 18), "uint8")
    text = theirs.tower(theirs.tower.sentences(NAMES))
    assert text.shape[-1] == theirs.tokens(images).shape[-1]


def test_a_cached_name_is_loaded_and_a_damaged_one_is_one_sentence(folders, tmp_path, monkeypatch):
    repository = timm.get_pretrained_cfg(TINY).hf_hub_id.replace("/", "--")
    folder = tmp_path / f"models--{repository}"
    (folder / "snapshots/abc").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text("abc")
    weights = folder / "snapshots/abc/model.safetensors"
    shutil.copy(folders / "timm/model.safetensors", weights)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    named = network(TINY)
    assert named.fingerprint == network(f"{TINY}={weights}").fingerprint
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ValueError, match=rf"vit_base_patch16_224, whose .*; got {TINY} \(Error"):
        network(TINY)


def test_models_have_their_own_preparation_and_are_frozen_in_float32(clip):
    tower = fp.TextTower(samples.clip(), samples.tokenize)
    made = network(tower, "clip")
    assert (made.model, made.tower, made.source) == (tower.model, tower, "")
    assert made.preparation == network("emoji", "clip").preparation
    given = open_clip.model.CLIP(**CLIP).bfloat16()
    made = network(given, "clip")
    assert (made.name, made.model) == ("CLIP", given)
    assert {(w.dtype, w.requires_grad) for w in given.parameters()} == {(torch.float32, False)}
    ours, theirs = (t(t.sentences(NAMES)) for t in (made.tower, fp.TextTower(given, TOKENIZER)))
    assert torch.equal(ours, theirs)
    own = Preparation(16, (0.1,) * 3, (0.5,) * 3)
    assert network(given.visual, preparation=own).preparation == own


def test_samples_have_names():
    assert network("digits-B").trunk.depth == 4
    assert network("emoji").trunk.depth == network("emoji", "clip").trunk.depth
    images = samples.digits().test_images[:2]
    torch.testing.assert_close(
        fp.encode_prompted(network("digits-S").trunk, images).pooled, samples.vit("S")(images)
    )


NAMED = {
    "ViT-B/16": "open_clip:ViT-B-16-quickgelu:openai",
    "ViT-L/14@336px": "open_clip:ViT-L-14-336-quickgelu:openai",
    "hf-hub:laion/CLIP": "open_clip:hf-hub:laion/CLIP",
    "hf_hub:laion/CLIP": "open_clip:hf-hub:laion/CLIP",
    "timm/ViT-B-16-SigLIP": "open_clip:hf-hub:timm/ViT-B-16-SigLIP",
    "openai/clip-vit-base-patch32": "transformers:openai/clip-vit-base-patch32",
    "open_clip:ViT-B-32:openai": "open_clip:ViT-B-32:openai",
}


@pytest.mark.parametrize("given", NAMED)
def test_names_as_people_have_them_ask_for_their_weights_in_one_line(given):
    """What cannot be downloaded can be given as a file, whose flag the line names."""
    name = NAMED[given].partition(":")[2]
    what = "FOLDER" if "/" in name else "FILE"
    text = rf"`--clip` must name a network .*; got {name} \(.*\)\. .* give {given}={what}\.$"
    with pytest.raises(ValueError, match=text) as error:
        network(given, "clip", argument="--clip")
    assert "\n" not in str(error.value)


WRONG = {
    "vit_smal_patch16": "such as vit_base_patch16_224; got 'vit_smal_patch16' (similar: vit_",
    "ViT-B-16": "name weights of ViT-B-16 as NAME:TAG: openai, laion400m_e31",
    "resnet18": "(it is convolutional, without tokens",
    "ROOT/none.pth": "name a file that exists; got ROOT/none.pth",
    f"{TINY}=ROOT/none": "name a file that exists; got ROOT/none",
    "ROOT/text.pth": "name a network, such as vit_base_patch16_224 before its file: NAME=FILE",
    f"{TINY}=ROOT/text.pth": "have weights of test_vit; got ROOT/text.pth (it is damaged, or",
    f"{TINY}=ROOT/cut.safetensors": "have weights of test_vit; got ROOT/cut.safetensors (",
    f"{TINY}=ROOT/cut.pt": "got ROOT/cut.pt (it is damaged, or is not a file of tensors;",
    f"{TINY}=ROOT/deep.pt": "(it is of another network, which has blocks.6.",
    f"{TINY}=ROOT/shallow.pt": "(it is of another network, which has no blocks.4.",
    f"{TINY}=ROOT/resnet.pt": "Missing key(s) in state_dict",
    f"{TINY}=ROOT/two.pt": "(it has two networks, whose names begin with 'ema.' and 'model.'",
    f"{TINY}=ROOT/arrays.pt": "(it has no tensors; write it by torch.save(",
    f"vit_small_patch16_224=ROOT/{TINY}.pt": "it is of another network, which has no blocks.6.",
    "test_resnet=ROOT/resnet.pt": "(`model` must be a vision transformer of timm",
    "ROOT/empty": "have weights of a network of its configuration; got ROOT/empty (",
    "emoji=ROOT/deep.pt": "(a sample has its own weights)",
    f"tiny-clip=ROOT/{TINY}.pt": "Missing key(s)",
}


@pytest.fixture(scope="module")
def wrong(vit, tmp_path_factory):
    root = tmp_path_factory.mktemp("wrong")
    (root / "empty").mkdir()
    (root / "text.pth").write_text("hello")
    own = vit.state_dict()
    for name, saved in {
        TINY: own,
        "deep": timm.create_model(TINY, depth=7).state_dict(),
        "shallow": timm.create_model(TINY, depth=4).state_dict(),
        "resnet": timm.create_model("test_resnet").state_dict(),
        "two": {"ema": own, "model": own},
        "arrays": {key: value.numpy() for key, value in own.items()},
    }.items():
        torch.save(saved, root / f"{name}.pt")
    (root / "cut.pt").write_bytes((root / f"{TINY}.pt").read_bytes()[:9000])
    save_file(own, root / "all.safetensors")
    (root / "cut.safetensors").write_bytes((root / "all.safetensors").read_bytes()[:9000])
    return root


@pytest.mark.parametrize("given", WRONG)
def test_a_wrong_name_or_file_is_one_sentence(given, wrong):
    message = re.escape(WRONG[given].replace("ROOT", str(wrong)))
    with pytest.raises(ValueError, match=f"^`vit` must .*{message}") as error:
        network(given.replace("ROOT", str(wrong)))
    assert "\n" not in str(error.value)


def test_no_code_of_a_file_is_run(vit, tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "written"), "w"))

    torch.save({"state_dict": vit.state_dict(), "evil": Evil()}, tmp_path / "evil.pt")
    network(f"{TINY}={tmp_path / 'evil.pt'}")
    assert not (tmp_path / "written").exists()


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("given", "kind", "options", "message"),
    [
        (TINY, "bert", {}, '`kind` must be "vit" or "clip"'),
        (torch.nn.Linear(2, 2), "vit", {}, "`vit` must be a name, a model of timm or open_clip"),
        (torch.nn.Embedding(3, 2), "clip", {"argument": "--clip"}, "`--clip` must be a name, a m"),
        (open_clip.model.CLIP(12, VISION | {"pool_type": "none"}, TEXT), "clip", {}, "a CLIP with"),
        ("digits-B", "clip", {}, "`clip` must name a CLIP with patches; got digits-B"),
        ("digits-B", "vit", {"size": 20}, "`size` must be None for a network of samples"),
    ],
)  # fmt: skip
def test_other_things_are_refused(given, kind, options, message):
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        network(given, kind, **options)
