"""Parts of a run that few settings need, such as borders, smallest clients and clusters."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn as nn

import fedprompt as fp
from embedded.zoo import GROUPS, TINY, encoder
from fedprompt.methods.fedhpl import fedhpl
from fedprompt.methods.sgpt import sgpt
from studies.gallery.tasks import Trial
from studies.papers import borders
from studies.papers.borders import PixelTrunk
from studies.papers.clusters import SUPERCLASSES, cluster_accuracy, purity
from studies.papers.division import divide
from studies.papers.federations import VitEpochs
from studies.papers.floats import FloatPreparation
from studies.papers.setting import Partition
from studies.pipeline import Preparation
from tiny_federations import last, vit_federation
from tiny_federations import trunk as tiny_trunk

SIDE = 6


def pixel_trunk(width: int) -> PixelTrunk:
    torch.manual_seed(width)
    network = nn.Sequential(nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.AdaptiveMaxPool2d(1))
    network.append(nn.Flatten())
    border = partial(fp.PadPrompts, SIDE, padding=2)
    return PixelTrunk(fp.freeze(network).eval(), width, lambda images: images / 255, border)


def federation(trunks: list[PixelTrunk]) -> VitEpochs:
    images = torch.rand(12, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0)) * 255
    return VitEpochs(
        inputs=images,
        labels=torch.arange(12) % 3,
        shards={0: torch.arange(5), 1: torch.arange(5, 12)},
        clients=range(2),
        num_classes=3,
        rounds=2,
        cohort_size=2,
        batch_size=4,
        seed=0,
        public=images[:0],
        epochs=1,
        device=torch.device("cpu"),
        make_optimizer=torch.optim.SGD,
        trunks=trunks,
    )


def test_border_and_head_of_a_convolutional_network_are_trained_and_the_network_is_not():
    trunks = [pixel_trunk(4), pixel_trunk(6)]
    before = [{name: value.clone() for name, value in each.network.state_dict().items()}
              for each in trunks]  # fmt: skip
    made = federation(trunks)
    start = made.new_model(1)
    predictions = last(fedhpl, made, learning_rate=0.1)
    for trunk, values in zip(trunks, before, strict=True):
        for name, value in trunk.network.state_dict().items():
            assert torch.equal(value, values[name]), name
    trained = dict(predictions.of(1).named_parameters())
    assert sorted(trained) == ["head.bias", "head.weight", "prompts.columns", "prompts.rows"]
    for name, value in start.named_parameters():
        assert not torch.equal(value, trained[name]), name


def test_border_of_a_model_is_around_the_prepared_images():
    trunk = pixel_trunk(4)
    model, images = federation([trunk]).new_model(), torch.rand(2, 3, SIDE, SIDE) * 255
    bordered = model.prompts(images / 255)
    assert bordered.shape == (2, 3, SIDE + 4, SIDE + 4)
    assert torch.equal(bordered[:, :, 2:-2, 2:-2], images / 255)
    expected = nn.functional.linear(trunk.network(bordered), model.head.weight, model.head.bias)
    torch.testing.assert_close(model(images), expected)


@pytest.mark.parametrize(
    ("trunk", "shape", "part_of"),
    [
        (pixel_trunk(4), (3, SIDE, SIDE), lambda trunk: (trunk.network, "forward")),
        (tiny_trunk(8), (1, 8, 8), lambda trunk: (trunk, "embed")),
    ],
)
def test_many_images_are_encoded_in_parts_with_equal_gradients(trunk, shape, part_of, monkeypatch):
    monkeypatch.setattr(borders, "PART", 5)
    model, images, sizes = federation([trunk]).new_model(), torch.rand(12, *shape), []
    owner, name = part_of(trunk)
    encode = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda part: sizes.append(len(part)) or encode(part))
    with torch.no_grad():
        without = model(images)
    assert sizes == [5, 5, 2]
    parameters = [each for each in model.parameters() if each.requires_grad]
    results = []
    for part in (5, 12):
        monkeypatch.setattr(borders, "PART", part)
        found = model(images)
        gradients = torch.autograd.grad(found.square().sum(), parameters)
        results.append([found.detach(), *gradients])
    assert sizes[3:] == [5, 5, 2, *sizes[6:9], 12]
    assert sorted(sizes[6:9]) == [2, 5, 5]  # computed again in the backward pass
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(without, results[1][0])


def test_larger_batches_than_a_part_are_refused():
    with pytest.raises(ValueError, match=r"`batch_size` must be at most 128; got 129\."):
        replace(federation([pixel_trunk(4)]), batch_size=129)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("side", [4, 8, 11])
def test_floating_point_images_are_prepared_as_stored_ones_up_to_rounding(interpolation, side):
    stored = torch.randint(0, 256, (3, 3, 8, 8), dtype=torch.uint8)
    std = (0.2, 0.3, 0.4)
    inner = Preparation(side, mean=(0.5, 0.4, 0.3), std=std, interpolation=interpolation)
    prepare = FloatPreparation(inner)
    assert torch.equal(prepare(stored), inner(stored))
    step = 1 / (255 * min(std))
    difference = (prepare(stored.float()) - inner(stored)).abs().max()
    assert difference <= 0.501 * step


def test_floating_point_images_have_gradients():
    inner = Preparation(5, interpolation="bilinear")
    images = (torch.rand(1, 3, 4, 4, dtype=torch.float64) * 255).requires_grad_()
    prepare = FloatPreparation(inner.double())
    # A bilinear filter has positive weights with the sum 1, so a mean over rows is one, too.
    (gradient,) = torch.autograd.grad(prepare(images.float()).sum(), images)
    assert gradient.sum().item() == pytest.approx(3 * 25 / (255 * 0.5), rel=1e-4)


def test_training_images_are_floating_point_on_request():
    made = replace(federation([pixel_trunk(4)]), floats=True)
    made.inputs = made.inputs.byte()
    assert made.own(0)[0].dtype == torch.float32
    assert torch.equal(made.own(0)[0], made.inputs[made.shards[0]].float())
    assert {images.dtype for images, _ in made.batches(0, 0)} == {torch.float32}


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_smallest_client_has_the_share_of_the_partition(share):
    labels = torch.arange(1000) % 10
    partition = Partition(kind="dirichlet", alpha=0.1, min_share=share)
    sizes = []
    for seed in range(10):
        rng = np.random.default_rng(seed)
        shards = divide(partition, labels, torch.zeros_like(labels), num_clients=5, generator=rng)
        sizes.append(min(len(each) for each in shards))
    assert (min(sizes) >= 100) == (share > 0)


def test_superclasses_of_cifar100_have_five_classes_each():
    assert np.bincount(SUPERCLASSES).tolist() == [5] * 20
    # Maple, oak, palm, pine and willow; baby, boy, girl, man and woman.
    assert len({SUPERCLASSES[tree] for tree in (47, 52, 56, 59, 96)}) == 1
    assert len({SUPERCLASSES[person] for person in (2, 11, 35, 46, 98)}) == 1


def test_groups_are_as_pure_as_counted_by_hand():
    kinds = torch.tensor([0, 0, 1, 1, 1, 2])
    # Group 0 has kinds 0, 0 and 1; group 2 has 1, 1 and 2; group 1 is empty.
    assert purity(torch.tensor([0, 0, 0, 2, 2, 2]), kinds) == pytest.approx(4 / 6)
    assert purity(torch.zeros(6, dtype=torch.int64), kinds) == pytest.approx(3 / 6)


def test_one_group_for_all_images_of_cifar100_has_the_five_percent_of_the_paper():
    superclasses = torch.tensor(SUPERCLASSES).repeat(3)
    assert purity(torch.zeros(300, dtype=torch.int64), superclasses) == pytest.approx(0.05)


def test_clusters_are_those_of_the_groups_that_sgpt_selects_for_the_test_images():
    federation = vit_federation(num_classes=100, labels=torch.arange(60) % 100)
    predictions = last(sgpt, federation, num_groups=2)
    images, cells = federation.inputs[:20], torch.arange(20)
    trial = Trial(federation, images, cells, torch.ones(1, 100), ())
    model = predictions.of(0)
    nearest = torch.cosine_similarity(model.query(images)[:, None], model.selector.keys, dim=2)
    expected = purity(nearest.argmax(1), torch.tensor(SUPERCLASSES)[cells])
    assert cluster_accuracy(predictions, trial) == pytest.approx(expected)


@pytest.mark.parametrize("name", list(TINY))
def test_tiny_networks_return_features_of_their_width_and_can_be_trained(name):
    network, width = encoder("tiny", list(TINY).index(name), 16)
    assert network.training
    assert network(torch.rand(2, 1, 16, 16)).shape == (2, width)
    assert 4_000 < sum(parameter.numel() for parameter in network.parameters()) < 150_000


@pytest.mark.parametrize(
    "name",
    [name if name == "tiny" else pytest.param(name, marks=pytest.mark.slow) for name in GROUPS],
)
def test_groups_are_named_after_their_number_of_networks(name):
    assert name == "tiny" or name.removeprefix("HtFE").removeprefix("HtM") == str(len(GROUPS[name]))
    with torch.device("meta"):  # no values are computed
        widths = [
            encoder(name, client, 16 if name == "tiny" else 32)[1]
            for client in range(len(GROUPS[name]))
        ]
    expected = {
        "cnn": 512,
        "resnet4": 64,
        "resnet8": 256,
        "resnet18": 512,
        "resnet152": 2048,
        "mobilenet_v2": 1280,
        "vit_b_32": 768,
    }
    for network, width in zip(GROUPS[name], widths, strict=True):
        assert name == "tiny" or width == expected.get(network, width)
