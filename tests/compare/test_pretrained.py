"""Networks by name, from files and folders, and without a connection."""

import json
import re
import socket
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import open_clip
import pytest
import timm
import torch
from huggingface_hub import constants
from safetensors.torch import save_file
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
    config = CLIPConfig(
        text_config={
            "max_position_embeddings": 24,
            **SMALL,
            "vocab_size": 49408,
            "bos_token_id": 49406,
            "eos_token_id": 49407,
        },
        vision_config=SMALL,
        projection_dim=6,
    )
    special = {"<start_of_text>": "<|startoftext|>", "<end_of_text>": "<|endoftext|>"}
    ids = {special.get(token, token): index for token, index in TOKENIZER.encoder.items()}
    for name, model in {
        "hub-vit": ViTModel(ViTConfig(**SMALL)),
        "hub-clip": CLIPModel(config),
    }.items():
        model.save_pretrained(root / name)
        (root / name / "preprocessor_config.json").write_text(processor)
    CLIPTokenizer(vocab=ids, merges=list(TOKENIZER.bpe_ranks)).save_pretrained(root / "hub-clip")
    cfg = {"model_cfg": {"embed_dim": 12, "vision_cfg": VISION, "text_cfg": TEXT}}
    (root / "clip").mkdir()
    (root / "clip/open_clip_config.json").write_text(json.dumps(cfg | {"preprocess_cfg": ACCESS}))
    save(open_clip.model.CLIP(12, VISION, TEXT), root / "clip/open_clip_model.safetensors")
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


@pytest.mark.parametrize("name", ["hub-vit", "facebook/vit=hub-vit"])
def test_a_folder_of_transformers_is_a_trunk(root, name):
    made = network(name.replace("hub-vit", str(root / "hub-vit")))
    assert (made.size, *map(tuple, (made.mean, made.std))) == (16, *ACCESS.values())
    assert (made.interpolation, made.trunk.dim) == ("bilinear", 8)


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
    assert network(str(root / "clip")).trunk.dim == 16  # its image tower


def test_models_have_their_own_preparation():
    clip = samples.clip()
    made = network(fp.TextTower(clip, samples.tokenize), "clip")
    assert (made.model, made.size) == (clip, 32)


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


@pytest.mark.parametrize(
    ("kind", "name", "file"),
    [
        ("vit", TINY, "model.safetensors"),
        ("clip", "ViT-B-16-quickgelu:openai", "open_clip_model.safetensors"),
        ("vit", "facebook/dinov2-small", "preprocessor_config.json"),
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
        network_of = re.escape(f"--{kind} {name}=")
        start = time.monotonic()
        with pytest.raises(
            ConnectionError, match=f"{address}/.* get .*{file}.*{network_of}"
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
}


@pytest.mark.parametrize("given", REFUSED)
def test_a_wrong_name_or_file_is_one_sentence(given, root):
    message = re.escape(REFUSED[given].replace("ROOT", str(root)))
    with pytest.raises(ValueError, match=f"^`--vit` must .*{message}") as error:
        network(given.replace("ROOT", str(root)))
    assert "\n" not in str(error.value)


test_other_things_are_refused = refused(globals())("""
network(TINY, "bert") -> ValueError: `kind` must be "vit" or "clip"
network(torch.nn.Linear(2, 2)) -> TypeError: `--vit` must be a name or a model of timm
network(torch.nn.Embedding(3, 2), "clip") -> TypeError: `--clip` must be a name, a CLIP
""")
