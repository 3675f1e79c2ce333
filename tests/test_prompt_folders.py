"""A folder of trained prompts is enough to build the network again, anywhere."""

import json
import re
import shutil
from contextlib import suppress
from functools import cache
from pathlib import Path

import huggingface_hub
import open_clip
import pytest
import timm
import torch
import torch.nn as nn
import transformers
from safetensors.torch import load_file, save_file

import fedprompt as fp
from clips import TEXT, VISION
from fedprompt.backbones.preparation import Preparation, of_timm
from fedprompt.backbones.pretrained import check_source
from fedprompt.methods.models import PromptedModel
from fedprompt.saved import saved_folder
from refusals import check_refused, refusals

CLASSES = ["cat", "dog"]
VIT = "timm:test_vit"
IMAGES = torch.rand(3, 3, 160, 160, generator=torch.Generator().manual_seed(0))
ABOUT = {"method": "fedvpt_d", "data": "pets", "license": "mit", "sentence": "a photo of a {}."}


def new_network(seed=0, **arguments):
    torch.manual_seed(seed)
    return timm.create_model("test_vit", num_classes=5, **arguments).eval()


@cache
def one_trunk():
    return fp.vit_trunk(new_network())


def trained(trunk):
    model = PromptedModel(trunk, 2)
    model.prompts = fp.LayeredPrompts(2, trunk, layers=(0, 3))
    return model


@pytest.fixture(scope="module")
def first_save(tmp_path_factory):
    """Save a folder and the weights of its network, and return both and the logits."""
    root, network = tmp_path_factory.mktemp("saved"), new_network()
    trunk = fp.vit_trunk(network)
    model = trained(trunk)
    save_file(network.state_dict(), root / "weights.safetensors")
    about = {"trunk": trunk, "class_names": CLASSES, "model": VIT}
    fp.save_prompts(model, root / "pets", **about, **ABOUT)
    with torch.no_grad():
        return root / "pets", root / "weights.safetensors", model(IMAGES)


@pytest.fixture
def saved(first_save, tmp_path):
    """Return a copy of the folder, the weights of its network and the logits."""
    folder, *others = first_save
    return shutil.copytree(folder, tmp_path / "pets"), *others


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


def test_the_card_names_the_network_the_training_and_the_preparation(saved):
    folder, weights, _ = saved
    model = fp.load_prompts(folder, weights=weights)
    assert model.preparation == of_timm(timm.get_pretrained_cfg("test_vit").to_dict())
    card = (folder / "README.md").read_text()
    assert {"base_model: timm/test_vit", "license: mit"} <= {*card.splitlines()}
    for value in (*ABOUT.values(), *CLASSES, str(model.preparation)):
        assert value in card


def test_a_card_has_one_row_for_classes_with_bars_and_breaks(tmp_path, monkeypatch):
    trunk = fp.vit_trunk(new_network())
    monkeypatch.chdir(tmp_path)
    fp.save_prompts(trained(trunk), ".", trunk=trunk, class_names=["a|b", "c\nd"], model=VIT)
    card = Path("README.md").read_text()
    assert "| classes | a\\|b, c d |" in card
    assert f'load_prompts("{tmp_path.name}")' in card


@pytest.mark.parametrize("size", [96, (64, 96)])
def test_a_network_of_another_size_comes_back_with_it(size, tmp_path):
    network = new_network(img_size=size, in_chans=1)
    save_file(network.state_dict(), tmp_path / "w.safetensors")
    trunk = fp.vit_trunk(network)
    about = {"trunk": trunk, "model": VIT, "arguments": {"in_chans": 1}}
    fp.save_prompts(fp.DeepPrompts(2, trunk), tmp_path / "p", **about)
    model = fp.load_prompts(tmp_path / "p", weights=tmp_path / "w.safetensors")
    assert model.preparation.size == (size if isinstance(size, tuple) else (size, size))
    images = torch.zeros(1, 1, *model.preparation.size)
    assert model(images).shape == (1, 64)
    with pytest.raises(ValueError, match="`arguments` must make the network from timm:test_vit"):
        fp.save_prompts(fp.DeepPrompts(2, trunk), tmp_path / "p", trunk=trunk, model=VIT)


