"""Trunks of timm models equal the models, with prompts and under PyTorch's transforms."""

import copy
import re
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.nn as nn
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import fedprompt as fp
import models
import two_processes
from fedprompt.check import trunk as check_trunk
from models import (
    ACCEPTED,
    ALL_ACCEPTED,
    ALL_REFUSED,
    REFUSED,
    Client,
    assert_takes_no_images,
    build,
    draw_images,
    installed,
    plain,
    row_named,
    tiny_vit,
)
from references.vpt import hooked, prompted_vit
from tolerance import assert_near
from towers import OPEN_CLIP, TRANSFORMERS

NAMES = (
    "vit_small_patch14_reg4_dinov2",
    "vit_small_patch16_dinov3",
    "vit_small_patch16_rope_mixed_224",
)
FAMILIES = pytest.mark.parametrize("name", [name for name in NAMES if installed(name)])


def draw(*shape, seed=2):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def deep_layers(trunk, prompts=2):
    return dict(enumerate(draw(trunk.depth, prompts, trunk.dim)))


# --- Every model of the table


@pytest.fixture(scope="module", params=ACCEPTED, ids=lambda row: row.name)
def accepted(request):
    model = build(request.param)
    return model, fp.vit_trunk(model), draw_images(model)


def test_without_prompts_a_trunk_is_bitwise_identical_to_its_model(accepted):
    model, trunk, images = accepted
    assert (trunk.prefix, trunk.dim, trunk.depth) == (
        model.num_prefix_tokens,
        model.embed_dim,
        len(model.blocks),
    )
    assert torch.equal(fp.encode_prompted(trunk, images).pooled, plain(model, images))


def test_a_trunk_states_the_width_of_its_features_and_the_size_of_its_patches(accepted):
    model, trunk, images = accepted
    tokens, _ = trunk.embed(images)
    height, width = images.shape[2:]
    assert trunk.num_features == plain(model, images).shape[1]
    assert (height // trunk.patch_size) * (width // trunk.patch_size) == (
        tokens.shape[1] - trunk.prefix
    )


@pytest.mark.parametrize("replace", [True, False])
def test_prompts_change_the_output_as_in_the_models_own_forward_pass(replace, accepted):
    # The reference inserts prompts by hooks. It increases `attn.num_prefix_tokens` instead of
    # padding rotary tables.
    model, trunk, images = accepted
    layers = deep_layers(trunk)
    pooled = fp.encode_prompted(trunk, images, fp.PromptStream(layers, replace)).pooled
    assert_near(pooled, hooked(model, images, layers, replace=replace)[0])
    assert (pooled - plain(model, images)).abs().max() > 1e-3
    assert torch.equal(
        fp.encode_prompted(trunk, images).pooled, plain(model, images)
    )  # the model is unchanged


def test_a_trunk_passes_every_line_of_the_check(accepted):
    model, trunk, images = accepted
    report = check_trunk(trunk, images, lambda images: plain(model, images))
    assert all(line.passed for line in report.lines), report


def test_late_prompts_equal_the_pass_from_images_bitwise(accepted):
    _, trunk, images = accepted
    stream = fp.PromptStream({2: draw(2, trunk.dim)})
    tokens = fp.encode_front(trunk, images, start=2)
    late = fp.encode_from(trunk, tokens, stream, start=2, image_size=tuple(images.shape[2:]))
    expected = fp.encode_prompted(trunk, images, stream)
    assert torch.equal(late.pooled, expected.pooled)
    assert torch.equal(*(encoded.streams[0] for encoded in (late, expected)))


def test_a_trunk_takes_an_empty_batch(accepted):
    _, trunk, images = accepted
    assert_takes_no_images(trunk, images)


def test_the_order_of_prompts_does_not_matter_and_all_have_gradients(accepted):
    _, trunk, images = accepted
    tokens = draw(trunk.depth, 3, trunk.dim).requires_grad_()
    pooled = fp.encode_prompted(
        trunk, images, fp.PromptStream(dict(enumerate(tokens)), True)
    ).pooled
    turned = fp.encode_prompted(
        trunk, images, fp.PromptStream(dict(enumerate(tokens.flip(1))), True)
    ).pooled
    assert_near(turned, pooled)
    (gradient,) = torch.autograd.grad((draw(*pooled.shape, seed=3) * pooled).sum(), tokens)
    assert (gradient.abs().amax(2) > 1e-9).all()


