"""Trunks of all libraries equal the models, with prompts and without, and under transforms."""

import copy
import re
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn as nn
import transformers
from open_clip.transformer import VisionTransformer
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torchvision.models import VisionTransformer as TorchVit

import fedprompt as fp
import models
import two_processes
from errors import raises
from models import (
    ACCEPTED,
    ALL_ACCEPTED,
    ALL_REFUSED,
    REFUSED,
    Client,
    Row,
    assert_takes_no_images,
    build,
    draw_images,
    installed,
    plain,
    row_named,
    tiny_vit,
)
from references.hooks import hooked_blocks
from references.vpt import prompted_vit
from tolerance import assert_near
from towers import HEADLESS, OPEN_CLIP, TOWERS, TRANSFORMERS, build_tower, tower_images, tower_named

NAMES = (
    "vit_small_patch14_reg4_dinov2",
    "vit_small_patch16_dinov3",
    "vit_small_patch16_rope_mixed_224",
)
FAMILIES = pytest.mark.parametrize("name", [name for name in NAMES if installed(name)])
SUPPORTED = "`model` must be a vision transformer of timm, open_clip, transformers or torchvision"


def draw(*shape, seed=2):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Case(NamedTuple):
    """A model, its own forward pass, its blocks and last norm, images, and its trunk."""

    model: nn.Module
    forward: Any
    blocks: Any
    norm: nn.Module
    images: torch.Tensor
    trunk: fp.interfaces.Trunk

    def hooked(self, layers, *, replace=False, forward=None):
        """Run the model's own forward pass, with prompts inserted by hooks."""
        run = partial(forward or self.forward, self.images)
        prefix = self.trunk.prefix
        return hooked_blocks(run, self.blocks, layers, prefix=prefix, replace=replace)

    def layers(self):
        return dict(enumerate(draw(self.trunk.depth, 2, self.trunk.dim)))


def case_of(row, **options):
    if isinstance(row, Row):
        model = build(row)
        norm = model.norm if isinstance(model.fc_norm, nn.Identity) else model.fc_norm
        parts = partial(plain, model), model.blocks, norm, draw_images(model)
    else:
        model = build_tower(row)
        parts = partial(row.forward, model), row.blocks(model), row.norm(model), tower_images()
    return Case(model, *parts, fp.vit_trunk(model, **options))


# --- Every model of the tables


ROWS = [*ACCEPTED, *TOWERS, HEADLESS]
# Other sizes or weights of a row that has the same parts: these need no further test.
ALIKE = """
    vit_base_patch16_224_miil vit_small_patch16_18x2_224 vit_so150m_patch16_reg4_gap_256
    vit_so150m2_patch16_reg1_gap_256 vit_base_patch16_xp_224 flexivit_small vit_small_patch14_dinov2
    vit_base_patch14_reg1_tipsv2 vit_base_patch16_siglip_gap_224 vit_base_patch32_clip_quickgelu_224
    vit_intern300m_patch14_448 eva_large_patch14_196 test_vit test_vit3 eva_giant_patch14_clip_224
    vit_tiny_patch16_dinov3_qkvb vit_pe_spatial_tiny_patch16_512 vit_small_patch16_rope_ape_224
    vit_small_patch16_rope_mixed_ape_224 ViT-B-16-SigLIP2 MobileCLIP2-L-14
"""
made = cache(lambda place: case_of(ROWS[place]))


@pytest.fixture(params=range(len(ROWS)), ids=lambda place: ROWS[place].name)
def case(request):
    return made(request.param)


unlike = pytest.mark.parametrize(
    "case",
    [place for place, row in enumerate(ROWS) if row.name not in ALIKE.split()],
    indirect=True,
    ids=lambda place: ROWS[place].name,
)


