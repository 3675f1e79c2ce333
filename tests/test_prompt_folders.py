"""A folder of trained prompts is enough to build the network again, anywhere."""

import copy
import json
import re
import shutil
from functools import cache
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
from fedprompt.backbones.named import named_network, parsed
from fedprompt.methods import METHODS, ClipSetting, Federation
from fedprompt.methods.models import PromptedModel
from refusals import check_refused, refusals

CLASSES = ["cat", "dog"]
VIT = "timm:test_vit"
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


TOKENIZER_OF = cache(open_clip.get_tokenizer)  # it reads its vocabulary


@pytest.fixture
def clip(tmp_path, monkeypatch):
    """A small CLIP, whose name open_clip knows, and its weights."""
    monkeypatch.setattr(open_clip, "get_tokenizer", TOKENIZER_OF)
    sizes = {"embed_dim": 12, "vision_cfg": VISION, "text_cfg": TEXT}
    (tmp_path / "tiny-clip.json").write_text(json.dumps(sizes))
    open_clip.add_model_config(tmp_path / "tiny-clip.json")
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
    path = tmp_path / "pets" / "config.json"
    config = json.loads(path.read_text())
    longer = {"context": config["context"] | {"length": 10**7}}
    for change, rule in (({"class_names": []}, "name the classes of a"), (longer, "be the file")):
        path.write_text(json.dumps(config | change))
        with pytest.raises(ValueError, match=f"must {rule}"):
            fp.load_prompts(tmp_path / "pets", weights=weights)


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
        fp.save_prompts(prompts, tmp_path / "new" / "prompts", trunk=trunk, model=name)
        model = fp.load_prompts(tmp_path / "new" / "prompts", weights=file)
        assert torch.equal(model(images), fp.encode_prompted(trunk, images, prompts()).pooled)


