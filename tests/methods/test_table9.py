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

UPLOADS = [
    (fedgen, 10, lambda own, public: 5130 + 10 + 3),  # counts of labels and three weights,
    (fedgen, 100, lambda own, public: 51300 + 100 + 3),  # in place of the labels of all images
    (fedgh, 10, lambda own, public: 5130),
    (fedgh, 100, lambda own, public: 51300),
    (fedproto, 10, lambda own, public: 5130),
    (fedproto, 100, lambda own, public: 51300),
    (fedtgp, 10, lambda own, public: 5130),
    (fedtgp, 100, lambda own, public: 51300),
    (fedmd, 20, lambda own, public: 21 * public),  # ten private and ten public classes
    (fedmd, 110, lambda own, public: 111 * public),
    (fedhe, 10, lambda own, public: 110),
    (fedhe, 100, lambda own, public: 10100),
    (feddistill, 10, lambda own, public: 110),
]


def federation(classes):
    """Two clients with different numbers of images, each with all classes in every batch."""
    total = 2 * classes + 3
    rng = torch.Generator().manual_seed(0)
    return vit_federation(
        inputs=torch.randn(total, 1, 8, 8, generator=rng),
        labels=torch.arange(total) % classes,
        shards=dict(enumerate(torch.arange(total).split([classes, classes + 3]))),
        clients=[0, 1],
        cohort_size=2,
        batch_size=2 * classes,
        num_classes=classes,
        num_features=512,
        rounds=1,
        steps=1,
    )


@pytest.mark.parametrize(("method", "classes", "numbers"), UPLOADS)
def test_a_client_sends_as_many_numbers_as_table_9_gives(method, classes, numbers):
    made = federation(classes)
    few = {"server_steps": 1} if method in (fedgen, fedgh, fedtgp) else {}
    last(method, made, **few)
    for client in made.clients:
        sent = made.ledger.total(direction="up", client=client)
        assert sent == 4 * numbers(made.num_examples(client), len(made.public))


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


@pytest.mark.parametrize("classes", [10, 100])
def test_fedgh_distributes_the_head_of_table_9(classes):
    made = federation(classes)
    last(fedgh, made, server_steps=1)
    assert made.ledger.total(direction="down", client=0) == 4 * {10: 5130, 100: 51300}[classes]
