"""Trunks of open_clip and transformers equal the models, with prompts and without."""

import open_clip
import pytest
import torch
import torch.nn as nn
import transformers
from open_clip.modified_resnet import ModifiedResNet
from open_clip.timm_model import TimmModel
from open_clip.transformer import VisionTransformer

from errors import raises
from fedprompt import PromptStream, encode_from, encode_front, encode_prompted, freeze, vit_trunk
from fedprompt.check import trunk as check_trunk
from models import WINDOWS, WRITE, assert_takes_no_images, installed
from references.hooks import hooked_blocks
from tolerance import assert_near
from towers import HEADLESS, TOWERS, build_tower, tower_images, tower_named


def draw(*shape, seed=2):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture(scope="module", params=(*TOWERS, HEADLESS), ids=lambda row: row.name)
def tower(request):
    model = build_tower(request.param)
    return request.param, model, vit_trunk(model), tower_images()


def test_without_prompts_a_tower_equals_its_model(tower):
    """The plain blocks of open_clip are written out, and round differently."""
    row, model, trunk, images = tower
    pooled, expected = encode_prompted(trunk, images).pooled, row.forward(model, images)
    assert expected.ndim == 2
    if isinstance(model, VisionTransformer):
        assert_near(pooled, expected)
    else:
        assert torch.equal(pooled, expected)


def test_a_tower_states_its_sizes(tower):
    row, model, trunk, images = tower
    tokens, _ = trunk.embed(images)
    grid = images.shape[2] // trunk.patch_size
    assert tokens.shape[1] - trunk.prefix == grid**2
    assert tokens.shape[2] == trunk.dim
    assert trunk.depth == len(row.blocks(model))
    assert trunk.num_features == row.forward(model, images).shape[1]


@pytest.mark.parametrize("replace", [True, False])
def test_prompts_change_the_output_as_in_the_towers_own_forward_pass(replace, tower):
    row, model, trunk, images = tower
    layers = dict(enumerate(draw(trunk.depth, 2, trunk.dim)))
    encoded = encode_prompted(trunk, images, PromptStream(layers, replace))
    pooled, prompts = hooked_blocks(
        lambda: row.forward(model, images),
        row.blocks(model),
        layers,
        prefix=trunk.prefix,
        replace=replace,
    )
    assert_near(encoded.pooled, pooled)
    assert_near(encoded.streams[0], row.norm(model)(prompts))
    plain = row.forward(model, images)
    assert (pooled - plain).abs().max() > 1e-3
    assert_near(encode_prompted(trunk, images).pooled, plain)  # the model is unchanged


def test_late_prompts_equal_the_pass_from_images_bitwise(tower):
    _, _, trunk, images = tower
    last = trunk.depth - 1
    early, late = (PromptStream({layer: draw(2, trunk.dim)}) for layer in (0, last))
    tokens = encode_front(trunk, images, early, start=last)
    size = tuple(images.shape[2:])
    resumed = encode_from(trunk, tokens, early, late, start=last, image_size=size)
    expected = encode_prompted(trunk, images, early, late)
    assert torch.equal(resumed.pooled, expected.pooled)


@pytest.mark.parametrize("name", ["ViT-B-16", "PE-Core-B-16", "ViTModel", "CLIPModel"])
def test_a_norm_of_a_late_block_is_trained_with_prompts(name):
    """Features from cached tokens are up to date only behind the trained part."""
    model = build_tower(tower_named(name))
    norms = [
        part for part in vit_trunk(model).blocks[-1].modules() if isinstance(part, nn.LayerNorm)
    ]
    trunk, images = vit_trunk(model, trainable=norms), tower_images()
    last = trunk.depth - 1
    gradients = []
    for cached in (False, True):
        if cached:
            tokens = encode_front(trunk, images, start=last).detach()
            encoded = encode_from(trunk, tokens, start=last)
        else:
            encoded = encode_prompted(trunk, images)
        loss = encoded.pooled.square().sum()
        gradients.append(torch.autograd.grad(loss, list(trunk.trainable.parameters())))
    assert len(gradients[0]) == 2 * len(norms)
    for own, other in zip(*gradients, strict=True):
        assert own.abs().sum() > 0
        assert_near(own, other)


def test_a_tower_takes_an_empty_batch(tower):
    _, _, trunk, images = tower
    assert_takes_no_images(trunk, images)


def test_a_tower_passes_every_line_of_the_check(tower):
    row, model, trunk, images = tower
    report = check_trunk(trunk, images, lambda images: row.forward(model, images))
    assert all(line.passed for line in report.lines), report


# --- Masks, sizes and gradient checkpointing

FEW = pytest.mark.parametrize("name", ["ViT-B-16", "PE-Core-B-16", "CLIPModel", "Dinov2Model"])


