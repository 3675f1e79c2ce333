"""Images are prepared as the network's library does it."""

import json
from dataclasses import asdict, replace

import numpy as np
import open_clip
import pytest
import timm
import torch
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image
from timm.data import create_transform, resolve_data_config
from transformers import (
    BitImageProcessor,
    CLIPImageProcessor,
    ConvNextImageProcessor,
    DeiTImageProcessor,
    DINOv3ViTImageProcessor,
    SiglipImageProcessor,
    ViTImageProcessor,
)

from fedprompt.backbones.preparation import Preparation, of_open_clip, of_timm, of_transformers

SHAPES = [(32, 32), (97, 40), (40, 97), (7, 9), (301, 300), (5, 160), (224, 224), (500, 375)]
TIMM = (
    "vit_base_patch16_224.augreg_in21k", "vit_base_patch16_clip_224.openai",
    "vit_small_patch14_dinov2.lvd142m", "vit_base_patch16_siglip_224.webli",
    "vit_small_patch16_dinov3.lvd1689m", "deit3_small_patch16_224.fb_in1k",
    "deit_tiny_distilled_patch16_224.fb_in1k", "eva02_tiny_patch14_224.mim_in22k",
    "vit_base_patch16_rope_reg1_gap_256.sbb_in1k", "beit_base_patch16_224.in22k_ft_in22k",
    "test_vit.r160_in1k",
)  # fmt: skip
MODES = (
    {"crop_pct": 0.875, "interpolation": "bilinear"},
    {"crop_pct": 0.9, "crop_mode": "squash", "interpolation": "lanczos"},
    {"crop_pct": 0.8, "crop_mode": "border", "interpolation": "bilinear"},
    {"crop_pct": 1.2, "crop_mode": "center"},
    {"crop_pct": 1.3, "crop_mode": "squash", "interpolation": "box"},
    {"crop_pct": 0.9, "crop_mode": "border", "input_size": (3, 40, 64)},
    {"crop_pct": 0.9, "input_size": (3, 64, 40), "interpolation": "hamming"},
    {"crop_pct": 1.0, "crop_mode": "squash", "input_size": (3, 40, 64), "interpolation": "nearest"},
)
TAGS = (
    ("ViT-B-16", "openai"), ("ViT-B-16-SigLIP", "webli"), ("ViT-B-32", "laion2b_s34b_b79k"),
    ("MobileCLIP-S1", "datacompdr"), ("ViT-B-16-SigLIP2", "webli"),
    ("EVA02-B-16", "merged2b_s8b_b131k"),
)  # fmt: skip
CLIP_MODES = [
    {"resize_mode": mode, "size": size, "interpolation": how, "fill_color": fill}
    for mode, how, fill in [
        ("shortest", "bicubic", 0), ("longest", "bilinear", 7), ("squash", "random", 0),
        ("shortest", "bilinear", 5),
    ]
    for size in (30, (24, 40))
]  # fmt: skip
FIXED = {"height": 40, "width": 30}
PROCESSORS = {
    "clip": CLIPImageProcessor(), "vit": ViTImageProcessor(), "dinov3": DINOv3ViTImageProcessor(),
    "siglip": SiglipImageProcessor(), "deit": DeiTImageProcessor(), "bit": BitImageProcessor(),
    "dinov2": BitImageProcessor(size={"shortest_edge": 256}, crop_size=224),
    "odd": CLIPImageProcessor(size={"shortest_edge": 45}, crop_size=FIXED, resample=2),
    "padded": CLIPImageProcessor(size={"shortest_edge": 20}, crop_size=FIXED),
    "fixed": ViTImageProcessor(size=FIXED, resample=1, image_mean=[0.1, 0.2, 0.3]),
    "nearest": ViTImageProcessor(size=FIXED, resample=0),
    "levels": ViTImageProcessor(size=FIXED, do_rescale=False, image_mean=[120] * 3),
    "signed": ViTImageProcessor(size=FIXED, rescale_factor=1 / 127.5, do_normalize=False),
}  # fmt: skip


def photo(height, width):
    draw = np.random.default_rng(height * 1000 + width)
    return Image.fromarray(draw.integers(0, 256, (height, width, 3), dtype=np.uint8))


def of_library(kind, given):
    """Return the preparation, and the library's own transform."""
    if kind == "timm":
        config = given if isinstance(given, dict) else timm.get_pretrained_cfg(given).to_dict()
        return of_timm(config), create_transform(**resolve_data_config({}, pretrained_cfg=config))
    if kind == "open_clip":
        config = given if isinstance(given, dict) else open_clip.get_pretrained_cfg(*given)
        merged = open_clip.transform.merge_preprocess_dict(PreprocessCfg(), config)
        return of_open_clip(config), image_transform_v2(PreprocessCfg(**merged), is_train=False)
    processor = PROCESSORS[given]
    return of_transformers(processor), lambda image: processor(image, return_tensors="pt")[
        "pixel_values"
    ][0]


CASES = [("timm", each) for each in (*TIMM, *MODES)]
CASES += [("open_clip", each) for each in (*TAGS, *CLIP_MODES)]
CASES += [("transformers", name) for name in PROCESSORS]


