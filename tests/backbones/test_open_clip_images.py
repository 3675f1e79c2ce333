"""Features of open_clip's image towers, pooled and patch by patch."""

import open_clip
import pytest
import timm
import torch
from open_clip.modified_resnet import ModifiedResNet
from open_clip.timm_model import TimmModel

from clips import EMBED_DIM, TEXT, VISION, draw, make_clip, spread
from fedprompt import freeze, image_tokens
from models import installed
from tolerance import assert_near

VITS = {
    "class token": {},
    "class token, norm after pooling": {"final_ln_after_pool": True},
    "mean": {"pool_type": "avg"},
    "mean, norm after pooling": {
        "pool_type": "avg",
        "final_ln_after_pool": True,
        "no_ln_pre": True,
    },
    "class token, oblong": {"image_size": (16, 32), "patch_size": 8},
    "tokens too": {"output_tokens": True},
    "custom blocks, patch dropout": {"qk_norm": True, "ls_init_value": 0.5, "patch_dropout": 0.5},
}
RESNET = {"layers": (1, 1, 1, 1), "width": 8, "head_width": 32, "image_size": 64}


def timm_tower(name, pool, proj, **trunk):
    """Make a timm tower as open_clip does, or with a custom trunk if `trunk` is given."""
    if not trunk:
        return TimmModel(name, EMBED_DIM, image_size=160, pool=pool, proj=proj)
    tower = TimmModel("test_vit", EMBED_DIM, pool="avg", proj="none")
    tower.trunk = timm.create_model(
        name, num_classes=EMBED_DIM, **({"global_pool": pool} if pool else {}), **trunk
    )
    return tower


TIMM = {
    "ViT, class token": (("test_vit", "token", "linear"), 160),
    "ViT, mean and a register": (("test_vit2", "avg", "linear"), 160),
    "ViT, mean, norm after pooling": (("test_vit4", "avg", "mlp"), 160),
    "ViT, attention pooling (SigLIP)": (("test_vit3", "map", "none"), 160),
    "ViT, relative positions": (("test_vit_relpos", "avg", "linear"), 160),
    "ConvNeXt": (("test_convnext", "avg", "mlp"), 160),
    "ConvNeXt, network default": (("test_convnext", "", "linear"), 160),
    "ResNet": (("test_resnet", "avg", "linear"), 160),
    "EfficientNet, own classifier": (("test_efficientnet", "avg", ""), 160),
    "CoAtNet": (("test_coatnet", "avg", "linear"), 160),
}
SMALL = {"img_size": 32, "embed_dim": 24, "depth": 2, "num_heads": 2}
TRUNKS = {
    "Eva, class token": (("eva02_base_patch16_clip_224", "token"), SMALL),
    "Eva, mean and a class token": (("eva02_base_patch16_clip_224", "avg"), SMALL),
    "Eva, attention pooling (PE)": (
        ("vit_pe_core_tiny_patch16_384", ""),
        SMALL | {"attn_pool_num_heads": 2},
    ),
    "Swin": (
        ("swin_tiny_patch4_window7_224", "avg"),
        {"img_size": 32, "window_size": 2, "embed_dim": 12, "depths": (1, 1), "num_heads": (1, 2)},
    ),
}


def clip_with(visual):
    model = open_clip.model.CLIP(EMBED_DIM, VISION, FEW_WORDS)
    model.visual = visual
    return spread(model).eval()


# No text is encoded here, so that the vocabulary need not be that of the tokenizer.
FEW_WORDS = TEXT | {"vocab_size": 64}


def draw_images(height, width=None):
    return draw(2, 3, height, width or height)


def check_empty(model, images, patches):
    """Without an image, there are no rows, and the other axes stay."""
    pooled, none = image_tokens(model, images[:0])
    assert (len(pooled), none.shape) == (0, (0, *patches.shape[1:]))


@pytest.mark.parametrize("kind", VITS)
def test_the_patch_of_a_vit_equals_the_model_pooling_that_token(kind, monkeypatch):
    model = make_clip(vocab_size=64, vision=VITS[kind])
    images = draw_images(*model.visual.image_size)
    pooled, patches = image_tokens(model, images)
    own = model.encode_image(images)
    assert torch.equal(pooled, own[0] if isinstance(own, tuple) else own)
    assert patches.shape == (2, model.visual.grid_size[0] * model.visual.grid_size[1], EMBED_DIM)
    check_empty(model, images, patches)
    for patch in range(patches.shape[1]):
        monkeypatch.setattr(
            model.visual, "_global_pool", lambda tokens, patch=patch: (tokens[:, 1 + patch], tokens)
        )
        own = model.encode_image(images)
        assert_near(patches[:, patch], own[0] if isinstance(own, tuple) else own)


def test_the_patches_of_a_resnet_are_the_other_outputs_of_its_attention_pool():
    model = make_clip(vocab_size=64, vision=RESNET)
    assert isinstance(model.visual, ModifiedResNet)
    images, pool = draw_images(64), model.visual.attnpool
    features = []
    pool.register_forward_pre_hook(lambda _, inputs: features.append(inputs[0]))
    expected = model.encode_image(images)
    pooled, patches = image_tokens(model, images)
    assert_near(pooled, expected)
    assert patches.shape == (2, 4, EMBED_DIM)
    check_empty(model, images, patches)
    for image, grid in enumerate(features[0]):
        locations = grid.flatten(1).T
        tokens = torch.stack([locations.mean(0), *locations]) + pool.positional_embedding
        for token, answer in enumerate([pooled[image], *patches[image]]):
            assert_near(answer, attention_by_hand(pool, tokens, token))