def test_without_prompts_a_trunk_is_bitwise_identical_to_its_model(case):
    """The plain blocks of open_clip are written out, and round differently."""
    pooled, expected = fp.encode_prompted(case.trunk, case.images).pooled, case.forward(case.images)
    assert_near(pooled, expected)
    assert torch.equal(pooled, expected) or isinstance(case.model, VisionTransformer)


def test_prompts_change_the_output_as_in_the_models_own_forward_pass(case):
    """Prompts are kept, so that their number grows from block to block."""
    layers, before = case.layers(), case.forward(case.images)
    encoded = fp.encode_prompted(case.trunk, case.images, fp.PromptStream(layers))
    pooled, prompts = case.hooked(layers)
    assert_near(encoded.pooled, pooled)
    assert_near(encoded.streams[0], case.norm(prompts))
    assert (encoded.pooled - before).abs().max() > 1e-3
    assert torch.equal(case.forward(case.images), before)  # the model is unchanged


@unlike
def test_a_trunk_passes_its_check(case):
    fp.check.trunk(case.trunk, case.images, case.forward)


@unlike
def test_late_prompts_equal_the_pass_from_images_bitwise(case):
    trunk, images, last = case.trunk, case.images, case.trunk.depth - 1
    early, late = (fp.PromptStream({layer: draw(2, trunk.dim)}) for layer in (0, last))
    tokens = fp.encode_front(trunk, images, early, start=last)
    size = tuple(images.shape[2:])
    resumed = fp.encode_from(trunk, tokens, early, late, start=last, image_size=size)
    expected = fp.encode_prompted(trunk, images, early, late)
    assert torch.equal(resumed.pooled, expected.pooled)
    assert all(map(torch.equal, resumed.streams, expected.streams))


@unlike
def test_a_trunk_takes_an_empty_batch(case):
    assert_takes_no_images(case.trunk, case.images)


def test_documented_models_are_those_tested():
    # If this fails, run docs/make_model_table.py.
    text = (Path(__file__).parents[2] / "docs" / "reference" / "models.md").read_text()
    rows = (*ALL_ACCEPTED, *OPEN_CLIP, *TRANSFORMERS, *ALL_REFUSED)
    assert re.findall(r"^\| `([\w-]+)`", text, re.MULTILINE) == [row.name for row in rows]


def test_a_trunk_of_torchvision_has_the_features_of_the_model():
    torch.manual_seed(0)
    model = TorchVit(32, 8, num_layers=3, num_heads=2, hidden_dim=16, mlp_dim=32)
    trunk, images = fp.vit_trunk(model), tower_images().float()
    assert torch.equal(model.heads(fp.encode_prompted(trunk, images).pooled), model(images))
    fp.check.trunk(trunk, images)


# --- Refusals and frozen models


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.name)
def test_other_architectures_are_refused_with_the_reason(row):
    with pytest.raises(
        TypeError, match=rf"^{SUPPORTED} \(.*{row.refusal}.*\); got \w+\.$"
    ) as error:
        fp.vit_trunk(build(row))
    # Models that no trunk can support are sent to PadPrompts, the others to a trunk.
    padded = row.refusal in ("PadPrompts", models.WINDOWS)
    assert ("PadPrompts" in str(error.value)) == padded
    assert (models.WRITE in str(error.value)) != padded


def test_a_model_of_get_peft_model_is_refused_with_the_call_that_works():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny_vit(), LoraConfig(target_modules=["qkv"]))
    with pytest.raises(TypeError, match=r"pass model\.get_base_model\(\) and .* as `trainable="):
        fp.vit_trunk(model)
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    trunk = fp.vit_trunk(model.get_base_model(), trainable=adapters)
    assert len(list(trunk.trainable.parameters())) == len(adapters) > 0


def with_lora():
    from peft import LoraConfig, inject_adapter_in_model

    return inject_adapter_in_model(LoraConfig(target_modules=["qkv"]), tiny_vit())


def with_adapter():
    """Add an adapter by hand to a model with gradients."""
    model = tiny_vit()
    model.blocks[1].mlp.adapter_down = nn.Linear(12, 2)
    return model


