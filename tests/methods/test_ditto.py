"""Ditto: personal models between local training and the broadcast, which is that of FedAvg."""

import pytest
import torch
import torch.nn.functional as F

import fedprompt as fp
from fedprompt.methods.ditto import ditto
from fedprompt.methods.fedvpt import fedvpt_d
from fedprompt.methods.local import local
from tiny_federations import last, parameters, vit_federation


@pytest.mark.parametrize("weight", [0.0, 0.7])
def test_the_global_model_is_that_of_fedavg_for_every_weight(weight):
    shards = dict(enumerate(torch.arange(41).split(8)))  # the means are equal for equal shards
    received = last(ditto, vit_federation(shards=shards), proximal_weight=weight).received(5)
    expected = parameters(last(fedvpt_d, vit_federation(shards=shards)), 0)
    found = fp.snapshot(received)
    assert all(torch.equal(value, found[name]) for name, value in expected.items())


def test_without_the_proximal_term_personal_models_are_those_of_local_training():
    personal = last(ditto, vit_federation(cohort_size=5), proximal_weight=0.0)
    alone = last(local, vit_federation(cohort_size=5))
    for client in range(5):
        torch.testing.assert_close(
            parameters(personal, client), parameters(alone, client), rtol=0, atol=0
        )


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
    gradients = torch.autograd.grad(objective, list(model.parameters()))
    expected = {
        name: before[name] - 0.5 * gradient
        for name, gradient in zip(before, gradients, strict=True)
    }
    torch.testing.assert_close(parameters(last(ditto, federation, **rates), 2), expected)
    assert (before["head.weight"] - broadcast["head.weight"]).abs().max() > 1e-3