def random_mask(size):
    """Mask a quarter of the scores and shift the others; every token attends to itself."""
    mask = draw(size, size, seed=5)
    mask[draw(size, size, seed=6) > 0.67] = -torch.inf
    return mask.fill_diagonal_(0)


@pytest.mark.parametrize("name", ["ViT-B-16", "PE-Core-B-16"])
def test_a_mask_applies_to_the_tokens_of_an_open_clip_tower_and_not_to_prompts(name):
    row = tower_named(name)
    model, images = build_tower(row), tower_images()
    size = vit_trunk(model).embed(images)[0].shape[1]
    mask = random_mask(size)
    trunk = vit_trunk(model, attention_mask=mask)
    if name == "ViT-B-16":
        hidden = model.transformer(model._embeds(images), attn_mask=mask)
        expected = model._pool(hidden)[0] @ model.proj
    else:
        features = model.trunk.forward_features(images, attn_mask=mask)
        expected = model.head(model.trunk.forward_head(features))
    assert_near(encode_prompted(trunk, images).pooled, expected)
    assert check_trunk(trunk, images).passed
    assert (expected - model(images)).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["CLIPVisionModel", "Dinov2Model", "ViTModel"])
def test_a_mask_applies_to_the_tokens_of_a_transformers_model_and_not_to_prompts(name):
    row = tower_named(name)
    model, images = build_tower(row), tower_images()
    mask = random_mask(17)
    trunk = vit_trunk(model, attention_mask=mask)
    hooks = [
        block.register_forward_pre_hook(
            lambda block, args, given: ((args[0],), {"attention_mask": mask[None, None]}),
            with_kwargs=True,
        )
        for block in row.blocks(model)
    ]
    expected = row.forward(model, images)
    for hook in hooks:
        hook.remove()
    assert_near(encode_prompted(trunk, images).pooled, expected)
    assert check_trunk(trunk, images).passed
    assert (expected - row.forward(model, images)).abs().max() > 1e-3


def test_a_mask_is_refused_by_attention_functions_that_ignore_it():
    model = build_tower(tower_named("ViTModel"))
    model.config._attn_implementation = "flash_attention_2"
    with raises(ValueError, "`attention_mask` must be None, or the model's attention one of eager"):
        vit_trunk(model, attention_mask=torch.zeros(17, 17))


@pytest.mark.parametrize(
    "name",
    ["ViTModel", "Dinov2Model", "Dinov2WithRegistersModel", "CLIPVisionModel", "SiglipModel"],
)
def test_positions_of_transformers_are_interpolated_as_by_the_model(name):
    model, images = build_tower(tower_named(name)), draw(2, 3, 48, 40)
    trunk = vit_trunk(model)
    arguments = {} if name.startswith("Dino") else {"interpolate_pos_encoding": True}
    forward = model.get_image_features if name == "SiglipModel" else model
    output = forward(images, **arguments)
    expected = output.last_hidden_state[:, 0] if name == "ViTModel" else output.pooler_output
    assert torch.equal(encode_prompted(trunk, images).pooled, expected)


FIXED = "`images` must have the model's size (32, 32), because its positions are fixed; got (16, 16"
EVERY_LIBRARY = pytest.mark.parametrize("name", ["ViT-B-16", "EVA02-B-16", "ViTModel"])


@pytest.mark.bad_input
@EVERY_LIBRARY
@pytest.mark.parametrize(
    ("images", "error", "message"),
    [
        (torch.zeros(2, 32, 32, 3), ValueError, "`images` must have 3 channels in front of"),
        (torch.zeros(2, 1, 32, 32), ValueError, "`images` must have 3 channels; for gray"),
        (torch.zeros(2, 4, 32, 32), ValueError, "`images` must have 3 channels; got"),
        (torch.zeros(2, 3, 32, 33), ValueError, "`images` must have "),
        (torch.zeros(2, 3, 0, 32), ValueError, "`images` must have "),
        (torch.zeros(2, 3, 32, 32).to_sparse(), TypeError, "`images` must be a dense tensor;"),
    ],
)
def test_images_that_do_not_fit_are_refused_in_every_library(images, error, message, name):
    with raises(error, message):
        encode_prompted(vit_trunk(build_tower(tower_named(name))), images)


@pytest.mark.parametrize(
    ("name", "side", "message"),
    [
        ("ViT-B-16", 16, FIXED),
        ("EVA02-B-16", 16, FIXED),
        ("ViTModel", 33, "`images` must have a size that is a multiple of the patches' (8, 8);"),
        ("Dinov2Model", 7, "`images` must have a size that is a multiple of the patches'"),
    ],
)
def test_a_tower_names_the_sizes_that_it_takes(name, side, message):
    with raises(ValueError, message):
        encode_prompted(vit_trunk(build_tower(tower_named(name))), draw(2, 3, side, side))