def test_the_tokens_of_a_stream_pass_through_the_last_norm_of_the_model(accepted):
    model, trunk, images = accepted
    layers = deep_layers(trunk)
    (actual,) = fp.encode_prompted(trunk, images, fp.PromptStream(layers)).streams
    last_norm = model.norm if isinstance(model.fc_norm, nn.Identity) else model.fc_norm
    assert_near(actual, last_norm(hooked(model, images, layers)[1]))


def test_documented_models_are_those_tested():
    # If this fails, run docs/make_model_table.py.
    text = (Path(__file__).parents[2] / "docs" / "reference" / "models.md").read_text()
    rows = (*ALL_ACCEPTED, *OPEN_CLIP, *TRANSFORMERS, *ALL_REFUSED)
    assert re.findall(r"^\| `([\w-]+)`", text, re.MULTILINE) == [row.name for row in rows]


# --- Refusals

SUPPORTED = "`model` must be a vision transformer of timm, open_clip, transformers or torchvision"


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


@pytest.mark.parametrize("family", [VisionTransformer, Eva])
def test_a_subclass_with_another_forward_pass_is_refused(family):
    class Altered(family):
        def forward_features(self, images):
            return super().forward_features(images).flip(1)

    with pytest.raises(TypeError, match=r"its forward pass is not known here.*; got Altered\."):
        fp.vit_trunk(Altered(img_size=16, patch_size=8, embed_dim=12, depth=1, num_heads=2))


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("model", "got"),
    [
        ("vit_tiny_patch16_224", r"\(it is not an nn\.Module\); got str"),
        (None, r"\(it is not an nn\.Module\); got NoneType"),
        (nn.Linear(2, 2), r"\(it has no attention\); got Linear"),
        (nn.Sequential(tiny_vit()), r"\(it contains one; pass model\.get_submodule\('0'\)\);"),
    ],
)
def test_other_things_are_refused(model, got):
    with pytest.raises(TypeError, match=rf"^{SUPPORTED} {got}"):
        fp.vit_trunk(model)


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
    with pytest.raises(
        ValueError, match=rf"`model` must have no adapters.*; got a model that trains {names}\."
    ):
        fp.vit_trunk(model)
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == before
    assert fp.encode_prompted(fp.vit_trunk(fp.freeze(model)), draw_images(model)).pooled.shape == (
        2,
        12,
    )  # an explicit freeze is accepted


# --- Frozen for good


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "eva02_tiny_patch14_224"])
def test_a_trunk_that_was_unfrozen_or_put_into_training_is_refused(name):
    model = build(row_named(name)).train()
    trunk, images = fp.vit_trunk(model), draw_images(model)
    fp.encode_prompted(trunk, images)

    model.blocks[1].norm1.weight.requires_grad_(True)
    with pytest.raises(
        ValueError,
        match=r"`trunk` must stay frozen.*; got a model with parameters that require gradients",
    ):
        fp.encode_prompted(trunk, images)
    fp.freeze(model).blocks[1].train()
    with pytest.raises(
        ValueError, match=r"`trunk` must stay in eval mode.*; got a model in train mode"
    ):
        fp.encode_prompted(trunk, images)
    fp.freeze(model)
    fp.encode_prompted(trunk, images)


# --- Image sizes


@pytest.mark.parametrize("name", ["vit_small_patch16_224", "vit_small_patch16_dinov3"])
@pytest.mark.parametrize("size", [(48, 80), (96, 32)])
def test_dynamic_image_sizes(name, size):
    model = build(row_named(name))
    trunk, images = fp.vit_trunk(model), draw(2, 3, *size)
    layers = deep_layers(trunk)
    assert torch.equal(fp.encode_prompted(trunk, images).pooled, plain(model, images))
    assert_near(
        fp.encode_prompted(trunk, images, fp.PromptStream(layers, True)).pooled,
        hooked(model, images, layers, replace=True)[0],
    )