def test_a_folder_travels_over_the_hub(saved, tmp_path, monkeypatch):
    """A stand-in for the Hub keeps what is uploaded, and has one revision."""
    folder, weights, logits = saved
    hub, calls = tmp_path / "hub", []

    class Api:
        def create_repo(self, name, *, exist_ok):
            calls.append((name, exist_ok))

        def upload_folder(self, *, repo_id, folder_path):
            shutil.copytree(folder_path, hub / repo_id, ignore=shutil.ignore_patterns(".lock"))

    def download(name, *, revision, allow_patterns):
        calls.append((name, revision))
        assert {*allow_patterns} == {"config.json", "state.safetensors"}
        return str(hub / name)

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    model = fp.load_prompts(folder, weights=weights)
    about = {"trunk": model.trunk, "class_names": CLASSES, "model": VIT}
    fp.save_prompts(model.parts, "hub:me/pets", **about)
    again = fp.load_prompts("hub:me/pets@v1", weights=weights)
    assert calls == [("me/pets", True), ("me/pets", "v1")]
    assert torch.equal(again(IMAGES), logits)
    assert 'fp.load_prompts("hub:me/pets")' in (hub / "me" / "pets" / "README.md").read_text()


TOKENIZER_OF = cache(open_clip.get_tokenizer)  # it reads its vocabulary


@pytest.fixture
def clip(tmp_path, monkeypatch):
    """A small CLIP, whose name open_clip knows, and its weights."""
    monkeypatch.setattr(open_clip, "get_tokenizer", TOKENIZER_OF)
    sizes = {"embed_dim": 12, "vision_cfg": VISION, "text_cfg": TEXT}
    monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, "tiny-clip", sizes)
    torch.manual_seed(0)
    network = open_clip.create_model("tiny-clip", pretrained=None).eval()
    torch.save(network.state_dict(), tmp_path / "clip.pt")
    return network, tmp_path / "clip.pt"


@pytest.mark.parametrize(("num_classes", "scale"), [(None, None), (2, 20.0)])
def test_a_context_of_a_clip_gives_the_same_logits(clip, tmp_path, num_classes, scale):
    network, weights = clip
    tower = fp.TextTower(network, open_clip.get_tokenizer("tiny-clip"))
    context = fp.ContextPrompts(tower.dim, length=3, num_classes=num_classes)
    about = {"trunk": network, "class_names": CLASSES, "model": "open_clip:tiny-clip"}
    fp.save_prompts(nn.ModuleDict({"context": context}), tmp_path / "pets", scale=scale, **about)
    model = fp.load_prompts(tmp_path / "pets", weights=weights)
    images = IMAGES[..., :16, :16]
    names = tower.class_names(CLASSES)
    text = tower(fp.prompted_text(context(), names, class_specific=num_classes is not None))[0]
    scale = network.logit_scale.exp().item() if scale is None else scale
    expected = fp.cosine_logits(network.encode_image(images), text, scale=scale)
    assert torch.equal(model(images), expected)


def test_prompts_of_image_towers_of_open_clip_and_transformers_give_the_same_features(
    clip, tmp_path
):
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.ViTConfig(**sizes, intermediate_size=16, image_size=16, patch_size=8)
    vit = transformers.ViTModel(config).eval()
    vit.save_pretrained(tmp_path / "vit")
    processor = transformers.ViTImageProcessor(size={"height": 16, "width": 16})
    processor.save_pretrained(tmp_path / "vit")
    network, weights = clip
    for name, trunk, file in [
        ("open_clip:tiny-clip", fp.vit_trunk(network.visual), weights),
        ("transformers:me/vit", fp.vit_trunk(vit), tmp_path / "vit"),
    ]:
        prompts, images = fp.DeepPrompts(2, trunk), IMAGES[..., :16, :16]
        fp.save_prompts(prompts, tmp_path / "new" / "prompts", trunk=trunk, model=name)
        model = fp.load_prompts(tmp_path / "new" / "prompts", weights=file)
        assert torch.equal(model(images), fp.encode_prompted(trunk, images, prompts()).pooled)
        assert model.preparation.size == (16, 16)