REFUSED = """
save(pads, model=vit) -> ValueError: `module` must be LayeredPrompts with or without a linear head
save(counted, model=vit) -> ValueError: `module` must be LayeredPrompts with or without a linear hea
save(nn.ModuleDict(dict(head=nn.Linear(64, 2))), model=vit) -> ValueError: `module` must be Layered
save(ContextPrompts(8, num_contexts=2), model=vit, trunk=clip) -> ValueError: `module` mu
save(ContextPrompts(8), model=vit, trunk=clip) -> ValueError: `class_names` must name the
save(ContextPrompts(8, num_classes=2), model=vit, trunk=clip, class_names=["a"]) -> ValueError: `cla
save(ContextPrompts(8), model=vit) -> TypeError: `trunk` must be the CLIP itself, so that its image
save(headed, model=vit, class_names=["cat"]) -> ValueError: `class_names` must have a name for each
save(ContextPrompts(8), model=vit, trunk=clip, class_names=["a"]) -> ValueError: `model` must be a n
save(headed, model=3) -> TypeError: `model` must be a string; got 3
save(headed, model="test_vit") -> ValueError: `model` must be timm:NAME, open_clip:NAME:TAG or trans
save(headed, model="timm:../vit") -> ValueError: `model` must be timm:NAME, open_clip:NAME:TAG or tr
save(headed, model=vit, arguments=dict(checkpoint_path="x")) -> ValueError: `arguments` must be amon
save(headed, method="fedvpt_d") -> ValueError: `method` must be left out without `model`, which make
save(nn.ModuleDict(dict(prompts=nn.Linear(1, 1))), model=vit) -> ValueError: `module` must be Layer
save(headed, model="transformers:a/b") -> ValueError: `trunk` must have a network of transformers, w
load_prompts("nowhere") -> ValueError: `folder` must have a file config.json, as save_prompts writes
load_prompts("folder", trunk=clip) -> ValueError: `trunk` must be left out for a folder, which has
load_prompts(headed, "file", trunk=clip, weights="w") -> ValueError: `weights` must be left out for
save_prompts(headed, "hub:me/pets", trunk=clip) -> ValueError: `model` must be given for the Hub
load_prompts(headed, "file") -> TypeError: `path` must be given with `trunk`, for a module; got
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
        "counted": nn.ModuleDict(parts | {"usage": nn.BatchNorm1d(2, affine=False)}),
        "clip": nn.Linear(1, 1),
        "pads": fp.PadPrompts(8, padding=2),
        "nn": nn,
    }
    check_refused(call, error, message, {**names, "save": save, "vit": "timm:test_vit"})


DAMAGED = """
format=2 -> .json` must be of format 1; a newer fedprompt may have
model=None -> .json: model` must be a string; got None (NoneType)
model="timm:nothere" -> `model` must be a network of timm that fits the arguments and the weights
model="open_clip:nothere" -> `model` must be a network of open_clip that fits
model="transformers:../x" -> `model` must be timm:NAME, open_clip:NAME:TAG or transformers:NAME
model="transformers:.." -> `model` must be timm:NAME, open_clip:NAME:TAG or transformers:NAME
class_names=3 -> .json: class_names` must be a list of strings; got 3 (int)
class_names=["cat"] -> .json: class_names` must have 2 names; got 1
arguments=None -> .json: arguments` must be an object; got None
arguments={"img_size": "x"} -> `arguments['img_size']` must be an integer from 1 to 2048, or two
scale="x" -> .json: scale` must be null or a number above 0; got 'x' (str)
scale=-1.0 -> .json: scale` must be null or a number above 0; got -1.0 (float)
scale=float("nan") -> .json: scale` must be null or a number above 0; got nan (float)
kind="context" -> .json` must have prompts with or without a head, or a context, and name it
context={"dim": 8, "length": 1, "num_classes": None} -> .json` must have prompts with or without
prompts=[1] -> .json: prompts` must be an object; got a list of length 1
prompts=PROMPTS | {"layers": "abc"} -> prompts: layers` must list layers, each once; got 'abc'
prompts=PROMPTS | {"num_prompts": 3000000} -> prompts.safetensors` must be the file that config.json
prompts=PROMPTS | {"dim": 1} -> hold 'prompts.tokens' in the shape
prompts=PROMPTS | {"dim": 10**7} -> prompts.safetensors` must be the file that config.json describes
prompts=PROMPTS | {"layers": [0, 0]} -> prompts: layers` must list layers, each once; got a list
prompts=PROMPTS | {"layers": [0, "3"]} -> prompts: layers` must list layers, each once; got a list
head=HEAD | {"in_features": 10**7} -> prompts.safetensors` must be the file that config.json describ
head=HEAD | {"device": "meta"} -> .json: head` must have the keys in_features, out_features, bias;
head=HEAD | {"out_features": 10**12} -> out_features` must be an integer from 1 to 2**31 - 1
head={"in_features": 64} -> .json: head` must have the key 'out_features'; got none
unknown=1 -> .json` must have the keys format, fedprompt
"""
PROMPTS = {"num_prompts": 2, "dim": 64, "layers": [0, 3], "replace": False}
HEAD = {"in_features": 64, "out_features": 2, "bias": True}


def test_a_description_that_was_changed_is_refused_by_file_and_key(saved):
    folder, weights, _ = saved
    path = folder / "config.json"
    config = json.loads(path.read_text())
    texts = dict.fromkeys(("", "{", "[" * 100000), "must be JSON")
    texts |= dict.fromkeys(("[1]", "null", '"x"'), "must be of format 1")
    for key in config.keys() - {"format", "head", "tower"}:
        shorter = {name: value for name, value in config.items() if name != key}
        texts[json.dumps(shorter)] = repr(key) if key != "prompts" else "must have prompts"
    for row in DAMAGED.strip().splitlines():
        change, message = row.split(" -> ")
        texts[json.dumps(config | eval(f"dict({change})"))] = message
    for text, message in texts.items():
        path.write_text(text)
        with pytest.raises(ValueError, match=re.escape(message)) as refused:
            fp.load_prompts(folder, weights=weights)
        assert str(folder) in str(refused.value)
    path.write_text(json.dumps(config))
    (folder / "prompts.safetensors").unlink()
    with pytest.raises(ValueError, match=r"`.*prompts.safetensors` must be .*; got no file"):
        fp.load_prompts(folder, weights=weights)


def test_arguments_of_a_name_are_sizes_flags_and_words():
    good = {"in_chans": 1, "img_size": [2048, 64], "patch_size": 4, "global_pool": ""}
    good |= {"class_token": False, "dynamic_img_size": True}
    assert parsed("timm:vit", good) == ("timm", "vit")
    for key, value in [
        *(("in_chans", value) for value in (0, -1, 2049, 1.0, True, [3, 3])),
        *(("img_size", value) for value in ([8, 0], [8], {8, 16}, [8, 16, 32], "8")),
        *(("global_pool", value) for value in ("a b", "../x", 3, None)),
        *(("class_token", value) for value in (1, None, "yes")),
        *(("arguments", value) for value in ({"img_size": 2048, "patch_size": 3},)),
    ]:
        wrong = value if key == "arguments" else {key: value}
        with pytest.raises(ValueError, match=f"`arguments.*{key}|at most 512"):
            parsed("timm:vit", wrong)