def attention_by_hand(pool, tokens, token):
    heads = []
    size = tokens.shape[1] // pool.num_heads
    for first in range(0, tokens.shape[1], size):
        rows = slice(first, first + size)
        query = pool.q_proj.weight[rows] @ tokens[token] + pool.q_proj.bias[rows]
        keys = [pool.k_proj.weight[rows] @ other + pool.k_proj.bias[rows] for other in tokens]
        weights = torch.stack([query @ key / size**0.5 for key in keys]).softmax(0)
        heads.append(
            sum(
                w * (pool.v_proj.weight[rows] @ other + pool.v_proj.bias[rows])
                for w, other in zip(weights, tokens, strict=True)
            )
        )
    return pool.c_proj(torch.cat(heads))


@pytest.mark.parametrize(
    "kind", [*(kind for kind, ((name, *_), _) in TIMM.items() if installed(name)), *TRUNKS]
)
def test_the_patch_of_a_timm_tower_equals_an_image_with_that_location_everywhere(kind, monkeypatch):
    if kind in TIMM:
        arguments, size = TIMM[kind]
        visual = timm_tower(*arguments)
    else:
        (name, pool), sizes = TRUNKS[kind]
        visual, size = timm_tower(name, pool, "none", **sizes), sizes["img_size"]
    model, images = clip_with(visual), draw_images(size)
    pooled, patches = image_tokens(model, images)
    expected = model.encode_image(images)
    assert torch.equal(pooled, expected)
    check_empty(model, images, patches)
    trunk = visual.trunk
    features = trunk.forward_features(images)
    # Features have shape (batch, tokens, dim), (batch, height, width, dim) or
    # (batch, dim, height, width).
    axes = (
        (1,)
        if features.ndim == 3
        else (1, 2)
        if getattr(trunk, "output_fmt", "") == "NHWC"
        else (2, 3)
    )
    prefix = getattr(trunk, "num_prefix_tokens", 0) if features.ndim == 3 else 0
    locations = features.movedim(axes, tuple(range(1, 1 + len(axes)))).flatten(1, len(axes))[
        :, prefix:
    ]
    assert patches.shape == (2, locations.shape[1], expected.shape[1])
    for patch in {1, locations.shape[1] - 1}:
        alike = locations[:, patch].reshape(
            [2 if axis == 0 else 1 if axis in axes else -1 for axis in range(features.ndim)]
        )
        monkeypatch.setattr(
            trunk, "forward_features", lambda *_, alike=alike, **__: alike.expand_as(features)
        )
        assert_near(patches[:, patch], model.encode_image(images))


def test_a_tower_without_a_projection_has_the_features_before_it():
    model, images = make_clip(vocab_size=64), draw(2, 3, 16, 16)
    projected, projection = image_tokens(model, images), model.visual.proj
    model.visual.proj = None
    pooled, patches = image_tokens(model, images)
    assert torch.equal(pooled, model.encode_image(images))
    for plain, expected in zip((pooled, patches), projected, strict=True):
        assert_near(plain @ projection, expected)


def test_a_network_without_patches_takes_images_of_any_size():
    model, images = clip_with(timm_tower("test_resnet", "avg", "linear")), draw_images(97, 63)
    assert torch.equal(image_tokens(model, images)[0], model.encode_image(images))


def test_patches_are_in_row_major_order():
    """Without positions, swapping two patches swaps their features."""
    model = make_clip()
    model.visual.positional_embedding.data.zero_()
    images = draw_images(16)
    swapped = images.clone()
    swapped[..., :8, 8:], swapped[..., 8:, :8] = (
        images[..., 8:, :8],
        images[..., :8, 8:],
    )  # second and third of 2 x 2
    (pooled, patches), (pooled_swapped, patches_swapped) = (
        image_tokens(model, images),
        image_tokens(model, swapped),
    )
    assert_near(pooled_swapped, pooled)
    assert_near(patches_swapped, patches[:, [0, 2, 1, 3]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_devices_and_dtypes_follow_the_model(dtype):
    for vision in ({}, RESNET):
        model = make_clip(vocab_size=64, vision=vision)
        images = draw_images(64 if vision else 16)
        expected = image_tokens(model, images)
        for low, high in zip(
            image_tokens(model.to(dtype), images.to(dtype)), expected, strict=True
        ):
            assert low.dtype == dtype
            if dtype == torch.float32:
                assert_near(low, high)


def test_a_frozen_tower_has_gradients_for_pixels_only():
    model, images = freeze(make_clip()), draw_images(16)
    assert not any(features.requires_grad for features in image_tokens(model, images))
    patches = image_tokens(model, images.requires_grad_())[1]
    assert torch.autograd.grad(patches[0].sum(), images)[0][0].abs().sum() > 0
