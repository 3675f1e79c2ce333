"""The sizes that FedHPL's Table 9 gives for its baselines, counted by the ledger.

Features have 512 numbers there, and numbers have 4 bytes here.
"""

import pytest
import torch

from fedprompt.methods.feddistill import feddistill
from fedprompt.methods.fedgen import _FeatureGenerator, fedgen
from fedprompt.methods.fedgh import fedgh
from fedprompt.methods.fedhe import fedhe
from fedprompt.methods.fedmd import fedmd
from fedprompt.methods.fedproto import fedproto
from fedprompt.methods.fedtgp import _new_network, fedtgp
from tiny_federations import last, vit_federation

UPLOADS = [  # and numbers for each public image
    *((method, n, 513 * n, 0) for method in (fedgh, fedproto, fedtgp) for n in (10, 100)),
    # Counts of labels and three weights are in place of the labels of all images.
    *((fedgen, n, 513 * n + n + 3, 0) for n in (10, 100)),
    *((fedmd, n, 0, n + 1) for n in (20, 110)),  # private and ten public classes
    *((fedhe, n, n * (n + 1), 0) for n in (10, 100)),
    (feddistill, 10, 110, 0),
]


def federation(classes):
    """Two clients with different numbers of images, each with all classes in every batch."""
    total = 2 * classes + 3
    rng = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(total, 1, 8, 8, generator=rng), torch.arange(total) % classes
    shards = dict(enumerate(torch.arange(total).split([classes, classes + 3])))
    data = {"inputs": inputs, "labels": labels, "shards": shards, "num_classes": classes}
    budget = {"clients": [0, 1], "cohort_size": 2, "batch_size": 2 * classes, "rounds": 1}
    return vit_federation(**data, **budget, steps=1, num_features=512)


@pytest.mark.parametrize(("method", "classes", "numbers", "public"), UPLOADS)
def test_a_client_sends_as_many_numbers_as_table_9_gives(method, classes, numbers, public):
    made = federation(classes)
    few = {"server_steps": 1} if method in (fedgen, fedgh, fedtgp) else {}
    last(method, made, **few)
    for client in made.clients:
        sent = made.ledger.total(direction="up", client=client)
        assert sent == 4 * (numbers + public * len(made.public))
        if method is fedgh:  # which distributes the head
            assert made.ledger.total(direction="down", client=client) == 4 * numbers


@pytest.mark.parametrize(
    ("make", "classes", "millions"),
    [
        (_FeatureGenerator, 10, 0.507),
        (_FeatureGenerator, 100, 0.551),
        (_new_network, 10, 0.506),
        (_new_network, 100, 0.550),
    ],
)
def test_the_networks_of_the_server_have_the_sizes_of_table_9(make, classes, millions):
    count = sum(each.numel() for each in make(classes, 512).parameters())
    assert round(count / 2**20, 3) == millions
