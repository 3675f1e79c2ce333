"""A folder of trained prompts is enough to build the network again, anywhere."""

import json
import shutil
from pathlib import Path

import huggingface_hub
import open_clip
import pytest
import timm
import torch
import torch.nn as nn
import transformers
from safetensors.torch import save_file

import fedprompt as fp
from clips import TEXT, VISION
from fedprompt.methods.models import PromptedModel
from refusals import check_refused, refusals

CLASSES = ["cat", "dog"]
IMAGES = torch.rand(3, 3, 160, 160, generator=torch.Generator().manual_seed(0))
ABOUT = {"method": "fedvpt_d", "data": "pets", "license": "mit", "sentence": "a photo of a {}."}


def new_network(seed=0):
    torch.manual_seed(seed)
    return timm.create_model("test_vit", num_classes=5).eval()


def trained(trunk):
    model = PromptedModel(trunk, 2)
    model.prompts = fp.LayeredPrompts(2, trunk, layers=(0, 3))
    return model


@pytest.fixture
def saved(tmp_path):
    """Save a folder and the weights of its network, and return both and the logits."""
    network, weights = new_network(), tmp_path / "weights.safetensors"
    trunk = fp.vit_trunk(network)
    model = trained(trunk)
    save_file(network.state_dict(), weights)
    about = {"trunk": trunk, "class_names": CLASSES, "model": "timm:test_vit"}
    fp.save_prompts(model, tmp_path / "pets", **about, **ABOUT)
    with torch.no_grad():
        return tmp_path / "pets", weights, model(IMAGES)


def test_another_process_without_the_clone_gives_the_same_logits_bitwise(
    saved, tmp_path, in_new_process
):
    folder, weights, logits = saved
    torch.save(IMAGES, tmp_path / "images.pt")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "fedprompt").symlink_to(Path(fp.__file__).parent)
    code = f"""
import os, sys
sys.path.insert(0, {str(tmp_path / "site")!r})
os.chdir({str(tmp_path)!r})
import torch
import fedprompt as fp
assert fp.__file__.startswith({str(tmp_path)!r}), fp.__file__
model = fp.load_prompts({str(folder)!r}, weights={str(weights)!r})
with torch.no_grad():
    torch.save([model(torch.load("images.pt")), model.class_names], "logits.pt")
"""
    in_new_process(code)
    found, names = torch.load(tmp_path / "logits.pt")
    assert torch.equal(found, logits)
    assert names == CLASSES


def test_the_description_and_the_card_name_the_network_and_the_training(saved):
    folder, *_ = saved
    config = json.loads((folder / "config.json").read_text())
    sizes = {"num_prompts": 2, "dim": 64, "layers": [0, 3], "replace": False}
    assert config | {"kind": "prompts", "prompts": sizes, "model": "timm:test_vit"} == config
    card = (folder / "README.md").read_text()
    assert {"base_model: timm/test_vit", "license: mit"} <= {*card.splitlines()}
    for value in (*ABOUT.values(), *CLASSES):
        assert value in card


def test_other_weights_are_refused_by_the_fingerprint(saved, tmp_path):
    folder, *_ = saved
    save_file(new_network(1).state_dict(), tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="must come from the same weights, "):
        fp.load_prompts(folder, weights=tmp_path / "other.safetensors")


def test_a_folder_travels_over_the_hub(saved, tmp_path, monkeypatch):
    """A stand-in for the Hub keeps what is uploaded, and has one revision."""
    folder, weights, logits = saved
    hub, calls = tmp_path / "hub", []

    class Api:
        def create_repo(self, name, *, exist_ok):
            calls.append((name, exist_ok))

        def upload_folder(self, *, repo_id, folder_path):
            shutil.copytree(folder_path, hub / repo_id)

    def download(name, *, revision, allow_patterns):
        calls.append((name, revision))
        assert {*allow_patterns} == {"config.json", "prompts.safetensors"}
        return str(hub / name)

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    model = fp.load_prompts(folder, weights=weights)
    about = {"trunk": model.trunk, "class_names": CLASSES, "model": "timm:test_vit"}
    fp.save_prompts(model.parts, "hub:me/pets", **about)
    again = fp.load_prompts("hub:me/pets@v1", weights=weights)
    assert calls == [("me/pets", True), ("me/pets", "v1")]
    assert torch.equal(again(IMAGES), logits)
    assert 'fp.load_prompts("hub:me/pets")' in (hub / "me" / "pets" / "README.md").read_text()


@pytest.fixture
def clip(tmp_path):
    """A small CLIP, whose name open_clip knows, and its weights."""
    sizes = {"embed_dim": 12, "vision_cfg": VISION, "text_cfg": TEXT}
    (tmp_path / "tiny-clip.json").write_text(json.dumps(sizes))
    open_clip.add_model_config(tmp_path / "tiny-clip.json")
    torch.manual_seed(0)
    network = open_clip.create_model("tiny-clip", pretrained=None).eval()
    torch.save(network.state_dict(), tmp_path / "clip.pt")
    return network, tmp_path / "clip.pt"


