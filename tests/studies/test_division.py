"""Divisions of images in the papers' settings."""

import numpy as np
import pytest
import torch

from studies import papers
from studies.division import concentration, divide
from studies.papers import Partition


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


SETTINGS = list(papers.settings("fedhpl").values())
SIZES = {"cifar10": 10 * [5000], "cifar100": 100 * [500]}
SIZES["svhn"] = [4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659]
SHARE = {"cifar10": 0.01, "cifar100": 0.1, "svhn": 0.005}  # Section C.5.4


@pytest.mark.parametrize("data", SIZES)
def test_clients_of_fedhpl_have_the_classes_and_sizes_of_the_paper(data: str) -> None:
    """No client lacks a class; those of IID and Dir have 10,000 images, as Table 10 counts."""
    sizes = torch.tensor(SIZES[data])
    labels = torch.arange(len(sizes)).repeat_interleave(sizes)
    for partition in {setting.partition for setting in SETTINGS if setting.data == data}:
        if partition.shots is not None:
            continue
        shards = shards_of(partition, labels, 5)
        counts = torch.stack([labels[shard].bincount() for shard in shards])
        equal = {"cifar10": 10_000, "cifar100": 10_000, "svhn": 14_651}[data]
        if partition.kind != "dirichlet":
            assert (counts.sum(1) - equal).abs().max() <= 1
        least = torch.floor(SHARE[data] * sizes.double() + 1e-6)
        assert (counts >= least).all()
        assert (counts == least).any() or partition.kind != "dirichlet"


def test_random_concentrations_sum_to_one() -> None:
    labels, draw = torch.arange(3).repeat(9).numpy(), np.random.default_rng(0)
    for axis, name in enumerate(("clients", "classes")):
        alpha = concentration(name, labels, 4, draw)
        np.testing.assert_allclose(alpha.sum(axis), np.ones((3, 4)[axis]))
        assert (alpha > 0).all()


def test_the_cap_holds_in_each_domain() -> None:
    """A client that has a fifth of its domain gets none of further classes."""
    labels, domains = torch.arange(10).repeat(60).sort().values, torch.arange(600) % 2
    partition = Partition(kind="domains", alpha=0.1, capped=True)
    how = {"num_clients": 10, "generator": np.random.default_rng(0)}
    for shard in divide(partition, labels, domains, **how):
        counts = labels[shard].bincount(minlength=10)
        assert not counts[1:][counts.cumsum(0)[:-1] >= 60].any()
