"""Divisions of images in the papers' settings."""

import numpy as np
import pytest
import torch

from tasks.division import divide, divided_anew
from tasks.papers import Partition
from tasks.sets import Images, ImageSet


def shards_of(partition: Partition, labels: torch.Tensor, num_clients: int) -> list[torch.Tensor]:
    draw = np.random.default_rng(0)
    domains = torch.zeros_like(labels)
    return divide(partition, labels, domains, num_clients=num_clients, generator=draw)


def classes_of(labels: torch.Tensor, shards: list[torch.Tensor]) -> list[set[int]]:
    return [set(labels[shard].tolist()) for shard in shards]


def test_numbers_of_classes_that_do_not_fit_leave_out_as_few_classes_as_possible() -> None:
    labels = torch.arange(102).repeat(6)  # as many classes as Flowers102
    owned = classes_of(labels, shards_of(Partition(kind="classes", classes=10), labels, 20))
    assert [len(each) for each in owned] == [10] * 20
    owners = [sum(label in each for each in owned) for label in range(102)]
    assert sorted(owners) == [0] * 2 + [2] * 100


@pytest.mark.parametrize("shots", [1, 4])
def test_clients_without_common_classes_have_the_shots_of_their_classes(shots: int) -> None:
    labels = torch.arange(47).repeat(6)
    partition = Partition(kind="classes", disjoint=True, shots=shots)
    shards = shards_of(partition, labels, 10)
    owned = classes_of(labels, shards)
    assert sorted(label for each in owned for label in each) == list(range(47))
    assert sorted(len(each) for each in owned) == [4] * 3 + [5] * 7
    assert all((torch.bincount(labels[shard]) % shots == 0).all() for shard in shards)
    assert sum(len(shard) for shard in shards) == 47 * shots


def small_task() -> ImageSet:
    """Return two domains with 12 and 8 images of each of three classes; pixels are numbers."""
    labels = torch.arange(3).repeat(20)
    domains = torch.zeros(60, dtype=torch.int64)
    domains[36:] = 1
    pixels = torch.arange(60, dtype=torch.uint8)[:, None, None, None]
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))
    train, test = (
        Images(pixels[chosen], labels[chosen], domains[chosen]) for chosen in order.split([45, 15])
    )
    return ImageSet("small", train, test, ("a", "b", "c"), ("one", "two"))


def test_pooled_images_are_held_out_by_class_and_domain() -> None:
    task = small_task()
    new = divided_anew(task, 0.25, generator=np.random.default_rng(0))
    pixels = torch.cat([new.train.pixels, new.test.pixels]).flatten().sort().values
    assert torch.equal(pixels, torch.arange(60, dtype=torch.uint8))
    cells = 3 * new.test.domains + new.test.labels
    assert torch.bincount(cells).tolist() == [3, 3, 3, 2, 2, 2]  # a quarter of 12 and of 8
    for images in (new.train, new.test):
        numbers = images.pixels.flatten().long()
        assert torch.equal(images.labels, numbers % 3)
        assert torch.equal(images.domains, (numbers >= 36).long())


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_smallest_client_has_the_share_of_the_partition(share: float) -> None:
    labels, sizes = torch.arange(1000) % 10, []
    partition = Partition(kind="dirichlet", alpha=0.1, min_share=share)
    for seed in range(10):
        how = {"num_clients": 5, "generator": np.random.default_rng(seed)}
        shards = divide(partition, labels, torch.zeros_like(labels), **how)
        sizes.append(min(len(shard) for shard in shards))
    assert (min(sizes) >= 100) == (share > 0)