@pytest.mark.parametrize("num_classes", [None, 2])
def test_a_context_of_a_clip_gives_the_same_logits(clip, tmp_path, num_classes):
    network, weights = clip
    tower = fp.TextTower(network, open_clip.get_tokenizer("tiny-clip"))
    context = fp.ContextPrompts(tower.dim, length=3, num_classes=num_classes)
    about = {"trunk": network, "class_names": CLASSES, "model": "open_clip:tiny-clip"}
    fp.save_prompts(nn.ModuleDict({"context": context}), tmp_path / "pets", scale=20.0, **about)
    model = fp.load_prompts(tmp_path / "pets", weights=weights)
    images = IMAGES[..., :16, :16]
    names = tower.class_names(CLASSES)
    text = tower(fp.prompted_text(context(), names, class_specific=num_classes is not None))[0]
    expected = fp.cosine_logits(network.encode_image(images), text, scale=20.0)
    assert torch.equal(model(images), expected)


def test_prompts_of_image_towers_of_open_clip_and_transformers_give_the_same_features(
    clip, tmp_path
):
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.ViTConfig(**sizes, intermediate_size=16, image_size=16, patch_size=8)
    vit = transformers.ViTModel(config).eval()
    vit.save_pretrained(tmp_path / "vit")
    network, weights = clip
    for name, trunk, file in [
        ("open_clip:tiny-clip", fp.vit_trunk(network.visual), weights),
        ("transformers:me/vit", fp.vit_trunk(vit), tmp_path / "vit"),
    ]:
        prompts, images = fp.DeepPrompts(2, trunk), IMAGES[..., :16, :16]
        fp.save_prompts(prompts, tmp_path / "prompts", trunk=trunk, model=name)
        model = fp.load_prompts(tmp_path / "prompts", weights=file)
        assert torch.equal(model(images), fp.encode_prompted(trunk, images, prompts()).pooled)


REFUSED = """
save(pads, model=vit) -> ValueError: `module` must be LayeredPrompts with or without a linear head
save(nn.ModuleDict(dict(head=nn.Linear(64, 2))), model=vit) -> ValueError: `module` must be Layered
save(ContextPrompts(8, num_contexts=2), model=vit, trunk=clip) -> ValueError: `module` mu
save(ContextPrompts(8), model=vit, trunk=clip) -> ValueError: `class_names` must name the
save(ContextPrompts(8, num_classes=2), model=vit, trunk=clip, class_names=["a"]) -> ValueError: `cla
save(ContextPrompts(8), model=vit) -> TypeError: `trunk` must be the CLIP itself, so that its image
save(headed, model=vit, class_names=["cat"]) -> ValueError: `class_names` must have a name for each
save(headed, model="test_vit") -> ValueError: `model` must be timm:NAME, open_clip:NAME:TAG or trans
save(headed, model="timm:../vit") -> ValueError: `model` must be timm:NAME, open_clip:NAME:TAG or tr
save(headed, model=vit, arguments=dict(checkpoint_path="x")) -> ValueError: `arguments` must be amon
save(headed, method="fedvpt_d") -> ValueError: `method` must be left out without `model`, which make
load_prompts("nowhere") -> ValueError: `folder` must have a file config.json, as save_prompts writes
load_prompts("folder", trunk=clip) -> ValueError: `trunk` must be left out for a folder, which has
load_prompts(headed, "file", trunk=clip, weights="w") -> ValueError: `weights` must be left out for
save_prompts(headed, "hub:me/pets", trunk=clip) -> ValueError: `model` must be given for the Hub
load_prompts(headed) -> TypeError: `path` must be given with `trunk`, for a module; got
"""


@pytest.mark.bad_input
@pytest.mark.parametrize(("call", "error", "message"), refusals(REFUSED))
def test_refusals(call, error, message, tmp_path):
    trunk = fp.vit_trunk(new_network())

    def save(module, **options):
        fp.save_prompts(module, tmp_path / "folder", **{"trunk": trunk, **options})
        raise AssertionError("saved")

    parts = {"prompts": fp.ShallowPrompts(2, trunk), "head": nn.Linear(64, 2)}
    names = {
        "headed": nn.ModuleDict(parts),
        "clip": nn.Linear(1, 1),
        "pads": fp.PadPrompts(8, padding=2),
        "nn": nn,
    }
    check_refused(call, error, message, {**names, "save": save, "vit": "timm:test_vit"})


def test_a_newer_format_is_refused(saved):
    folder, weights, _ = saved
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"format": 2}))
    with pytest.raises(ValueError, match="must be of format 1; a newer fedprompt may have"):
        fp.load_prompts(folder, weights=weights)