def half_locked():
    model = fp.freeze(tiny_vit())
    model.blocks[2].requires_grad_(True)
    return model


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (with_lora, r"blocks\.0\.attn\.qkv\.lora_A\.default\.weight, .* and 3 more"),
        (with_adapter, r"blocks\.1\.mlp\.adapter_down\.weight, blocks\.1\.mlp\.adapter_down\.bias"),
        (half_locked, r"blocks\.2\.norm1\.weight, .* more"),
    ],
)
def test_a_model_with_adapters_is_refused_and_not_changed(make, names):
    model = make()
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    rule = rf"`model` must have no adapters.*; got a model that trains {names}\."
    with pytest.raises(ValueError, match=rule):
        fp.vit_trunk(model)
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == before
    trunk = fp.vit_trunk(fp.freeze(model))  # an explicit freeze is accepted
    assert fp.encode_prompted(trunk, draw_images(model)).pooled.shape == (2, 12)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "eva02_tiny_patch14_224"])
def test_a_trunk_that_was_unfrozen_or_put_into_training_is_refused(name):
    model = build(row_named(name)).train()
    trunk, images = fp.vit_trunk(model), draw_images(model)
    fp.encode_prompted(trunk, images)
    model.blocks[1].norm1.weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"`trunk` must stay frozen.*; got a model with param"):
        fp.encode_prompted(trunk, images)
    fp.freeze(model).blocks[1].train()
    with pytest.raises(ValueError, match=r"`trunk` must stay in eval mode.*; got a model in train"):
        fp.encode_prompted(trunk, images)
    fp.freeze(model)
    fp.encode_prompted(trunk, images)


@pytest.mark.parametrize("name", ["ViT-B-16", "PE-Core-B-16", "ViTModel", "CLIPModel"])
def test_a_norm_of_a_late_block_is_trained_with_prompts(name):
    """Features from cached tokens are up to date only behind the trained part."""
    model = build_tower(tower_named(name))
    norms = [
        part for part in fp.vit_trunk(model).blocks[-1].modules() if isinstance(part, nn.LayerNorm)
    ]
    trunk, images = fp.vit_trunk(model, trainable=norms), tower_images()
    last, gradients = trunk.depth - 1, []
    tokens = fp.encode_front(trunk, images, start=last).detach()
    for encoded in (fp.encode_prompted(trunk, images), fp.encode_from(trunk, tokens, start=last)):
        loss = encoded.pooled.square().sum()
        gradients.append(torch.autograd.grad(loss, list(trunk.trainable.parameters())))
    assert len(gradients[0]) == 2 * len(norms)
    for own, other in zip(*gradients, strict=True):
        assert own.abs().sum() > 0
        assert_near(own, other)


# --- Image sizes


@pytest.mark.parametrize("name", ["vit_small_patch16_224", "vit_small_patch16_dinov3"])
@pytest.mark.parametrize("size", [(48, 80), (96, 32)])
def test_dynamic_image_sizes(name, size):
    case = case_of(row_named(name))._replace(images=draw(2, 3, *size))
    layers = case.layers()
    found = fp.encode_prompted(case.trunk, case.images).pooled
    assert torch.equal(found, case.forward(case.images))
    found = fp.encode_prompted(case.trunk, case.images, fp.PromptStream(layers, True)).pooled
    assert_near(found, case.hooked(layers, replace=True)[0])


def test_images_are_padded_to_whole_patches_by_a_model_that_pads():
    model = tiny_vit(dynamic_img_size=True, dynamic_img_pad=True)
    trunk, images = fp.vit_trunk(model), draw(2, 3, 15, 21)
    tokens = fp.encode_front(trunk, images, start=1)
    late = fp.encode_from(trunk, tokens, start=1, image_size=(15, 21)).pooled
    assert torch.equal(late, model(images))


