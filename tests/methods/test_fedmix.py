"""FedMix: its loss is the first-order expansion of mixup with mean images."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedprompt.methods.fedmix import _means, _mixed_loss, fedmix
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
    pool = _means(federation.data(1, 0), 3)
    drawn = torch.arange(len(images)) % len(pool["images"])
    given = images, labels, pool["images"][drawn], pool["labels"][drawn]
    with torch.no_grad():
        model.head.weight *= 100
    large, small = (
        (_mixed_loss(model, *given, mix) - mixup(model, *given, mix)).item()
        for mix in (0.05, 0.025)
    )
    assert large > 1e-3
    assert large / small == pytest.approx(4, rel=0.1)


def test_with_mix_zero_it_is_fedavg_bitwise():
    mixed = parameters(last(fedmix, vit_federation(), mix=0.0), 0)
    with sdpa_kernel(SDPBackend.MATH):
        plain = parameters(last(fedvpt_d, vit_federation()), 0)
    assert all(torch.equal(value, mixed[name]) for name, value in plain.items())


def test_images_that_are_left_over_join_the_groups():
    """Nine images make groups of five and four, and none of one image."""
    data = vit_federation().data(3, 0)
    found, (images, labels) = _means(data, 4), data.own()
    for name, whole in (("images", images), ("labels", F.one_hot(labels).float())):
        assert len(found[name]) == 2
        torch.testing.assert_close(5 * found[name][0] + 4 * found[name][1], whole.sum(0))


def test_each_mean_is_sent_up_once_and_down_once_to_each_client():
    """All five clients in both rounds; 6, 8, 7, 9 and 5 images in groups of at least three."""
    federation, plain = vit_federation(cohort_size=5), vit_federation(cohort_size=5)
    last(fedmix, federation, group_size=3)
    last(fedvpt_d, plain)
    one = 4 * (8 * 8 + 3)
    groups = 2 + 2 + 2 + 3 + 1
    for direction, count in (("up", groups), ("down", 5 * groups)):
        extra = federation.ledger.total(direction=direction) - plain.ledger.total(
            direction=direction
        )
        assert extra == count * one
