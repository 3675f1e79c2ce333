"""The pipeline is compared with torchvision, which prepares one image at a time."""

import copy
from functools import partial

import pytest
import timm
import torch
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as vision

import fedprompt as fp
from tasks import resampling
from tasks.pipeline import Preparation, PreparedTrunk
from tasks.resampling import augment

MODES = {"bicubic": vision.InterpolationMode.BICUBIC, "bilinear": vision.InterpolationMode.BILINEAR}
PREPARE = {"mean": (0.2, 0.4, 0.6), "std": (0.3, 0.5, 0.7)}


def noise(batch, height, width, channels=3):
    generator = torch.Generator().manual_seed(5)
    coarse = torch.randint(0, 256, (batch, channels, 4, 4), generator=generator).float()
    smooth = vision.resize(coarse, [height, width], antialias=True)
    rough = torch.randint(-40, 40, smooth.shape, generator=generator)
    return (smooth + rough).clamp(0, 255).byte()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("source", "size"), [(32, 56), (64, 20), (30, 31)])
def test_crop_resize_and_flip_equal_torchvision(mode, source, size, generator):
    images = noise(6, source, source + 8)
    shape = images.shape[-2:]
    boxes = resampling.random_boxes(6, *shape, smallest=0.1, generator=generator)
    flipped = torch.tensor([True, False] * 3)
    ours = resampling.resample(images, boxes, size=size, interpolation=mode, flipped=flipped)
    for k, image in enumerate(images):
        box = [int(each[k]) for each in boxes]
        for reference, most, mean in ((image.double(), 1, 1e-2), (image, 12, 0.3)):
            # uint8 images are also rounded and cut off between the two directions.
            expected = vision.resized_crop(reference, *box, [size, size], MODES[mode], True)
            expected = vision.horizontal_flip(expected) if flipped[k] else expected
            difference = (ours[k].double() - expected.double().round().clamp(0, 255)).abs()
            assert difference.max() <= most
            assert difference.mean() < mean


@pytest.mark.parametrize("shape", [(8, 200), (200, 8)])
def test_a_crop_that_never_fits_is_in_the_middle(shape, generator):
    boxes = resampling.random_boxes(3, *shape, smallest=0.99, generator=generator)
    expected = {(8, 200): [0, 94, 8, 11], (200, 8): [94, 0, 11, 8]}[shape]
    assert [[int(each[k]) for each in boxes] for k in range(3)] == [expected] * 3


def test_a_batch_draws_for_each_image_alone():
    images = noise(1, 32, 32).expand(5, -1, -1, -1)
    results = augment(images, torch.Generator().manual_seed(0), size=16)
    assert len({tuple(image.flatten().tolist()) for image in results}) == 5


def test_without_crop_and_flip_images_are_resized(generator):
    images = noise(3, 32, 32)
    plain = augment(images, generator, size=48, crop=1.0, flip=False)
    expected = vision.resize(images.double(), [48, 48], MODES["bicubic"], antialias=True)
    torch.testing.assert_close(plain.double(), expected.clamp(0, 255), atol=0.5 + 1e-3, rtol=0)
    assert torch.equal(augment(images, generator, size=32, crop=1.0, flip=False), images)


def test_half_of_the_images_are_flipped(generator):
    images = noise(1, 8, 8).expand(2000, -1, -1, -1)
    flipped = (augment(images, generator, size=8, crop=1.0) != images).flatten(1).any(1)
    assert 0.45 < flipped.float().mean() < 0.55


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
        fp.mean_patch_tokens(PreparedTrunk(trunk, prepare), images).value,
        fp.mean_patch_tokens(trunk, prepare(images)).value,
    )
    prompts = fp.DeepPrompts(3, trunk, generator=generator)
    ours = PreparedTrunk(trunk, prepare)
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
    ours = PreparedTrunk(trunk, Preparation(32))
    assert isinstance(ours, fp.interfaces.Trunk)
    assert copy.deepcopy(ours) is ours
    assert fp.fingerprint(ours) == fp.fingerprint(trunk)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (partial(augment, torch.zeros(1, 3, 8, 8), size=8), "`images` must be uint8 of shape"),
        (partial(augment, torch.zeros(3, 8, 8).byte(), size=8), r"got torch.uint8 of shape \(3, 8"),
        (partial(augment, noise(1, 8, 8), size=8, crop=0.0), "`crop` must be above 0"),
        (partial(augment, noise(1, 8, 8), size=8, crop=1.1), "and at most 1; got 1.1"),
    ],
)
def test_bad_arguments(call, message, generator):
    with pytest.raises(ValueError, match=message):
        call(generator=generator)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("side", [4, 8, 11])
def test_floating_point_images_are_prepared_as_stored_ones_up_to_rounding(interpolation, side):
    stored, std = torch.randint(0, 256, (3, 3, 8, 8), dtype=torch.uint8), (0.2, 0.3, 0.4)
    prepare = Preparation(side, mean=(0.5, 0.4, 0.3), std=std, interpolation=interpolation)
    difference = (prepare(stored.float()) - prepare(stored)).abs().max()
    assert difference <= 0.501 / (255 * min(std))