@pytest.mark.parametrize(
    "make",
    [
        lambda: build(row_named("vit_small_patch16_dinov3")),
        lambda: build_tower(tower_named("DINOv3ViTModel")),
    ],
    ids=["timm", "transformers"],
)
def test_rotary_positions_of_dynamic_images_need_their_size(make):
    trunk = fp.vit_trunk(make())
    side = 64 // trunk.patch_size
    count = trunk.prefix + side**2
    late = partial(
        fp.encode_from, trunk, fp.encode_front(trunk, draw(2, 3, 48, 80), start=1), start=1
    )
    with raises(ValueError, "`image_size` must be given, because positions depend on height and"):
        late()
    with raises(ValueError, f"must have {count} tokens without prompts, for {side} x {side} patch"):
        late(image_size=64)
    difference = late(image_size=(80, 48)).pooled - late(image_size=(48, 80)).pooled
    assert difference.abs().max() > 1e-6  # so the size cannot be guessed from the tokens


def test_a_model_of_fixed_size_refuses_the_size_of_other_images():
    trunk = fp.vit_trunk(build(row_named("eva02_tiny_patch14_224")))
    tokens = fp.encode_front(trunk, draw(2, 3, 56, 56), start=1)
    with raises(ValueError, "`tokens` must have 26 tokens without prompts, for 5 x 5 patches; got"):
        fp.encode_from(trunk, tokens, start=1, image_size=70)


@pytest.mark.parametrize(
    "name",
    ["ViTModel", "Dinov2Model", "Dinov2WithRegistersModel", "CLIPVisionModel", "SiglipModel"],
)
def test_positions_of_transformers_are_interpolated_as_by_the_model(name):
    model, images = build_tower(tower_named(name)), draw(2, 3, 48, 40)
    trunk = fp.vit_trunk(model)
    arguments = {} if name.startswith("Dino") else {"interpolate_pos_encoding": True}
    forward = model.get_image_features if name == "SiglipModel" else model
    output = forward(images, **arguments)
    expected = output.last_hidden_state[:, 0] if name == "ViTModel" else output.pooler_output
    assert torch.equal(fp.encode_prompted(trunk, images).pooled, expected)


def test_a_model_takes_its_own_size_where_that_is_no_multiple_of_its_patches():
    """As SigLIP SO400M with 384 pixels and patches of 14."""
    widths = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes = {"intermediate_size": 8, "image_size": 19, "patch_size": 4}
    config = transformers.SiglipVisionConfig(**widths, **sizes)
    model, images = transformers.SiglipVisionModel(config).double().eval(), draw(2, 3, 19, 19)
    pooled = fp.encode_prompted(fp.vit_trunk(model), images).pooled
    assert torch.equal(pooled, model(images).pooler_output)


# --- Attention masks


def random_mask(size):
    """Mask a quarter of the scores and shift the others; every token attends to itself."""
    mask = draw(size, size, seed=5)
    mask[draw(size, size, seed=6) > 0.67] = -torch.inf
    return mask.fill_diagonal_(0)


def test_a_mask_applies_to_the_tokens_of_the_model_and_not_to_prompts():
    model, mask = tiny_vit(), random_mask(6)
    trunk, images = fp.vit_trunk(model, attention_mask=mask), draw(2, 3, 16, 16)
    streams = [
        fp.PromptStream({0: draw(2, 12), 2: draw(1, 12, seed=3)}),
        fp.PromptStream({1: draw(2, 1, 12, seed=4)}, True),
    ]
    for given in ([], streams):
        encoded = fp.encode_prompted(trunk, images, *given)
        pooled, outputs = prompted_vit(model, images, given, mask=mask)
        for actual, expected in zip(
            [encoded.pooled, *encoded.streams], [pooled, *outputs], strict=True
        ):
            assert_near(actual, expected)
    unmasked = fp.encode_prompted(fp.vit_trunk(model), images, *streams).pooled
    assert (encoded.pooled - unmasked).abs().max() > 0.01


