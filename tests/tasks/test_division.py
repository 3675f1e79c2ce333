"""Divisions of images in the papers' settings."""

import numpy as np
import pytest
import torch

from tasks.division import divide
from tasks.papers import Partition


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


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_smallest_client_has_the_share_of_the_partition(share: float) -> None:
    labels, sizes = torch.arange(1000) % 10, []
    partition = Partition(kind="dirichlet", alpha=0.1, min_share=share)
    for seed in range(10):
        how = {"num_clients": 5, "generator": np.random.default_rng(seed)}
        shards = divide(partition, labels, torch.zeros_like(labels), **how)
        sizes.append(min(len(shard) for shard in shards))
    assert (min(sizes) >= 100) == (share > 0)
