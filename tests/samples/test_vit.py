"""The digits and the ViTs: metadata of weights, split and domains, and a repeatable recipe."""

import hashlib
import json
from functools import partial

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from scipy.ndimage import map_coordinates
from sklearn.datasets import load_digits

import build_samples
from build_samples import build, glyphs
from fedprompt import samples
from fedprompt.samples import _pixels, networks
from refusals import refused

SIZES = ("S", "B", "L")
# Parameters of timm's ViTs of width/depth/heads 48/3/3, 64/4/4 and 96/4/6 with a head of 47
# classes. The numbers were recorded before these weights were trained.
NUM_PARAMETERS = {"S": 88_895, "B": 205_359, "L": 455_471}


def committed(size):
    """Return the path of the committed weights of a size."""
    folder = build_samples.LARGE.parent if size == "L" else networks._FOLDER
    return build.weights_path(size, folder)


def load(size, folder=None):
    """Load the whole model of a size, by default with the committed weights."""
    path = committed(size) if folder is None else build.weights_path(size, folder)
    return networks._read_vit(path, with_head=True)


def metadata_of(path):
    with safe_open(path, framework="pt") as file:
        return file.metadata()


@pytest.fixture(scope="module")
def upright():
    """Return all real digits, in the domain of the printed glyphs."""
    train_images, train_labels, test_images, test_labels = samples.digits()
    return torch.cat([train_images, test_images]), torch.cat([train_labels, test_labels])


@pytest.mark.parametrize("size", SIZES)
def test_committed_weights_are_those_their_metadata_describes(size):
    path = committed(size)
    metadata, weights = metadata_of(path), load_file(path)
    model = load(size)

    stored = b"".join(weights[name].numpy().tobytes() for name in sorted(weights))
    assert metadata["sha256"] == hashlib.sha256(stored).hexdigest()
    assert metadata["recipe"] == build.RECIPE
    assert metadata["classes"] == glyphs.CLASSES
    assert {tensor.dtype for tensor in weights.values()} == {torch.float16}

    architecture = json.loads(metadata["architecture"])
    assert architecture["embed_dim"] == weights["cls_token"].shape[-1] == model.embed_dim
    assert (
        architecture["depth"]
        == len(model.blocks)
        == len({name.split(".")[1] for name in weights if "blocks" in name})
    )
    assert architecture["num_heads"] == model.blocks[0].attn.num_heads
    assert sum(tensor.numel() for tensor in weights.values()) == NUM_PARAMETERS[size]
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, weights[name].float())


@pytest.mark.parametrize("size", SIZES)
def test_loaded_trunk_is_the_whole_model_without_its_head(size, upright):
    images = upright[0][:32]
    whole, trunk = load(size), build_samples.vit(size)
    weights = load_file(committed(size))
    with torch.inference_mode():
        logits = trunk(images) @ weights["head.weight"].float().T + weights["head.bias"].float()
        torch.testing.assert_close(logits, whole(images))
    assert not trunk.training


test_wrong_arguments_are_refused_with_the_choices = refused(globals())("""
samples.vit("L") -> ValueError: `size` must be one of 'S', 'B'; got 'L'.
samples.digits(-1) -> ValueError: `seed` must be at least 0; got -1.
samples.digits(num_test=0) -> ValueError: `num_test` must be at least 1; got 0.
samples.digits(num_test=1797) -> ValueError: `num_test` must be less than all 1797 digits;
samples.digits(domain="raw") -> TypeError: `domain` must be a function of images, such as
""")


def test_digits_are_a_partition_of_all_real_digits():
    train_images, train_labels, test_images, test_labels = samples.digits(3, num_test=97)
    assert (len(train_images), len(test_images)) == (1700, 97)
    train, test = (
        {image.numpy().tobytes() for image in images} for images in (train_images, test_images)
    )
    assert not train & test
    assert len(train | test) == 1797  # scikit-learn's images are all different

    # Each image still has its own label.
    images, labels = (
        _pixels.enlarge(torch.from_numpy(load_digits().images).float()),
        load_digits().target,
    )
    by_image = {image.numpy().tobytes(): label for image, label in zip(images, labels, strict=True)}
    found = [by_image[image.numpy().tobytes()] for image in torch.cat([train_images, test_images])]
    assert torch.cat([train_labels, test_labels]).tolist() == found


def test_digits_follow_their_seed_only():
    first, again, other = samples.digits(1), samples.digits(1), samples.digits(2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first.train_labels, other.train_labels)


def test_a_domain_in_place_leaves_later_digits_as_they_are():
    before = samples.digits().test_images.clone()
    assert not samples.digits(domain=torch.Tensor.zero_).test_images.any()
    assert torch.equal(samples.digits().test_images, before)