@FAMILIES
def test_a_mask_is_padded_in_every_family_and_in_late_blocks(name):
    row = row_named(name)
    model = build(row)
    prefix, size = model.num_prefix_tokens, model.num_prefix_tokens + model.patch_embed.num_patches
    mask = random_mask(size)
    case = case_of(row, attention_mask=mask)

    def forward(images, mask=mask):
        features = case.model.forward_features(images, attn_mask=mask)
        return case.model.forward_head(features, pre_logits=True)

    found = fp.encode_prompted(case.trunk, case.images).pooled
    assert torch.equal(found, forward(case.images))
    padded = torch.zeros(size + 2, size + 2, dtype=torch.float64)  # two prompts after the prefix
    kept = torch.tensor([*range(prefix), *range(prefix + 2, size + 2)])
    padded[kept[:, None], kept] = mask
    layers = case.layers()
    stream = fp.PromptStream(layers, True)
    found = fp.encode_prompted(case.trunk, case.images, stream).pooled
    assert_near(found, case.hooked(layers, replace=True, forward=partial(forward, mask=padded))[0])
    late = fp.PromptStream({1: draw(2, case.trunk.dim)})
    tokens = fp.encode_front(case.trunk, case.images, start=1)
    image_size = tuple(case.images.shape[2:])
    found = fp.encode_from(case.trunk, tokens, late, start=1, image_size=image_size).pooled
    assert torch.equal(found, fp.encode_prompted(case.trunk, case.images, late).pooled)


def test_a_mask_follows_the_dtype_of_the_tokens():
    model, mask = build(row_named("vit_tiny_patch16_224")).float(), random_mask(17)
    images, stream = draw_images(model), fp.PromptStream({0: draw(2, model.embed_dim)})
    one, other = (
        fp.encode_prompted(fp.vit_trunk(model, attention_mask=given), images, stream).pooled
        for given in (mask, mask.float())
    )
    assert torch.equal(one, other)


@pytest.mark.parametrize(
    "name", ["ViT-B-16", "PE-Core-B-16", "CLIPVisionModel", "Dinov2Model", "ViTModel"]
)
def test_a_mask_applies_to_the_tokens_of_a_tower_and_not_to_prompts(name):
    plainly = case_of(tower_named(name))
    mask = random_mask(plainly.trunk.embed(plainly.images)[0].shape[1])
    case = case_of(tower_named(name), attention_mask=mask)
    model, images = case.model, case.images
    if name == "ViT-B-16":
        hidden = model.transformer(model._embeds(images), attn_mask=mask)
        expected = model._pool(hidden)[0] @ model.proj
    elif name == "PE-Core-B-16":
        features = model.trunk.forward_features(images, attn_mask=mask)
        expected = model.head(model.trunk.forward_head(features))
    else:
        given = {"attention_mask": mask[None, None]}
        hooks = [
            block.register_forward_pre_hook(lambda _, args, __: (args[:1], given), with_kwargs=True)
            for block in case.blocks
        ]
        expected = case.forward(images)
        for hook in hooks:
            hook.remove()
    assert_near(fp.encode_prompted(case.trunk, images).pooled, expected)
    fp.check.trunk(case.trunk, images)
    assert (expected - case.forward(images)).abs().max() > 1e-3


# --- Gradient checkpointing


@contextmanager
def counted(blocks):
    """Count the forward passes of blocks, recomputations included."""
    runs = []
    hooks = [block.register_forward_pre_hook(lambda *_: runs.append(1)) for block in blocks]
    yield runs
    for hook in hooks:
        hook.remove()


TESTED = [name for name in NAMES if installed(name)]


