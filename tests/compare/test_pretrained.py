"""Networks by name, from files and folders, and without a connection."""

import json
import logging
import re
import shutil
import socket
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import open_clip
import pytest
import timm
import torch
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError
from open_clip.constants import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD
from safetensors.torch import load_file, save_file
from transformers import CLIPConfig, CLIPModel, CLIPTokenizer, ViTConfig, ViTModel

import fedprompt as fp
from clips import NAMES, TEXT, TOKENIZER, VISION
from fedprompt import samples
from fedprompt.compare import pretrained
from fedprompt.compare.pretrained import network
from refusals import refused

TINY = "test_vit"
ACCESS = {"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6)}
SMALL = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
SMALL |= {"num_attention_heads": 2, "image_size": 16, "patch_size": 8}

WORDS = {"max_position_embeddings": 24, **SMALL, "vocab_size": 49408}
WORDS |= {"bos_token_id": 49406, "eos_token_id": 49407}
HUB_CLIP = CLIPConfig(text_config=WORDS, vision_config=SMALL, projection_dim=6)


def save(model, path):
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, path)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Files and folders of weights of each library, and damaged ones."""
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("weights")
    save(timm.create_model(TINY, num_classes=3), root / f"{TINY}.safetensors")
    save(timm.create_model(TINY, depth=7), root / "deep.safetensors")
    save(timm.create_model("test_resnet"), root / "test_resnet.safetensors")
    data = (root / f"{TINY}.safetensors").read_bytes()
    (root / "cut.safetensors").write_bytes(data[: len(data) // 2])
    (root / "text.pth").write_text("hello")
    (root / "empty").mkdir()
    processor = json.dumps(
        {"image_mean": ACCESS["mean"], "image_std": ACCESS["std"], "resample": 2}
    )
    special = {"<start_of_text>": "<|startoftext|>", "<end_of_text>": "<|endoftext|>"}
    ids = {special.get(token, token): index for token, index in TOKENIZER.encoder.items()}
    for name, model in {
        "hub-vit": ViTModel(ViTConfig(**SMALL)),
        "hub-clip": CLIPModel(HUB_CLIP),
    }.items():
        model.save_pretrained(root / name)
        (root / name / "preprocessor_config.json").write_text(processor)
    CLIPTokenizer(vocab=ids, merges=list(TOKENIZER.bpe_ranks)).save_pretrained(root / "hub-clip")
    cfg = {"model_cfg": {"embed_dim": 12, "vision_cfg": VISION, "text_cfg": TEXT}}
    (root / "clip").mkdir()
    (root / "clip/open_clip_config.json").write_text(json.dumps(cfg | {"preprocess_cfg": ACCESS}))
    save(open_clip.model.CLIP(12, VISION, TEXT), root / "clip/open_clip_model.safetensors")
    (root / "bare").mkdir()
    (root / "bare/open_clip_config.json").write_text(json.dumps(cfg | {"preprocess_cfg": ACCESS}))
    shutil.copytree(root / "hub-vit", root / "cubic-vit")
    (root / "cubic-vit/preprocessor_config.json").write_text(
        json.dumps({"image_mean": ACCESS["mean"], "image_std": ACCESS["std"]})
    )
    shutil.copytree(root / "hub-vit", root / "unprepared")
    (root / "unprepared/preprocessor_config.json").write_text("{}")
    (root / "timm").mkdir()
    shutil.copy(root / f"{TINY}.safetensors", root / "timm/model.safetensors")
    about = {"input_size": [3, 160, 160], "interpolation": "bilinear", "classifier": "head"}
    about |= {"fixed_input_size": True}
    about = {"architecture": TINY, "num_classes": 3, "pretrained_cfg": about | ACCESS}
    (root / "timm/config.json").write_text(json.dumps(about))
    return root


def test_a_vision_transformer_of_a_file_is_that_of_timm_with_its_preparation(root):
    file = root / f"{TINY}.safetensors"
    made, again = network(f"{TINY}={file}"), network(str(file), size=96)
    expected = timm.create_model(
        TINY,
        pretrained=True,
        pretrained_cfg_overlay={"file": str(file), "custom_load": False},
        num_classes=0,
    ).eval()
    images = torch.rand(2, 3, 160, 160)
    found = fp.encode_prompted(made.trunk, images).pooled
    torch.testing.assert_close(found, expected(images), rtol=1e-4, atol=1e-5)
    assert (made.size, made.mean, made.std) == (160, (0.5,) * 3, (0.5,) * 3)
    assert (again.size, made.interpolation, len(made.identity)) == (96, "bicubic", 12)
    assert network(expected).identity == made.identity != again.identity
    assert made.name == again.name == TINY
    folder = network(str(root / "timm"))
    assert (folder.identity, folder.name) == (made.identity, str(root / "timm"))
    assert (folder.size, folder.interpolation) == (160, "bilinear")
    assert {name: tuple(getattr(folder, name)) for name in ACCESS} == ACCESS
    assert network(str(root / "timm"), size=96).size == 96


@pytest.mark.parametrize(
    ("name", "how"),
    [("hub-vit", "bilinear"), ("cubic-vit", "bicubic"), ("facebook/vit=hub-vit", "bilinear")],
)
def test_a_folder_of_transformers_is_a_trunk(root, name, how):
    start, _, folder = name.rpartition("=")
    path = str(root / folder)
    made = network(f"{start}={path}" if start else path)
    assert made.name == (start or path)
    assert (made.size, *map(tuple, (made.mean, made.std))) == (16, *ACCESS.values())
    assert (made.interpolation, made.trunk.dim) == (how, 8)


def test_a_clip_of_each_library_has_a_tower_and_tokens(root):
    ours, theirs = (network(str(root / name), "clip") for name in ("clip", "hub-clip"))
    images = torch.rand(2, 3, 16, 16)
    pooled, patches = fp.image_tokens(ours.model, images)
    assert torch.equal(ours.tokens(images), torch.cat([pooled[:, None], patches], 1))
    expected = theirs.model.get_image_features(images).pooler_output
    torch.testing.assert_close(theirs.tokens(images)[:, 0], expected)
    for made in (ours, theirs):
        assert tuple(made.mean) == ACCESS["mean"]
        assert made.tokens(images).shape[1:] == (
            5,
            made.tower(made.tower.sentences(NAMES)).shape[-1],
        )
    tower = network(str(root / "clip"))  # its image tower
    assert (tower.trunk.dim, tower.tower) == (16, None)


def test_the_tag_of_a_clip_decides_its_activation_and_preparation(root, monkeypatch):
    """Its weights may be in a file, and images may be of another size."""
    cfg = {"embed_dim": 12, "vision_cfg": VISION, "text_cfg": TEXT}
    monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, "tiny-clip", cfg)
    tag = ACCESS | {"interpolation": "bilinear", "quick_gelu": True, "url": "https://a/b"}
    monkeypatch.setitem(open_clip.pretrained._PRETRAINED, "tiny-clip", {"mine": tag})
    file, images = root / "clip/open_clip_model.safetensors", torch.rand(2, 3, 16, 16)
    weights = load_file(file)
    for name, quick in (("tiny-clip", False), ("tiny-clip:mine", True)):
        made = network(f"{name}={file}", "clip")
        expected = open_clip.model.CLIP(12, VISION, TEXT, quick_gelu=quick).eval()
        expected.load_state_dict(weights)
        torch.testing.assert_close(made.tokens(images)[:, 0], expected.encode_image(images))
        assert (made.name, made.size) == (name, 16)
        assert made.interpolation == ("bilinear" if quick else "bicubic")
        normal = ACCESS if quick else {"mean": OPENAI_DATASET_MEAN, "std": OPENAI_DATASET_STD}
        assert {part: tuple(getattr(made, part)) for part in normal} == normal
        assert network(f"{name}={file}").trunk.dim == 16
    made = network(f"tiny-clip={file}", "clip", size=24)
    assert (made.size, made.tokens(torch.rand(1, 3, 24, 24)).shape) == (24, (1, 1 + 9, 12))


def test_models_have_their_own_preparation_and_are_frozen_in_float32():
    clip = samples.clip()
    made = network(fp.TextTower(clip, samples.tokenize), "clip")
    assert (made.model, made.size) == (clip, 32)
    given = open_clip.model.CLIP(12, VISION, TEXT).bfloat16()
    made = network(given, "clip")
    assert (made.name, made.model) == ("CLIP", given)
    assert {(each.dtype, each.requires_grad) for each in given.parameters()} == {
        (torch.float32, False)
    }
    expected = fp.TextTower(given, TOKENIZER)
    ours, theirs = (tower(tower.sentences(NAMES)) for tower in (made.tower, expected))
    assert torch.equal(ours, theirs)


def test_a_cached_name_is_loaded_without_a_connection(root, tmp_path, monkeypatch):
    repository = timm.get_pretrained_cfg(TINY).hf_hub_id.replace("/", "--")
    folder = tmp_path / f"models--{repository}"
    (folder / "snapshots/abc").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text("abc")
    (folder / "snapshots/abc/model.safetensors").symlink_to(root / f"{TINY}.safetensors")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(pretrained, "_is_reachable", None)
    assert network(TINY).identity == network(str(root / f"{TINY}.safetensors")).identity
    weights = folder / "snapshots/abc/model.safetensors"
    weights.unlink()
    weights.symlink_to(root / "cut.safetensors")
    with pytest.raises(ValueError, match=rf"vit_base_patch16_224; got {TINY} \(Error while"):
        network(TINY)  # a damaged file does not ask for a connection


@pytest.mark.parametrize(
    ("kind", "name", "file"),
    [
        ("vit", TINY, "model.safetensors"),
        ("clip", "ViT-B-16-quickgelu:openai", "open_clip_model.safetensors"),
        ("vit", "facebook/dinov2-small", "preprocessor_config.json, model.safetensors"),
        ("clip", "openai/clip-vit", "model.safetensors and the files of the tokenizer"),
        ("clip", "ViT-B-16-SigLIP:webli", "open_clip_model.safetensors"),
    ],
)
def test_without_a_connection_one_line_names_the_file_and_the_flag(
    kind, name, file, tmp_path, monkeypatch
):
    """The server takes the connection and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(pretrained, "PATIENCE", 0.2)
        network_of = re.escape(f"--{kind} {name}={'FOLDER' if '/' in name else 'FILE'}.")
        start = time.monotonic()
        with pytest.raises(
            ConnectionError, match=f"{address}/.* get .*{file} there.*{network_of}"
        ) as error:
            network(name, kind)
    assert time.monotonic() - start < 30  # imports of a busy machine
    assert "\n" not in str(error.value)


