"""FedMix: its loss is the first-order expansion of mixup with mean images."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedprompt.methods.fedmix import fedmix, means, mixed_loss
from fedprompt.methods.fedvpt import fedvpt_d
from tiny_federations import last, parameters, vit_federation


def mixup(model, images, labels, others, their, mix):
    logits = model((1 - mix) * images + mix * others)
    return (1 - mix) * F.cross_entropy(logits, labels) + mix * F.cross_entropy(logits, their)


def test_the_difference_from_mixup_is_of_second_order():
    """Half the mix gives a quarter of the difference."""
    federation = vit_federation()
    model = federation.new_model()
    images, labels = federation.own(0)
    pool = means(federation.data(1, 0), 3)
    drawn = torch.arange(len(images)) % len(pool["images"])
    given = images, labels, pool["images"][drawn], pool["labels"][drawn]
    with torch.no_grad():
        model.head.weight *= 100
    large, small = (
        (mixed_loss(model, *given, mix) - mixup(model, *given, mix)).item() for mix in (0.05, 0.025)
    )
    assert large > 1e-3
    assert large / small == pytest.approx(4, rel=0.1)


def test_with_mix_zero_it_is_fedavg_bitwise():
    mixed = parameters(last(fedmix, vit_federation(), mix=0.0), 0)
    with sdpa_kernel(SDPBackend.MATH):
        plain = parameters(last(fedvpt_d, vit_federation()), 0)
    assert all(torch.equal(value, mixed[name]) for name, value in plain.items())


def test_groups_of_one_image_are_the_images_and_one_group_is_their_mean():
    federation = vit_federation()
    images, labels = federation.own(3)
    single, whole = (means(federation.data(3, 0), size) for size in (1, 9))
    order = torch.cdist(single["images"].flatten(1), images.flatten(1)).argmin(1)
    assert sorted(order.tolist()) == list(range(9))
    assert torch.equal(single["images"], images[order])
    assert torch.equal(single["labels"].argmax(1), labels[order])
    torch.testing.assert_close(whole["images"][0], images.mean(0))
    torch.testing.assert_close(whole["labels"][0], torch.bincount(labels, minlength=3) / 9)


def test_each_mean_is_sent_up_once_and_down_once_to_each_client():
    """All five clients in both rounds; 2, 2, 2, 2 and 1 groups of at most five images."""
    federation, plain = vit_federation(cohort_size=5), vit_federation(cohort_size=5)
    last(fedmix, federation)
    last(fedvpt_d, plain)
    one = 4 * (8 * 8 + 3)
    for direction, count in (("up", 9), ("down", 5 * 9)):
        extra = federation.ledger.total(direction=direction) - plain.ledger.total(
            direction=direction
        )
        assert extra == count * one
