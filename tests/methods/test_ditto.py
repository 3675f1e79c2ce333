"""Ditto: personal models between local training and the broadcast, which is that of FedAvg."""

import torch
import torch.nn.functional as F

import fedprompt as fp
from fedprompt.methods.ditto import ditto
from tiny_federations import descend, last, parameters, vit_federation


def test_a_personal_step_descends_the_loss_and_half_the_distance_to_the_broadcast():
    """In the second round, the personal model is far from the broadcast at the first step."""
    changes = {"cohort_size": 5, "steps": 1, "make_optimizer": torch.optim.SGD}
    rates = {"learning_rate": 0.5, "proximal_weight": 0.6}
    first = last(ditto, vit_federation(**changes, rounds=1), **rates)
    before, broadcast = parameters(first, 2), fp.snapshot(first.received(5))
    federation = vit_federation(**changes)
    model = federation.new_model()
    fp.load_values(model, before)
    ((images, labels),) = federation.batches(2, 1)
    distance = sum((p - broadcast[name]).square().sum() for name, p in model.named_parameters())
    objective = F.cross_entropy(model(images), labels) + 0.6 / 2 * distance
    descend(objective, model.parameters(), 0.5)
    found = parameters(last(ditto, federation, **rates), 2)
    torch.testing.assert_close(found, fp.snapshot(model))
    assert (before["head.weight"] - broadcast["head.weight"]).abs().max() > 1e-3