def test_rotary_positions_of_dynamic_images_need_their_size():
    trunk = fp.vit_trunk(build(row_named("vit_small_patch16_dinov3")))
    tokens = fp.encode_front(trunk, draw(2, 3, 48, 80), start=1)
    message = "`image_size` must be given, because positions depend on height and width; got None."
    with pytest.raises(ValueError, match=re.escape(message)):
        fp.encode_from(trunk, tokens, start=1)
    message = "`tokens` must have 21 tokens without prompts, for 4 x 4 patches; got 20."
    with pytest.raises(ValueError, match=re.escape(message)):
        fp.encode_from(trunk, tokens, start=1, image_size=64)
    turned = fp.encode_from(trunk, tokens, start=1, image_size=(80, 48)).pooled
    right = fp.encode_from(trunk, tokens, start=1, image_size=(48, 80)).pooled
    assert (turned - right).abs().max() > 1e-6  # so the size cannot be guessed from the tokens


def test_a_model_of_fixed_size_refuses_the_size_of_other_images():
    trunk = fp.vit_trunk(build(row_named("eva02_tiny_patch14_224")))
    tokens = fp.encode_front(trunk, draw(2, 3, 56, 56), start=1)
    message = "`tokens` must have 26 tokens without prompts, for 5 x 5 patches; got 17."
    with pytest.raises(ValueError, match=re.escape(message)):
        fp.encode_from(trunk, tokens, start=1, image_size=70)


# --- Attention masks


def random_mask(size):
    """Mask a quarter of the scores and shift the others; every token attends to itself."""
    mask = draw(size, size, seed=5)
    mask[draw(size, size, seed=6) > 0.67] = -torch.inf
    return mask.fill_diagonal_(0)


def test_a_mask_applies_to_the_tokens_of_the_model_and_not_to_prompts():
    model = tiny_vit()
    mask = random_mask(6)
    trunk, images = fp.vit_trunk(model, attention_mask=mask), draw(2, 3, 16, 16)
    streams = [
        fp.PromptStream({0: draw(2, 12), 2: draw(1, 12, seed=3)}),
        fp.PromptStream({1: draw(2, 1, 12, seed=4)}, True),
    ]
    for given in ([], streams):
        encoded = fp.encode_prompted(trunk, images, *given)
        pooled, outputs = prompted_vit(model, images, given, mask=mask)
        for actual, expected in zip(
            (encoded.pooled, *encoded.streams), (pooled, *outputs), strict=True
        ):
            assert_near(actual, expected)
    assert (
        encoded.pooled - fp.encode_prompted(fp.vit_trunk(model), images, *streams).pooled
    ).abs().max() > 0.01


@FAMILIES
def test_a_mask_is_padded_in_every_family(name):
    model = build(row_named(name))
    size = model.num_prefix_tokens + model.patch_embed.num_patches
    mask = random_mask(size)
    trunk, images = fp.vit_trunk(model, attention_mask=mask), draw_images(model)
    layers = deep_layers(trunk)
    assert torch.equal(
        fp.encode_prompted(trunk, images).pooled,
        model.forward_head(model.forward_features(images, attn_mask=mask)),
    )

    padded = torch.zeros(size + 2, size + 2, dtype=torch.float64)  # two prompts after the prefix
    first, last = slice(0, trunk.prefix), slice(trunk.prefix + 2, None)
    padded[first, first], padded[first, last] = (
        mask[: trunk.prefix, : trunk.prefix],
        mask[: trunk.prefix, trunk.prefix :],
    )
    padded[last, first], padded[last, last] = (
        mask[trunk.prefix :, : trunk.prefix],
        mask[trunk.prefix :, trunk.prefix :],
    )
    pooled = fp.encode_prompted(trunk, images, fp.PromptStream(layers, True)).pooled
    assert_near(pooled, hooked(model, images, layers, replace=True, mask=padded)[0])


@FAMILIES
def test_a_mask_applies_to_late_blocks_too(name):
    model = build(row_named(name))
    mask = random_mask(model.num_prefix_tokens + model.patch_embed.num_patches)
    trunk, images = fp.vit_trunk(model, attention_mask=mask), draw_images(model)
    stream = fp.PromptStream({1: draw(2, trunk.dim)})
    tokens, size = fp.encode_front(trunk, images, start=1), tuple(images.shape[2:])
    late = fp.encode_from(trunk, tokens, stream, start=1, image_size=size)
    assert torch.equal(late.pooled, fp.encode_prompted(trunk, images, stream).pooled)


