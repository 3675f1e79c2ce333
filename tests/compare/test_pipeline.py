"""The pipeline is compared with torchvision, which prepares one image at a time."""

import copy
from functools import partial

import pytest
import timm
import torch
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as vision

import fedprompt as fp
from fedprompt.compare.pipeline import Preparation, flipped, prepared_trunk
from fedprompt.methods.models import tuned_trunk

MODES = {"bicubic": vision.InterpolationMode.BICUBIC, "bilinear": vision.InterpolationMode.BILINEAR}
PREPARE = {"mean": (0.2, 0.4, 0.6), "std": (0.3, 0.5, 0.7)}


def noise(batch, height, width, channels=3):
    generator = torch.Generator().manual_seed(5)
    coarse = torch.randint(0, 256, (batch, channels, 4, 4), generator=generator).float()
    smooth = vision.resize(coarse, [height, width], antialias=True)
    rough = torch.randint(-40, 40, smooth.shape, generator=generator)
    return (smooth + rough).clamp(0, 255).byte()


def test_half_of_the_images_are_flipped(generator):
    images = noise(1, 8, 8).expand(2000, -1, -1, -1)
    results = flipped(images, generator)
    mirrored = (results != images).flatten(1).any(1)
    assert 0.45 < mirrored.float().mean() < 0.55
    assert torch.equal(results[mirrored], images[mirrored].flip(-1))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("source", "channels"), [(32, 3), (32, 1), (80, 3), (48, 3)])
def test_preparation_equals_torchvision(mode, source, channels):
    images = noise(3, source, source, channels)
    prepare = Preparation(48, interpolation=mode, **PREPARE)
    reference = v2.Compose(
        [
            v2.RGB(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Resize([48, 48], MODES[mode], antialias=True),
            partial(torch.clamp, min=0, max=1),
            v2.Normalize(**PREPARE),
        ]
    )
    expected = torch.stack([reference(image) for image in images])
    half = 0.501 / 255 / 0.3  # a level of a pixel is divided by the smallest deviation
    tolerance = 1e-6 if source == 48 else half
    torch.testing.assert_close(prepare(images), expected, atol=tolerance, rtol=0)


@pytest.fixture(scope="module")
def trunk():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = timm.create_model(
            "vit_tiny_patch16_224", img_size=32, embed_dim=16, depth=2, num_heads=2, num_classes=0
        )
    return fp.vit_trunk(model)


def test_prepared_trunk_equals_trunk_on_prepared_images(trunk, generator):
    images, prepare = noise(4, 48, 48), Preparation(32, **PREPARE)
    assert torch.equal(
        fp.mean_patch_tokens(prepared_trunk(trunk, prepare), images).value,
        fp.mean_patch_tokens(trunk, prepare(images)).value,
    )
    prompts = fp.DeepPrompts(3, trunk, generator=generator)
    ours = prepared_trunk(trunk, prepare)
    results = [
        fp.encode_prompted(ours, images, prompts()),
        fp.encode_prompted(trunk, prepare(images), prompts()),
    ]
    assert torch.equal(results[0].pooled, results[1].pooled)
    fronts = [
        fp.encode_front(ours, images, start=1),
        fp.encode_front(trunk, prepare(images), start=1),
    ]
    assert torch.equal(*fronts)
    late = [fp.encode_from(each, fronts[0], start=1).pooled for each in (ours, trunk)]
    assert torch.equal(*late)


def test_prepared_trunk_is_a_trunk(trunk):
    ours = prepared_trunk(trunk, Preparation(32))
    assert isinstance(ours, fp.interfaces.Trunk)
    assert copy.deepcopy(ours) is ours
    assert fp.fingerprint(ours) == fp.fingerprint(trunk)


def test_prepared_trunk_is_tuned_on_prepared_images(trunk):
    images, prepare = noise(4, 48, 48), Preparation(32, **PREPARE)
    ours, plain = (
        tuned_trunk(each, fp.tuning.norms) for each in (prepared_trunk(trunk, prepare), trunk)
    )
    assert [*fp.snapshot(ours.trainable)] == [*fp.snapshot(plain.trainable)] != []
    with torch.no_grad():
        for each in (ours, plain):
            next(each.trainable.parameters()).add_(0.5)
    found = [fp.encode_prompted(ours, images), fp.encode_prompted(plain, prepare(images))]
    assert torch.equal(found[0].pooled, found[1].pooled)
    assert not torch.equal(found[0].pooled, fp.encode_prompted(trunk, prepare(images)).pooled)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("side", [4, 8, 11])
def test_floating_point_images_are_prepared_as_stored_ones_up_to_rounding(interpolation, side):
    stored = torch.randint(0, 256, (3, 3, 8, 8), dtype=torch.uint8)
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
    prepare = Preparation(side, mean=mean, std=std, interpolation=interpolation)
    scale, shift = (255 * torch.tensor(values)[:, None, None] for values in (std, mean))
    rounded, plain = (prepare(images) * scale + shift for images in (stored, stored.float()))
    torch.testing.assert_close(rounded, rounded.round(), atol=1e-3, rtol=0)
    assert (rounded - plain).abs().max() <= 0.501
    assert ((plain - plain.round()).abs().max() > 0.1) == (side != 8)


def test_without_other_values_images_are_between_minus_one_and_one_and_resized_to_a_square():
    prepare = Preparation(2)
    images = torch.tensor([0, 102, 153, 255], dtype=torch.uint8).reshape(1, 1, 2, 2)
    expected = torch.tensor([[-1, -0.2], [0.2, 1]]).expand(1, 3, 2, 2)
    torch.testing.assert_close(prepare(images), expected)
    assert (prepare.interpolation, prepare(images.expand(1, 1, 2, 2).repeat(1, 3, 2, 3)).shape) == (
        "bicubic",
        (1, 3, 2, 2),
    )
    assert not prepare.state_dict()