def test_any_answer_of_a_server_counts_but_no_server_does_not(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:  # its answer is an error
        Thread(target=server.handle_request, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        assert pretrained._is_reachable(address)
        with monkeypatch.context() as offline:
            offline.setattr(constants, "HF_HUB_OFFLINE", True)
            assert not pretrained._is_reachable(address)
    assert not pretrained._is_reachable(address)


def test_a_server_that_answers_is_asked_for_the_weights(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(pretrained, "_is_reachable", lambda address: asked.append(address) or True)

    def create_model(name, **options):
        if not constants.HF_HUB_OFFLINE:
            asked.append(name)
            raise OSError("401 Client Error.\nSecond line.\nThird line.")
        return make(name, **options)

    make = timm.create_model
    monkeypatch.setattr(pretrained, "_check_transformer", lambda *arguments: None)
    monkeypatch.setattr(timm, "create_model", create_model)
    message = re.escape(f"got {TINY} (401 Client Error. Second line).")
    with pytest.raises(ValueError, match=message):
        network(TINY)
    assert asked == [f"{constants.ENDPOINT}/{timm.get_pretrained_cfg(TINY).hf_hub_id}", TINY]
    assert constants.HF_HUB_OFFLINE is False


def test_what_is_missing_is_loaded_by_a_connection_and_logs_are_as_before(monkeypatch):
    tried, before = [], 7
    monkeypatch.setattr(logging.root.manager, "disable", before)
    made = pretrained.Network("name", torch.nn.Identity(), 8, (0.5,), (0.5,))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(pretrained, "_is_reachable", lambda address: True)

    def load():
        tried.append((constants.HF_HUB_OFFLINE, logging.root.manager.disable))
        if constants.HF_HUB_OFFLINE:
            try:
                raise LocalEntryNotFoundError("no file")
            except LocalEntryNotFoundError as error:
                raise OSError("no network") from error
        return made

    monkeypatch.setattr(pretrained, "_source", lambda *given: (load, "", ""))
    assert pretrained._by_name("--vit", "name", None) is made
    assert tried == [(True, logging.ERROR), (False, before)]
    assert logging.root.manager.disable == before


HUB = "https://hub"
SIGLIP = "open_clip_model.safetensors"


@pytest.mark.parametrize(
    ("flag", "name", "address", "file"),
    [
        ("--vit", TINY, f"{HUB}/timm/{TINY}.r160_in1k", "model.safetensors"),
        ("--vit", "vit_huge_patch14_gap_224.in1k_ijepa", "https://dl.", ".pth.tar"),
        ("--vit", "ViT-B-16:openai", f"{HUB}/timm/vit_base_patch16_clip_224.openai", SIGLIP),
        ("--clip", "ViTamin-S:datacomp1b", f"{HUB}/jienengchen/ViTamin-S", "pytorch_model.bin"),
        ("--clip", "ViT-B-32:there", "https://files/a/b.pt", "b.pt"),
    ],
)
def test_weights_have_an_address_and_a_file(flag, name, address, file, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", HUB)
    monkeypatch.setattr(pretrained, "_check_transformer", lambda *given: None)
    tags = open_clip.pretrained._PRETRAINED["ViT-B-32"] | {"there": {"url": "https://files/a/b.pt"}}
    monkeypatch.setitem(open_clip.pretrained._PRETRAINED, "ViT-B-32", tags)
    load, found, named = pretrained._source(flag, name, 7)
    assert load.args == (name, 7)
    assert found.startswith(address)
    assert named.endswith(file)
    assert named == file or found.endswith(f"/{named}")


class Layers(torch.nn.Module):
    """Parts of a vision transformer, of which only one block has weights."""

    def __init__(self):
        super().__init__()
        for name in ("head", "fc_norm", "norm"):
            setattr(self, name, torch.nn.Identity())
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(1, 1, bias=False)])


def test_a_file_may_have_a_head_and_norms_but_no_more_blocks_and_all_weights():
    """A block of another network would be left out, and its own weights would be random."""
    good, load = {"blocks.0.weight": torch.zeros(1, 1)}, torch.nn.Module.load_state_dict
    with pretrained._all_weights():
        for more in ("head.weight", "fc_norm.weight", "norm.weight", "other.weight"):
            found = Layers().load_state_dict({**good, more: torch.zeros(1)}, strict=False)
            assert found.unexpected_keys == [more]
        both = {"blocks.1.weight": torch.zeros(1), "blocks.2.weight": torch.zeros(1)}
        for wrong, said in ((good | both, "blocks.1.weight"), ({}, "no blocks.0.weight")):
            with pytest.raises(ValueError, match=f"it is of another network, which has {said}$"):
                Layers().load_state_dict(wrong, strict=False)
    assert torch.nn.Module.load_state_dict is load


REFUSED = {
    "vit_smal_patch16": "such as vit_base_patch16_224; got 'vit_smal_patch16' (similar: vit_",
    "ViT-B-16": "name weights of ViT-B-16 as NAME:TAG: openai, laion400m_e31",
    "resnet18": "name a vision transformer; got resnet18 (it is convolutional, without tokens",
    "ROOT/none.pth": "name a file that exists; got ROOT/none.pth",
    f"{TINY}=ROOT/none": "name a file that exists; got ROOT/none",
    "ROOT/text.pth": "name the network of a file, such as vit_base_patch16_224=FILE; got 'text'",
    f"{TINY}=ROOT/text.pth": f"weights of {TINY}; got ROOT/text.pth, damaged or of another",
    f"{TINY}=ROOT/cut.safetensors": "got ROOT/cut.safetensors, damaged or of another network",
    f"{TINY}=ROOT/deep.safetensors": "(it is of another network, which has blocks.6.",
    f"{TINY}=ROOT/test_resnet.safetensors": "(it is of another network, which has no cls_token)",
    f"vit_small_patch16_224=ROOT/{TINY}.safetensors": "size mismatch for cls_token",
    "test_resnet=ROOT/test_resnet.safetensors": "got test_resnet (it is convolutional",
    "ROOT/empty": "got ROOT/empty, damaged or of another network (Unrecognized model",
    "ROOT/unprepared": "(there is no preprocessor_config.json with `image_mean`).",
    f"{TINY}=ROOT/hub-vit": f"file of the weights of {TINY}; got ROOT/hub-vit, damaged or of",
    "vit_base_patch16_18x2_224": "'vit_base_patch16_18x2_224' (similar: vit_base_patch16_224.",
    "vit_smal_patch16=ROOT/text.pth": "=FILE; got 'vit_smal_patch16' (similar: vit_small_patch",
    **{f"none{end}": f"name a file that exists; got none{end}" for end in pretrained.WEIGHTS},
}
CLIPS = {
    "ROOT/bare": "file of the weights of ROOT/bare; got ROOT/bare, damaged or of another network (",
    "ViT-B-17": "such as ViT-B-16-quickgelu:openai; got 'ViT-B-17' (similar: ViT-B-16, ",
    "ViT-B-17=ROOT/text.pth": "such as ViT-B-16-quickgelu=FILE; got 'ViT-B-17' (similar: ViT-B-16",
    f"{TINY}=ROOT/{TINY}.safetensors": "name the network of a file, such as ViT-B-16-quickgelu=F",
    "ViT-B-16": "name weights of ViT-B-16 as NAME:TAG: openai, laion400m_e31",
}


@pytest.mark.parametrize(
    ("kind", "given"), [*(("vit", each) for each in REFUSED), *(("clip", each) for each in CLIPS)]
)
def test_a_wrong_name_or_file_is_one_sentence(kind, given, root):
    message = (REFUSED if kind == "vit" else CLIPS)[given].replace("ROOT", str(root))
    with pytest.raises(ValueError, match=f"^`--{kind}` must .*{re.escape(message)}") as error:
        network(given.replace("ROOT", str(root)), kind)
    assert "\n" not in str(error.value)


def clip(**changes):
    return open_clip.model.CLIP(12, VISION | changes, TEXT)


test_other_things_are_refused = refused(globals())("""
network(TINY, "bert") -> ValueError: `kind` must be "vit" or "clip"
network(torch.nn.Linear(2, 2)) -> TypeError: `--vit` must be a name or a model of timm
network(torch.nn.Embedding(3, 2), "clip") -> TypeError: `--clip` must be a name, a CLIP
network(fp.TextTower(CLIPModel(HUB_CLIP), TOKENIZER), "clip") -> TypeError: `--clip` must be a name,
network(clip(pool_type="none"), "clip") -> ValueError: `--clip` must name a CLIP with patches; got C
network(timm.create_model(TINY, in_chans=1)) -> ValueError: got VisionTransformer (`images` must h
network(TINY, size=0) -> ValueError: `size` must be at least 1; got 0.
""")