def test_a_mask_follows_the_dtype_of_the_tokens():
    model = build(row_named("vit_tiny_patch16_224")).float()
    mask = random_mask(17)
    images, stream = draw_images(model), fp.PromptStream({0: draw(2, model.embed_dim)})
    one, other = (
        fp.encode_prompted(fp.vit_trunk(model, attention_mask=given), images, stream).pooled
        for given in (mask, mask.float())
    )
    assert torch.equal(one, other)


NOT_A_MASK = "`attention_mask` must be a floating-point tensor of shape (seq, seq)"


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (torch.zeros(3, 4), ValueError, "`attention_mask` must have shape (seq, seq); got (3, 4)."),
        (torch.zeros(17), ValueError, "`attention_mask` must have shape (seq, seq); got (17,)."),
        (torch.full((17, 17), torch.nan), ValueError, "`attention_mask` must be finite; got 289"),
        (torch.full((17, 17), torch.inf), ValueError, "`attention_mask` must be finite; got 289"),
        (
            torch.zeros(17, 17, dtype=torch.bool),
            TypeError,
            f"{NOT_A_MASK}; got a bool tensor of shape (17, 17).",
        ),
        ([[0.0]], TypeError, f"{NOT_A_MASK}; got a list of length 1."),
    ],
)
def test_a_bad_mask_is_refused(mask, error, message):
    with pytest.raises(error, match=re.escape(message)):
        fp.vit_trunk(build(row_named("vit_tiny_patch16_224")), attention_mask=mask)


@pytest.mark.parametrize(
    "size", [1, 16, 18]
)  # broadcasts; lacks the class token; includes a prompt
def test_a_mask_of_another_size_is_refused_in_the_forward_pass(size):
    model = build(row_named("vit_tiny_patch16_224"))
    trunk = fp.vit_trunk(model, attention_mask=torch.zeros(size, size))
    message = (
        f"`attention_mask` must have shape (seq, seq) for the 17 tokens; got ({size}, {size})."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        fp.encode_prompted(
            trunk, draw_images(model), fp.PromptStream({0: draw(1, model.embed_dim)})
        )


# --- Gradient checkpointing


@contextmanager
def counted(blocks):
    """Count the forward passes of blocks, recomputations included."""
    runs = []
    hooks = [block.register_forward_pre_hook(lambda *_: runs.append(1)) for block in blocks]
    yield runs
    for hook in hooks:
        hook.remove()


@FAMILIES
def test_checkpointing_runs_blocks_twice_with_the_same_gradients(name):
    model = build(row_named(name))
    trunk, images = fp.vit_trunk(model), draw_images(model)
    tokens = draw(trunk.depth, 2, trunk.dim).requires_grad_()
    results = []
    for checkpointing in (False, True):
        model.set_grad_checkpointing(checkpointing)
        with counted(model.blocks) as runs:
            pooled = fp.encode_prompted(
                trunk, images, fp.PromptStream(dict(enumerate(tokens)), True)
            ).pooled
            results.append((pooled, *torch.autograd.grad(pooled.square().sum(), tokens)))
        assert len(runs) == trunk.depth * (1 + checkpointing)
        with counted(model.blocks) as runs:
            fp.encode_prompted(trunk, images)  # without gradients, no block runs twice
        assert len(runs) == trunk.depth
    for plainly, checkpointed in zip(*results, strict=True):
        assert torch.equal(plainly, checkpointed)


# --- Half precision


@FAMILIES
@pytest.mark.parametrize("mode", ["bfloat16", "autocast"])
def test_half_precision_equals_that_of_the_model(mode, name):
    model = build(row_named(name)).to(torch.bfloat16 if mode == "bfloat16" else torch.float32)
    trunk, images = fp.vit_trunk(model), draw_images(model)
    prompts = fp.DeepPrompts(2, trunk.dim, trunk.depth, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        pooled = fp.encode_prompted(trunk, images, prompts()).pooled
        expected, _ = hooked(
            model,
            images,
            {layer: tokens.detach() for layer, tokens in prompts().layers.items()},
            replace=True,
        )
    assert pooled.dtype == torch.float32
    assert torch.equal(pooled, expected.float())
    pooled.sum().backward()
    assert prompts.tokens.grad.dtype == torch.float32

    exact = fp.encode_prompted(
        fp.vit_trunk(copy.deepcopy(model).double()), images.double(), prompts()
    ).pooled
    assert_near(pooled, exact, dtype=torch.bfloat16)


# --- torch.func


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


# --- Several processes


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