def test_a_model_takes_its_own_size_where_that_is_no_multiple_of_its_patches():
    """As SigLIP SO400M with 384 pixels and patches of 14."""
    sizes = WIDTHS | {"intermediate_size": 8, "image_size": 19, "patch_size": 4}
    config = transformers.SiglipVisionConfig(**sizes)
    model = transformers.SiglipVisionModel(config).double().eval()
    images = draw(2, 3, 19, 19)
    pooled = encode_prompted(vit_trunk(model), images).pooled
    assert torch.equal(pooled, model(images).pooler_output)


@FEW
def test_checkpointing_runs_blocks_twice_with_the_same_gradients(name):
    row = tower_named(name)
    model, images = build_tower(row), tower_images()
    trunk = vit_trunk(model)
    tokens = draw(trunk.depth, 2, trunk.dim).requires_grad_()
    stream = PromptStream(dict(enumerate(tokens)), True)
    results, runs = [], []
    for block in row.blocks(model):
        # Plain blocks of open_clip are written out, so their own hooks are not called.
        part = block.ln_1 if isinstance(model, VisionTransformer) else block
        part.register_forward_pre_hook(lambda *_: runs.append(1))
    for passes in (1, 2):
        if passes == 2 and row.library == "transformers":
            model.activation_checkpointing_enable()
        elif passes == 2:
            model.set_grad_checkpointing(True)
        runs.clear()
        pooled = encode_prompted(trunk, images, stream).pooled
        results.append(torch.autograd.grad(pooled.square().sum(), tokens)[0])
        assert len(runs) == passes * trunk.depth
    assert torch.equal(*results)


# --- Refusals

SUPPORTED = "`model` must be a vision transformer of timm, open_clip, transformers or torchvision"
WIDTHS = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}


def tiny_clip():
    vision = {"layers": 1, "width": 8, "head_width": 4, "patch_size": 8, "image_size": 16}
    text = {"context_length": 8, "vocab_size": 16, "width": 8, "heads": 2, "layers": 1}
    return open_clip.model.CLIP(4, vision, text)


def image_classifier():
    config = transformers.Dinov2Config(**WIDTHS, image_size=16, patch_size=8)
    return transformers.Dinov2ForImageClassification(config)


def swin():
    config = transformers.SwinConfig(embed_dim=8, depths=[1], num_heads=[2], image_size=32)
    return transformers.SwinModel(config)


def siglip2():
    sizes = {**WIDTHS, "intermediate_size": 8, "num_patches": 4}
    return transformers.Siglip2VisionModel(transformers.Siglip2VisionConfig(**sizes))


def altered(tower):
    class Altered(type(tower)):
        def forward(self, images):
            return super().forward(images.flip(1))

    tower.__class__ = Altered
    return tower


def two_attention_pools():
    sizes = {"image_size": 16, "patch_size": 8, "width": 8, "layers": 1, "heads": 2, "mlp_ratio": 2}
    pools = {"attentional_pool": "parallel", "attn_pooler_heads": 2, "output_dim": 8}
    return VisionTransformer(**sizes, **pools)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (tiny_clip, "it contains one; pass model.visual"),
        (image_classifier, "it contains one; pass model.dinov2"),
        (swin, f"{WINDOWS}; use freeze\\(model\\) and PadPrompts"),
        (siglip2, f"its packed sequences .*; .*'{WRITE}'"),
        (lambda: altered(tiny_clip().visual), f"its forward pass is not known here; .*'{WRITE}'"),
        (lambda: altered(build_tower(tower_named("ViTModel"))), "its forward pass is not known"),
        (two_attention_pools, "its forward pass is not known here"),
        (lambda: ModifiedResNet((1, 1, 1, 1), 8, 8, width=8), "it is convolutional.*PadPrompts"),
        (lambda: TimmModel("test_convnext", 4, 160), "it is convolutional.*PadPrompts"),
        *(
            (lambda: TimmModel("test_vit_relpos", 4, 160), f"its table of .*; .*'{WRITE}'")
            for _ in range(installed("test_vit_relpos"))
        ),
    ],
)
def test_other_models_of_both_libraries_are_refused_with_the_remedy(make, reason):
    model = make()
    before = [(weight.requires_grad, model.training) for weight in model.parameters()]
    with pytest.raises(TypeError, match=rf"^{SUPPORTED} \({reason}.*\); got \w+\.$"):
        vit_trunk(model)
    assert before == [(weight.requires_grad, model.training) for weight in model.parameters()]


@FEW
def test_a_tower_with_adapters_is_refused(name):
    model = freeze(build_tower(tower_named(name)))
    model.lora_extra = nn.Parameter(torch.zeros(2))
    with raises(ValueError, "`model` must have no adapters and train all parameters or none"):
        vit_trunk(model)