def test_a_model_whose_prediction_is_more_than_its_parts_is_refused(clip, tmp_path):
    """The flags of its weights are as before."""
    network, weights = clip
    network.requires_grad_()
    tower = fp.TextTower(network, open_clip.get_tokenizer("tiny-clip"))
    network.requires_grad_()
    names = tower.class_names(CLASSES)

    class Own(nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.context, self.factor = fp.ContextPrompts(tower.dim, length=3), factor

        def forward(self, tokens):
            text = tower(fp.prompted_text(self.context(), names))[0]
            return self.factor * fp.cosine_logits(tokens[:, 0], text, scale=20.0)

    about = {"trunk": network, "class_names": CLASSES, "model": "open_clip:tiny-clip"}
    fp.save_prompts(Own(1.0), tmp_path / "a", scale=20.0, **about)
    with pytest.raises(ValueError, match="`module` must classify as its prompts and head, or its"):
        fp.save_prompts(Own(1.5), tmp_path / "b", scale=20.0, **about)
    assert not (tmp_path / "b").exists()
    assert all(weight.requires_grad for weight in network.parameters())
    assert fp.load_prompts(tmp_path / "a", weights=weights)(IMAGES[..., :16, :16]).shape == (3, 2)


# Files: written as one, read with doubt.


def described(name):
    fingerprint = {"weights": name}
    return saved_folder.Description(kind="vit", fingerprint=fingerprint, about={"data": name})


def test_a_save_that_ends_at_any_moment_leaves_the_old_folder_or_the_new_one(tmp_path, monkeypatch):
    """Each step of a save fails once, as if the process were killed there."""
    old, new = ({"x": torch.full((4,), value)} for value in (1.0, 2.0))
    found = set()
    for last in range(20):
        folder = tmp_path / str(last)
        saved_folder.write(folder, described("old"), old, "old")
        with monkeypatch.context() as patch:
            steps = iter(range(last))
            for name in ("replace", "fsync"):
                real = getattr(saved_folder.os, name)

                def step(*given, real=real, steps=steps):
                    next(steps)  # which ends the save
                    return real(*given)

                patch.setattr(saved_folder.os, name, step)
            with suppress(StopIteration, RuntimeError):
                saved_folder.write(folder, described("new"), new, "new")
        which, state = saved_folder.read(folder)
        found.add(which.about["data"])
        assert torch.equal(state["x"], {"old": old, "new": new}[which.about["data"]]["x"])
        saved_folder.write(folder, described("last"), old, "last")
        assert (folder / "README.md").read_text() == "last"
        assert not [*folder.glob("*.part")]
    assert found == {"old", "new"}


def test_an_edited_card_and_files_of_others_are_kept_and_links_are_not_followed(tmp_path):
    folder, state = tmp_path / "folder", {"x": torch.ones(2)}
    saved_folder.write(folder, described("a"), state, "card a")
    (folder / "notes.txt").write_text("mine")
    (tmp_path / "target").write_text("not to be written")
    (folder / "state.safetensors").unlink()
    (folder / "state.safetensors").symlink_to(tmp_path / "target")
    saved_folder.write(folder, described("b"), state, "card b")
    assert (folder / "README.md").read_text() == "card b"
    (folder / "README.md").write_text("edited")
    for name in "cd":
        saved_folder.write(folder, described(name), state, f"card {name}")
        assert (folder / "README.md").read_text() == "edited"
    assert (folder / "notes.txt").read_text() == "mine"
    assert (tmp_path / "target").read_text() == "not to be written"
    assert not (folder / "state.safetensors").is_symlink()
    for name in ("config.json", "state.safetensors"):
        (other := tmp_path / name.partition(".")[0]).mkdir()
        (other / name).write_text('{"model_type": "bert"}')
        with pytest.raises(ValueError, match=r"must (be of format|have no file of another)"):
            saved_folder.write(other, described("a"), state, "card")
        assert (other / name).read_text() == '{"model_type": "bert"}'


def changed(folder, **changes):
    """Write a description with the digest of its new content, as a stranger can."""
    values = json.loads((folder / "config.json").read_text()) | changes
    digest = values.pop("digest")
    digest = saved_folder._digest(values) if "digest" not in changes else digest
    (folder / "config.json").write_text(json.dumps(values | {"digest": digest}))


DAMAGED = """
digest="0" -> must have the digest of its content; it was damaged or changed; got '0'
format="fedprompt folder 3" -> must be of format 'fedprompt folder 2'; got 'fedprompt folder 3'
model=None -> .json: model` must be of type str; got None (NoneType)
model="timm:nothere" -> `vit` must have weights of nothere; got
model="transformers:../x" -> `model` must be timm:NAME, open_clip:NAME:TAG or transformers:NAME
model="/etc/passwd" -> `model` must be timm:NAME, open_clip:NAME:TAG or transformers:NAME
class_names=3 -> .json: class_names` must be of type
class_names=["cat"] -> `class_names` must have a name for each of 2 classes; got 1
arguments={"img_size": "x y"} -> `arguments['img_size']` must be a number from 1 to 2048, two of
arguments={"img_size": 4096} -> `arguments['img_size']` must be a number from 1 to 2048, two of
arguments={"img_size": 2048, "patch_size": 2} -> `arguments` must make at most 512 patches along
arguments={"checkpoint_path": "x"} -> `arguments` must be among
scale="x" -> .json: scale` must be of type float; got 'x' (str)
kind="bert" -> .json: kind` must be one of ('vit', 'clip'); got 'bert' (str)
layers=[0] -> `folder` must name the layers of its prompts; got (0,)
layers=["0", "3"] -> .json: layers` must be of type int; got '0' (str)
fingerprint={"weights": "x"} -> `weights` must have the same weights as the network of the folder
preparation=None -> ok
preparation={"size": 3} -> .json: preparation` must have the keys size, mean, std
method="fedprox" -> `module` must have prompts or a context; load the model of a method by
unknown=1 -> .json` must have the keys kind, model
files={} -> `folder` must contain the state.safetensors whose digest is in config.json; got a missi
"""


@pytest.mark.parametrize("row", DAMAGED.strip().splitlines())
def test_a_changed_description_is_refused_by_name(saved, row):
    folder, weights, logits = saved
    change, message = row.split(" -> ")
    changed(folder, **eval(f"dict({change})"))
    if message == "ok":
        assert torch.equal(fp.load_prompts(folder, weights=weights)(IMAGES), logits)
        return
    with pytest.raises(ValueError, match=re.escape(message)):
        fp.load_prompts(folder, weights=weights)


def test_as_many_patches_along_a_side_as_the_message_says_are_taken():
    assert check_source(VIT, {"img_size": 1024, "patch_size": 2}) == "timm"


def test_damaged_and_missing_files_are_refused(saved, tmp_path):
    folder, weights, _ = saved
    path = folder / "config.json"
    config = path.read_bytes()
    for text in ("", "{", "[" * 100000, "[1]", "null", '"x"'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"must be (JSON|of format)"):
            fp.load_prompts(folder, weights=weights)
    path.write_bytes(config.replace(b"cat", b"cow"))
    with pytest.raises(ValueError, match="must have the digest of its content; it was damaged"):
        fp.load_prompts(folder, weights=weights)
    path.write_bytes(config)
    state = load_file(folder / "state.safetensors")
    save_file({**state, "more": torch.zeros(1)}, folder / "state.safetensors")
    with pytest.raises(ValueError, match=r"contain the state.safetensors whose digest is in"):
        fp.load_prompts(folder, weights=weights)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"`folder` must contain config.json"):
        fp.load_prompts(folder)
    save_file(new_network(1).state_dict(), tmp_path / "other.safetensors")