@pytest.mark.parametrize(("kind", "given"), CASES, ids=str)
def test_images_of_any_shape_are_those_of_the_library(kind, given):
    ours, theirs = of_library(kind, given)
    assert Preparation(**json.loads(json.dumps(asdict(ours)))) == ours
    for shape in SHAPES:
        image = photo(*shape)
        expected = theirs(image)
        torch.testing.assert_close(
            ours(image), expected, rtol=0, atol=1e-6 * max(1, expected.abs().max())
        )


@pytest.mark.parametrize(("kind", "given"), CASES[::8], ids=str)
def test_a_very_long_image_takes_little_memory_and_has_the_same_middle(kind, given, monkeypatch):
    """At a ratio of 200, both ways are possible; a level of 8 bits may be rounded otherwise."""
    ours, _ = of_library(kind, given)
    for shape in ((2, 400), (400, 2)):
        image = photo(*shape)
        short = ours(image)
        with monkeypatch.context() as patch:
            patch.setattr("fedprompt.backbones.preparation.WIDEST", 1e9)
            whole = ours(image)
        assert (short - whole).abs().mean() < 1 / 255 / min(ours.std)
    assert ours(photo(1, 200_000)).shape[1:] == ours.size


def test_gray_images_have_one_channel_or_three_equal_ones():
    """Networks with one channel of timm have the mean of its colors."""
    image = photo(20, 30)
    one = of_timm(
        {"mean": (0.4, 0.5, 0.6), "std": (0.2,) * 3, "crop_pct": 1.0}, (16, 24), channels=1
    )
    assert (one.mean, one.std, one.size) == ((0.5,), (pytest.approx(0.2),), (16, 24))
    three = Preparation((16, 24), (0.5,) * 3, (0.2,) * 3, interpolation="bicubic")
    gray = image.convert("L")
    torch.testing.assert_close(one(image).expand(3, -1, -1), three(gray))
    for mode in ("L", "RGBA", "CMYK", "P", "1", "LA"):
        assert three(image.convert(mode)).shape == (3, 16, 24)


def test_gray_images_of_16_bits_and_of_floats_are_as_bright_as_those_of_8_bits():
    levels = np.arange(256, dtype=np.uint8).reshape(16, 16)
    ours = Preparation((16, 16), (0.0,), (1.0,))
    for same in (257 * levels.astype(np.int32), levels / np.float32(255)):
        torch.testing.assert_close(ours(Image.fromarray(same)), ours(Image.fromarray(levels)))


def test_stored_levels_are_normalized_later_in_batches():
    for name, kind in (("vit", torch.uint8), ("dinov3", torch.float32)):
        ours = of_transformers(PROCESSORS[name])
        images = [photo(*shape) for shape in SHAPES[:3]]
        levels = torch.stack([ours.levels(image) for image in images])
        assert levels.dtype == kind
        torch.testing.assert_close(ours.normalized(levels), torch.stack(list(map(ours, images))))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "The shorter side is resized to 36 pixels (bicubic). The middle, 32 x 24, is kept."),
        (
            {"resize": "squash"},
            "Both sides are resized to 36 pixels (bicubic). The middle, 32 x 24",
        ),
        (
            {"resize": "squash", "resized": None},
            "Both sides are resized to 32 x 24 pixels (bicubic).",
        ),
        ({"resize": "longest"}, "The longer side is resized to 36 pixels (bicubic). The middle,"),
        (
            {"resize": "longest", "resized": None},
            "to 32 x 24 pixels (bicubic). The rest is filled.",
        ),
    ],
)
def test_a_sentence_says_what_is_done_to_an_image(change, words):
    made = Preparation((32, 24), (0.5,) * 3, (0.5,) * 3, resized=36)
    assert words in str(replace(made, **change))


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": 0}, "size"), ({"size": (3, 3, 3)}, "size"), ({"resized": (3, 0)}, "resized"),
        ({"mean": (0.5,) * 2}, "mean"), ({"mean": 0.5}, "mean"), ({"std": (0.5, 0.5)}, "std"),
        ({"std": (0.5, 0.5, 0)}, "std"), ({"fill": (1,)}, "fill"), ({"resize": "crop"}, "resize"),
        ({"interpolation": "cubic"}, "interpolation"), ({"kernel": "torch"}, "kernel"),
        ({"bits": 0}, "bits"),
    ],
)  # fmt: skip
def test_refusals(change, message):
    with pytest.raises((ValueError, TypeError), match=f"^`{message}` must "):
        Preparation(**{"size": 8, "mean": (0.5,) * 3, "std": (0.5,) * 3} | change)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "processor",
    [
        ConvNextImageProcessor(), CLIPImageProcessor(do_resize=False),
        CLIPImageProcessor(do_center_crop=False), ViTImageProcessor(do_pad=True),
        CLIPImageProcessor(size={"shortest_edge": 30, "longest_edge": 60}),
    ],
    ids=repr,
)  # fmt: skip
def test_a_processor_with_other_steps_is_refused(processor):
    with pytest.raises(ValueError, match="`image` must be resized to one size"):
        of_transformers(processor)
