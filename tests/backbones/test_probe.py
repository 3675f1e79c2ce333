"""Probe of trunks and text towers: the user's model, and not its class, decides."""

import warnings
from functools import partial

import pytest
import torch
import torch.nn as nn
from open_clip.model import convert_weights_to_lp
from timm.layers import PatchEmbed
from timm.utils import ModelEmaV3
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.swa_utils import AveragedModel

import fedprompt as fp
from clips import NAMES, TOKENIZER, make_clip
from errors import raises
from models import build, draw_images, row_named, tiny_vit
from towers import build_tower, tower_images, tower_named

FAMILIES = ("ViT-B-16", "EVA02-B-16", "ViTModel", "DINOv3ViTModel", "CLIPModel", "SiglipModel")


def int8(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(model.float(), {nn.Linear}, torch.qint8)


def sine(*given):
    return given[-1].sin()


def replace_forward(block):
    block.forward = partial(lambda forward, *a, **k: forward(*a, **k).sin(), block.forward)


def derive(block):
    """Give a block a class of its own."""
    base = type(block)
    forward = lambda self, *given, **named: base.forward(self, *given, **named).sin()  # noqa: E731
    block.__class__ = type("Sine", (base,), {"forward": forward})


CHANGES = {
    "hook": lambda block: block.register_forward_hook(sine),
    "hook before": lambda block: block.register_forward_pre_hook(
        lambda _, given: (given[0].sin(), *given[1:])
    ),
    "hook of all": lambda block: register_module_forward_hook(
        lambda module, _, output: output.sin() if module is block else None
    ),
    "hook inside": lambda block: next(
        part for part in block.modules() if isinstance(part, nn.LayerNorm)
    ).register_forward_hook(sine),
    "method": replace_forward,
    "class": derive,
}


# All changes of blocks that are written out and of blocks that are called, and one of each family.
CHANGED = [(name, change) for name in FAMILIES[:2] for change in CHANGES]
CHANGED += [(name, change) for name in FAMILIES[2:] for change in ("hook", "hook inside")]


@pytest.mark.parametrize(("name", "change"), CHANGED)
def test_hooks_and_methods_of_blocks_are_respected_also_later(name, change):
    row, images = tower_named(name), tower_images()
    model = build_tower(row)
    trunk = fp.vit_trunk(model)
    before = fp.encode_prompted(trunk, images).pooled
    hook = CHANGES[change](row.blocks(model)[-1])
    try:
        expected = row.forward(model, images)
        for changed in (trunk, fp.vit_trunk(model)):
            torch.testing.assert_close(fp.encode_prompted(changed, images).pooled, expected)
        assert (before - expected).abs().max() > 1e-3
    finally:
        if hook is not None:
            hook.remove()


@pytest.mark.parametrize("change", ["hook", "hook of all", "method"])
def test_hooks_and_methods_of_text_blocks_are_respected(change):
    model = make_clip()
    tower = fp.TextTower(model, TOKENIZER)
    hook = CHANGES[change](model.transformer.resblocks[0])
    try:
        expected = model.encode_text(TOKENIZER(list(NAMES)))
        torch.testing.assert_close(tower(tower.sentences(NAMES))[0], expected)
    finally:
        if hook is not None:
            hook.remove()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_clip_in_its_own_half_precision_is_right(dtype):
    """Products are in half precision, and norms and the class token in float32."""
    model, images = make_clip().float(), torch.rand(2, 3, 16, 16)
    convert_weights_to_lp(model, dtype)
    trunk = fp.vit_trunk(model.visual)
    prompts = fp.DeepPrompts(2, trunk)
    plain = fp.encode_prompted(trunk, images).pooled
    torch.testing.assert_close(
        plain, model.encode_image(images.to(dtype)).float(), rtol=0, atol=0.05
    )
    tokens = fp.encode_front(trunk, images, start=1)
    assert torch.equal(fp.encode_from(trunk, tokens, start=1).pooled, plain)
    fp.encode_prompted(trunk, images, prompts()).pooled.square().sum().backward()
    assert bool((prompts.tokens.grad != 0).any(-1).all())


def changed(part, method, function):
    setattr(part, method, function)
    return part


def infinite(model):
    model.norm.weight.data[0] = torch.inf
    return model


@torch.inference_mode()
def inferred():
    return tiny_vit()


def rounding(model):
    """Let a block move its output without a gradient that is not zero."""
    block = model.blocks[1]
    forward = block.forward
    block.forward = lambda *given, **named: (64 * forward(*given, **named)).round()
    return model


def unread():
    model = tiny_vit()
    model.extra = nn.Linear(2, 2)
    return fp.vit_trunk(model, trainable=[model.extra])


def later():
    model = tiny_vit()
    trunk = fp.vit_trunk(model)
    forward = model.forward_features
    model.forward_features = lambda images, **k: forward(images, **k).sin()
    return fp.encode_prompted(trunk, torch.zeros(1, 3, 16, 16))


def unpooled():
    """A model whose classifier, and with it the pooling, is dropped after the trunk was made."""
    model = tiny_vit(num_classes=5)
    trunk = fp.vit_trunk(model)
    model.reset_classifier(0, "")
    return fp.encode_prompted(trunk, torch.zeros(1, 3, 16, 16).double())


def worded(model):
    return fp.TextTower(model, TOKENIZER)


REFUSED = {
    "`model` must have a backward pass in each layer; load it": lambda: fp.vit_trunk(
        int8(tiny_vit())
    ),
    "got none in transformer.resblocks.0.mlp.c_fc": lambda: fp.vit_trunk(int8(make_clip().visual)),
    "`clip_model` must run in eval mode": lambda: worded(int8(make_clip())),
    "got extra.weight, extra.bias": unread,
    "got no gradient of prompts at layer 0": lambda: fp.vit_trunk(rounding(tiny_vit())),
    "`model` must return finite features": lambda: fp.vit_trunk(infinite(tiny_vit())),
    "got RuntimeError: Inference tensors cannot be saved": lambda: fp.vit_trunk(inferred()),
    "from VisionTransformer.forward_features": later,
    "must return one vector of features for an image; timm": lambda: fp.vit_trunk(
        tiny_vit(global_pool=""), probe=False
    ),
    "`trunk` must pool one vector of features for an image; got features of shape": unpooled,
    "`model` must return one tensor of features": lambda: fp.vit_trunk(
        changed(tiny_vit(), "forward", lambda images: {"features": images})
    ),
    "must return features of shape (1, 12)": lambda: fp.vit_trunk(
        changed(tiny_vit(), "forward", lambda images: images)
    ),
    "methods from CLIP.encode_text": lambda: worded(
        changed(
            model := make_clip(),
            "encode_text",
            lambda ids: type(model).encode_text(model, ids).sin(),
        )
    ),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("message", REFUSED)
def test_a_model_that_cannot_be_right_is_refused(message):
    with raises(ValueError, message):
        REFUSED[message]()


def test_a_block_without_attention_reads_no_prompts_which_is_no_fault():
    model, images = tiny_vit(), torch.rand(2, 3, 16, 16).double()
    model.blocks[1].forward = lambda tokens, **_: tokens
    assert torch.equal(fp.encode_prompted(fp.vit_trunk(model), images).pooled, model(images))


@pytest.mark.parametrize("scale", [10, 100])
def test_a_softmax_that_saturates_is_no_missing_backward_pass(scale):
    torch.manual_seed(0)  # with some prompts, nothing saturates
    model = tiny_vit()
    for parameter in model.blocks.parameters():
        parameter.data *= scale
    trunk = fp.vit_trunk(model)
    prompts = torch.randn(3, 1, 12).requires_grad_()
    stream = fp.PromptStream(dict(enumerate(prompts)), True)
    fp.encode_prompted(trunk, torch.rand(1, 3, 16, 16).double(), stream).pooled.sum().backward()
    assert scale == 10 or not prompts.grad.any(-1).all()


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_small_patch16_dinov3"])
def test_blocks_get_a_few_patches_of_a_large_image(name):
    row = row_named(name)
    model = build(row._replace(overrides={**row.overrides, "img_size": 112}))
    trunk, lengths = fp.vit_trunk(model, probe=False), []
    for block in model.blocks:
        block.register_forward_hook(lambda _, given, output: lengths.append(output.shape[1]))
    assert fp.vit_trunk(model).probe.seen is not None
    assert max(lengths) == trunk.prefix + 16 < trunk.embed(draw_images(model))[0].shape[1]


@pytest.mark.parametrize(
    ("dtype", "right", "wrong"),
    [(torch.float64, 1 + 1e-4, 1 + 1e-3), (torch.float32, 1 + 1e-4, 1.01), (torch.half, 1.01, 1.2)],
)
def test_features_may_differ_by_the_rounding_of_their_dtype(dtype, right, wrong):
    for factor in (right, wrong):
        model = tiny_vit().to(dtype)
        model.forward = partial(
            lambda forward, factor, x: factor * forward(x), model.forward, factor
        )
        if factor == right:
            fp.vit_trunk(model)
    with raises(ValueError, "`model` must compute part by part what it computes as a whole"):
        fp.vit_trunk(model)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_features_may_differ_by_the_rounding_of_fast_products(monkeypatch):
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    model = tiny_vit().float()
    model.forward = partial(lambda forward, images: 1.01 * forward(images), model.forward)
    assert fp.vit_trunk(model).probe.seen


def test_without_the_probe_int8_models_have_fingerprints_and_a_check_that_fails():
    model = int8(tiny_vit())
    trunk = fp.vit_trunk(model, probe=False)
    assert "int8" in fp.fingerprint(trunk)["dtype"]
    before = fp.fingerprint(trunk)["weights"]
    assert before != fp.fingerprint(fp.vit_trunk(int8(tiny_vit(qkv_bias=False)), probe=False))
    with raises(ValueError, "`trunk` must pass gradients to each prompt"):
        fp.check.trunk(trunk, torch.rand(2, 3, 16, 16))


class Counting(nn.Identity):
    """A layer with counters as buffers, which it writes or replaces, and with random numbers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("total", torch.zeros(()))
        self.register_buffer("none", None)

    def forward(self, tokens):
        self.count += 1
        self.total = self.total + 1
        torch.rand(1)
        return tokens


@pytest.mark.parametrize("without_gradients", [torch.no_grad, torch.inference_mode])
def test_a_probe_leaves_no_trace(without_gradients):
    model = tiny_vit()
    model.patch_drop = Counting()
    stream = torch.get_rng_state()
    with without_gradients():  # it has gradients nevertheless
        trunk = fp.vit_trunk(model, trainable=[model.norm])
    assert torch.equal(torch.get_rng_state(), stream)
    assert model.patch_drop.count == model.patch_drop.total == 0
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(part._forward_hooks for part in model.modules())
    assert trunk.model is model
    model.train()
    model.forward_features = lambda images: images
    with raises(ValueError, "`model` must"):
        fp.vit_trunk(model, trainable=[model.norm])
    assert model.training


def test_models_without_weights_are_probed_at_their_first_use():
    with torch.device("meta"):
        trunk = fp.vit_trunk(tiny_vit().to("meta"))
    assert (trunk.num_features, trunk.probe.seen) == (12, None)
    trunk.model.to_empty(device="cpu").load_state_dict(tiny_vit().state_dict())
    images = torch.rand(2, 3, 16, 16).double()
    expected = fp.encode_prompted(fp.vit_trunk(tiny_vit()), images).pooled
    assert torch.equal(fp.encode_prompted(trunk, images).pooled, expected)
    assert trunk.probe.seen is not None


class Overlapping(PatchEmbed):
    """Patches of four pixels at every other pixel."""

    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self.proj.stride, self.grid_size, self.num_patches = (2, 2), (7, 7), 49


def test_sizes_are_those_of_the_model_at_hand():
    model = tiny_vit()
    trunk = fp.vit_trunk(model)
    model.set_input_size(patch_size=4)
    assert trunk.patch_size == 4
    model = tiny_vit(patch_size=4, embed_layer=Overlapping, dynamic_img_size=True)
    trunk, images = fp.vit_trunk(model), torch.rand(2, 3, 16, 16).double()
    tokens = fp.encode_front(trunk, images, start=1)
    late = fp.encode_from(trunk, tokens, start=1, image_size=16).pooled
    assert torch.equal(late, model(images))


def test_a_trunk_with_lora_passes_its_check():
    model, parameters = fp.tuning.lora(tiny_vit(), rank=2)
    trunk = fp.vit_trunk(model, trainable=parameters)
    fp.check.trunk(trunk, torch.rand(2, 3, 16, 16).double())


def test_names_of_averaged_copies_are_those_of_the_module():
    for wrapper in (AveragedModel, ModelEmaV3):
        assert list(fp.snapshot(wrapper(nn.Linear(2, 2)))) == ["weight", "bias"]


def test_a_processor_has_a_tokenizer():
    from transformers import CLIPProcessor, CLIPTokenizer

    special = {"<start_of_text>": "<|startoftext|>", "<end_of_text>": "<|endoftext|>"}
    ids = {special.get(token, token): index for token, index in TOKENIZER.encoder.items()}
    own = CLIPTokenizer(vocab=ids, merges=list(TOKENIZER.bpe_ranks), padding_side="left")
    processor = CLIPProcessor.__new__(CLIPProcessor)
    processor.tokenizer = own
    expected = fp.TextTower(make_clip(), TOKENIZER).class_names(NAMES)
    found = fp.TextTower(make_clip(), processor).class_names(NAMES)
    assert torch.equal(found.start, expected.start)
    for one, other, length in zip(found.tokens, expected.tokens, expected.length, strict=True):
        assert torch.equal(one[:length], other[:length])