def test_weights_of_the_library_come_without_code_and_without_a_classifier(monkeypatch):
    calls = []

    def record(*given, **options):
        calls.append((*given, options))
        return nn.Identity()

    monkeypatch.setattr(timm, "create_model", record)
    monkeypatch.setattr(open_clip, "create_model", record)
    monkeypatch.setattr(transformers.AutoModel, "from_pretrained", record)
    for name in (VIT, "open_clip:ViT-B-32:openai", "transformers:me/vit"):
        named_network(name, {}, None)
    assert calls == [
        ("test_vit", {"pretrained": True, "num_classes": 0}),
        ("ViT-B-32", {"pretrained": "openai"}),
        ("me/vit", {"trust_remote_code": False}),
    ]


def test_weights_of_another_format_or_place_are_refused(saved, tmp_path):
    folder, weights, _ = saved
    shutil.copy(weights, tmp_path / "weights.st")
    torch.save({"path": Path("x")}, tmp_path / "objects.pth")
    for name, message in {
        "weights.st": "must end in .safetensors, because it is a file of this format",
        "objects.pth": "must be a file of tensors alone",
        "nothere.pth": "must be a file that exists",
        "pets": "must be a file that exists",
    }.items():
        with pytest.raises(ValueError, match=f"pets: `weights` {message}"):
            fp.load_prompts(folder, weights=tmp_path / name)


def test_a_card_has_one_row_for_classes_with_bars_and_breaks(tmp_path, monkeypatch):
    trunk = fp.vit_trunk(new_network())
    monkeypatch.chdir(tmp_path)
    fp.save_prompts(trained(trunk), ".", trunk=trunk, class_names=["a|b", "c\nd"], model=VIT)
    card = Path("README.md").read_text()
    assert "| classes | a\\|b, c d |" in card
    assert f'load_prompts("{tmp_path.name}")' in card


def test_the_model_of_a_method_has_the_same_logits_in_a_folder_or_is_refused(clip, tmp_path):
    """PLOT with one context matches patches, and FedVPT-CLIP has a text classifier."""
    network, weights = clip
    tower = fp.TextTower(network, open_clip.get_tokenizer("tiny-clip"))
    images = IMAGES[..., :16, :16]
    pooled, patches = fp.image_tokens(network, images)
    tokens, shards = torch.cat([pooled[:, None], patches], 1).detach(), {0: torch.arange(3)}
    labels = torch.tensor([0, 1, 0])
    about = {
        "rounds": 1,
        "steps": 1,
        "clients": [0],
        "length": 3,
        "class_names": CLASSES,
        "scale": 20.0,
    }
    trained = copy.deepcopy(network).requires_grad_()
    made = ClipSetting(tower=tower, clip=network, **about)
    accepted, refused = set(), []
    for name, entry in METHODS.items():
        if "CLIP" not in entry.families:
            continue
        inputs = images if entry.inputs == "images" else tokens
        federation = Federation(inputs, labels, shards)
        options = {"num_contexts": 1} if name == "fedplot" else {}
        method = entry.make(made, **options)
        model = fp.Round(0, method.server.state, {}).model(method, federation, 0)
        if not isinstance(model, nn.Module):
            continue
        trunk = trained if hasattr(model, "context") else fp.vit_trunk(network.visual)
        about = {"trunk": trunk, "class_names": CLASSES, "model": "open_clip:tiny-clip"}
        try:
            fp.save_prompts(model, tmp_path / name, scale=20.0, **about)
            accepted.add(name)
        except ValueError as error:
            refused.append(str(error))
            continue
        loaded = fp.load_prompts(tmp_path / name, weights=weights)
        with torch.no_grad():
            assert torch.equal(loaded(images), model(inputs))
    assert all(weight.requires_grad for weight in trained.parameters())  # as it was
    assert all(text.startswith(("`module` must", "`trunk` must")) for text in refused)
    assert {"promptfl", "promptfl_fedprox", "coop", "kgcoop"} <= accepted
