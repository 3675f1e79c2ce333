"""FedTGP: the margin adapts to the classes, and the server's loss is the stated one."""

import math

import pytest
import torch

import fedprompt as fp
from fedprompt.methods.fedtgp import _adaptive_margin, _contrastive_loss, fedtgp
from sent_messages import sent_by
from tiny_federations import after_rounds, mixed_federation


def test_the_margin_is_the_largest_distance_to_a_nearest_class_up_to_the_threshold():
    """Classes at 0, 3 and 10 have their nearest class at 3, 3 and 7. The last one is unknown."""
    means = fp.Weighted(
        torch.tensor([[0.0], [3.0], [10.0], [99.0]]), torch.tensor([2.0, 1.0, 4.0, 0.0])
    )
    assert _adaptive_margin(means, 100.0) == pytest.approx(7.0)
    assert _adaptive_margin(means, 5.0) == 5.0


def test_the_loss_adds_the_margin_to_the_distance_to_the_own_class_alone():
    """A prototype at 1 has distances 1 and 3; with margin 0.5 its own distance counts as 1.5."""
    loss = _contrastive_loss(
        torch.tensor([[1.0]]), torch.tensor([0]), torch.tensor([[0.0], [4.0]]), 0.5
    )
    own, other = math.exp(-1.5), math.exp(-3.0)
    assert loss.item() == pytest.approx(-math.log(own / (own + other)))


def test_the_broadcast_is_what_the_server_trained():
    made = mixed_federation()
    messages = sent_by(made)
    rounds = after_rounds(fedtgp, made)
    after = [predictions.of(0).prototypes for predictions in rounds]
    sent = [message["prototypes"] for number, _, message in messages.of("down") if number == 1]
    assert all(torch.equal(each.value, after[0]) for each in sent)
    assert not torch.equal(*after)