def test_other_weights_are_refused_by_the_fingerprint(saved, tmp_path):
    folder, *_ = saved
    save_file(new_network(1).state_dict(), tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="`weights` must have the same weights as the network of"):
        fp.load_prompts(folder, weights=tmp_path / "other.safetensors")


REFUSED = """
save(pads, model=vit) -> ValueError: `module` must be LayeredPrompts with or without a linear head
save(counted, model=vit) -> ValueError: `module` must be LayeredPrompts with or without a linear hea
save(nn.ModuleDict(dict(head=nn.Linear(64, 2))), model=vit) -> ValueError: `module` must be Layered
save(ContextPrompts(8, num_contexts=2), model="open_clip:RN50", trunk=clip) -> ValueError: `class_na
save(ContextPrompts(8), model=vit) -> TypeError: `trunk` must be the CLIP itself, so that its image
save(headed, model=vit, class_names=["cat"]) -> ValueError: `class_names` must have a name for each
save(ContextPrompts(8), model=vit, trunk=clip, class_names=["a"]) -> ValueError: `trunk` must have a
save(headed, model=3) -> TypeError: `model` must be a string; got 3
save(headed, model="test_vit") -> ValueError: `model` must be timm:NAME, open_clip:NAME:TAG or trans
save(headed, model="timm:../vit") -> ValueError: `model` must be timm:NAME, open_clip:NAME:TAG or tr
save(headed, model="timm:test_vit2") -> ValueError: `arguments` must make the network from timm:test
save(headed, model=vit, arguments=dict(checkpoint_path="x")) -> ValueError: `arguments` must be amon
save(headed, model=vit, scale=0.0) -> ValueError: `scale` must be
save(headed, model=vit, data=3) -> TypeError: `data` must be a string
save(headed, method="fedvpt_d") -> ValueError: `method` must be left out without `model`, which make
save(headed, preparation=own) -> ValueError: `preparation` must be left out without `model`, which
save(nn.ModuleDict(dict(prompts=nn.Linear(1, 1))), model=vit) -> ValueError: `module` must be Layer
save(headed, model="transformers:a/b") -> ValueError: `trunk` must have a network of transformers, w
load_prompts("nowhere") -> FileNotFoundError: `folder` must contain config.json, as fedprompt writes
load_prompts("folder", trunk=clip) -> ValueError: `trunk` must be left out for a folder, which has
load_prompts(headed, "file", trunk=clip, weights="w") -> ValueError: `weights` must be left out for
save_prompts(headed, "hub:me/pets", trunk=clip) -> ValueError: `model` must be given for the Hub
load_prompts(headed, "file") -> TypeError: `path` must be given with `trunk`, for a module; got
"""


@pytest.mark.bad_input
@pytest.mark.parametrize(("call", "error", "message"), refusals(REFUSED))
def test_refusals(call, error, message, tmp_path):
    trunk = one_trunk()

    def save(module, **options):
        fp.save_prompts(module, tmp_path / "folder", **{"trunk": trunk, **options})
        raise AssertionError("saved")

    parts = {"prompts": fp.ShallowPrompts(2, trunk), "head": nn.Linear(64, 2)}
    names = {
        "headed": nn.ModuleDict(parts),
        "counted": nn.ModuleDict(parts | {"usage": nn.BatchNorm1d(2, affine=False)}),
        "clip": nn.Linear(1, 1),
        "pads": fp.PadPrompts(8, padding=2),
        "own": Preparation(8, (0.5,) * 3, (0.5,) * 3),
        "nn": nn,
    }
    check_refused(call, error, message, {**names, "save": save, "vit": VIT})
    assert not (tmp_path / "folder").exists()