def test_enlarging_is_bilinear_interpolation():
    # The size is doubled and pixel centers are aligned. Each new pixel is 3/4 of its own old pixel
    # plus 1/4 of the nearer neighbor, which is the pixel itself at the border.
    weights = torch.zeros(16, 8)
    for old in range(8):
        for new, neighbor in ((2 * old, old - 1), (2 * old + 1, old + 1)):
            weights[new, old] += 0.75
            weights[new, min(max(neighbor, 0), 7)] += 0.25
    ink = torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(0)) * 16
    expected = weights @ (ink / ink.flatten(1).max(1).values[:, None, None]) @ weights.T
    torch.testing.assert_close(_pixels.enlarge(ink), expected[:, None])


def test_domains_by_hand():
    image = torch.tensor([[0.0, 0.25], [0.5, 1.0]])[None, None]
    expected = {
        samples.raw: [[0.0, 0.25], [0.5, 1.0]],
        samples.inverted: [[1.0, 0.75], [0.5, 0.0]],
        samples.rotated: [[0.25, 1.0], [0.0, 0.5]],  # the right column becomes the top row
        samples.inverted_rotated: [[0.75, 0.0], [1.0, 0.5]],
    }
    for domain, pixel_values in expected.items():
        assert domain(image)[0, 0].tolist() == pixel_values


def test_noise_has_the_given_deviation():
    noise = (
        samples.noisy(
            torch.full((500, 1, 16, 16), 0.5), torch.Generator().manual_seed(0), deviation=0.2
        )
        - 0.5
    )
    # With 128,000 draws, the standard error of the mean is 0.2 / 358 and that of the deviation is
    # 0.2 / 506. The tolerances are five standard errors.
    assert noise.mean().item() == pytest.approx(0, abs=5 * 0.2 / 358)
    assert noise.std().item() == pytest.approx(0.2, abs=5 * 0.2 / 506)


def test_a_warp_is_a_rotation_of_a_slanted_stretched_image_that_is_shifted():
    """Independent reference: positions by hand, in pixels, and SciPy's interpolation."""
    size, draw = 16, partial(torch.randn, generator=torch.Generator().manual_seed(1))
    image = torch.rand(1, 1, size, size, generator=torch.Generator().manual_seed(0))
    strengths = {"rotation": 0.3, "scale": 0.2, "shear": 0.1, "shift": 0.15}
    warped = _pixels.warp(image, torch.Generator().manual_seed(1), **strengths)
    angle = 0.3 * draw(1).item()
    (wide, high), slant = (1 + 0.2 * draw(1, 2)[0]).tolist(), 0.1 * draw(1).item()
    right, down = (0.15 * draw(1, 2, 1)[0, :, 0]).tolist()
    y, x = np.meshgrid(*[(2 * np.arange(size) + 1) / size - 1] * 2, indexing="ij")
    x, y = wide * x + slant * y, high * y
    x, y = np.cos(angle) * x - np.sin(angle) * y, np.sin(angle) * x + np.cos(angle) * y
    at = [((each + 1) * size - 1) / 2 for each in (y + down, x + right)]
    expected = map_coordinates(image[0, 0].numpy(), at, order=1, mode="nearest")
    np.testing.assert_allclose(warped[0, 0].numpy(), expected, atol=1e-4)


def test_each_image_is_augmented_independently_and_keeps_its_position():
    images, labels, _, _ = samples.digits(0)
    before = images.clone()
    warped = samples.augment(images, torch.Generator().manual_seed(0))
    assert torch.equal(images, before)
    assert torch.equal(warped, samples.augment(images, torch.Generator().manual_seed(0)))
    nearest = torch.cdist(warped.flatten(1), images.flatten(1)).argmin(1)
    # A mild warp preserves the digit. The measured share is 0.98. Shuffled labels would give 0.1.
    assert (labels[nearest] == labels).float().mean().item() > 0.95
    copies = samples.augment(images[:1].expand(50, -1, -1, -1), torch.Generator().manual_seed(0))
    assert len(copies.unique(dim=0)) == 50


def test_an_elastic_field_bends_at_the_four_points_of_its_grid_alone(generator):
    """Values of the image are the numbers of its columns, so that they change as positions do."""
    columns = torch.arange(16.0).expand(3, 1, 16, 16)
    still = dict.fromkeys(("rotation", "scale", "shear", "shift"), 0.0)
    moved = _pixels.warp(columns, generator, **still, elastic=0.02)[..., 1:-1]  # pixels 1 to 14
    bends = moved.diff(n=2).abs().amax((0, 1, 2)) > 1e-3
    assert (bends.nonzero()[:, 0] + 2).tolist() == [5, 10]


def test_the_global_random_state_does_not_change():
    before_torch = torch.get_rng_state()
    before_numpy = np.random.get_state()[1].copy()  # noqa: NPY002  (this state must not be used)
    images, labels = glyphs.render(1, np.random.default_rng(0))
    generator = torch.Generator().manual_seed(0)
    model = build.new_model(build.VisionTransformer, build.ARCHITECTURES["S"], 0)
    build.pretrain(model, images, labels, generator, steps=2)
    samples.vit("S")
    samples.noisy(samples.augment(samples.digits(0).train_images, generator), generator)
    assert torch.equal(torch.get_rng_state(), before_torch)
    assert np.array_equal(np.random.get_state()[1], before_numpy)  # noqa: NPY002