@pytest.mark.parametrize("name", [*TESTED, "ViT-B-16", "PE-Core-B-16", "CLIPModel", "Dinov2Model"])
def test_checkpointing_runs_blocks_twice_with_the_same_gradients(name):
    case = case_of(row_named(name) if name in TESTED else tower_named(name))
    model, trunk = case.model, case.trunk
    tokens = draw(trunk.depth, 2, trunk.dim).requires_grad_()
    results = []
    # Plain blocks of open_clip are written out, so their own hooks are not called.
    parts = [block.ln_1 if isinstance(model, VisionTransformer) else block for block in case.blocks]
    for passes in (1, 2):
        if passes == 2:
            newest = getattr(model, "activation_checkpointing_enable", None)
            (newest or model.set_grad_checkpointing)()
        stream = fp.PromptStream(dict(enumerate(tokens)), True)
        with counted(parts) as runs:
            pooled = fp.encode_prompted(trunk, case.images, stream).pooled
            results.append(torch.autograd.grad(pooled.square().sum(), tokens)[0])
        assert len(runs) == passes * trunk.depth
        with counted(parts) as runs:
            fp.encode_prompted(trunk, case.images)  # without gradients, no block runs twice
        assert len(runs) == trunk.depth
    assert torch.equal(*results)


# --- Half precision, torch.func and several processes


@FAMILIES
@pytest.mark.parametrize("mode", ["bfloat16", "autocast"])
def test_half_precision_equals_that_of_the_model(mode, name):
    case = case_of(row_named(name))
    dtype = torch.bfloat16 if mode == "bfloat16" else torch.float32
    case = case._replace(model=case.model.to(dtype), images=case.images.to(dtype))
    trunk, images = case.trunk, case.images
    prompts = fp.DeepPrompts(2, trunk, generator=torch.Generator().manual_seed(0))
    layers = {layer: tokens.detach() for layer, tokens in prompts().layers.items()}
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        pooled = fp.encode_prompted(trunk, images, prompts()).pooled
        expected, _ = case.hooked(layers, replace=True)
    assert pooled.dtype == torch.float32
    assert torch.equal(pooled, expected.float())
    pooled.sum().backward()
    assert prompts.tokens.grad.dtype == torch.float32
    double = fp.vit_trunk(copy.deepcopy(case.model).double())
    exact = fp.encode_prompted(double, images.double(), prompts()).pooled
    assert_near(pooled, exact, dtype=torch.bfloat16)


@FAMILIES
def test_functional_call_and_vmap_of_grad_equal_a_loop_over_clients(name):
    model = build(row_named(name))
    trunk, num_clients = fp.vit_trunk(model), 3
    clients = [Client(trunk, torch.Generator().manual_seed(seed)) for seed in range(num_clients)]
    images = torch.stack([draw_images(model, seed=seed) for seed in range(num_clients)])
    blank = Client(trunk, torch.Generator().manual_seed(9))

    def loss(parameters, images):
        return functional_call(blank, parameters, images).square().sum()

    stacked = {
        name: torch.stack([dict(client.named_parameters())[name].detach() for client in clients])
        for name in blank.state_dict()
    }
    with sdpa_kernel(SDPBackend.MATH):  # flash attention has no batching rule
        gradients = vmap(grad(loss))(stacked, images)
    for number, client in enumerate(clients):
        client(images[number]).square().sum().backward()
        for name, parameter in client.named_parameters():
            assert_near(gradients[name][number], parameter.grad)


@pytest.mark.slow
def test_data_parallel_gradients_equal_those_of_the_full_batch(tmp_path):
    model = two_processes.make_client()
    images, labels = two_processes.make_data()
    nn.functional.cross_entropy(model(images), labels).backward()
    two_processes.run(two_processes.data_parallel_step, tmp_path)
    for rank in range(2):
        gradients = torch.load(tmp_path / f"{rank}.pt")
        assert gradients.keys() == {"prompts.tokens", "head.weight", "head.bias"}
        for name, parameter in model.named_parameters():
            assert_near(gradients[name], parameter.grad)
