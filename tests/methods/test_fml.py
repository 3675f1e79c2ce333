"""FML: the private model and the messenger descend the stated objectives."""

import torch
import torch.nn.functional as F

import fedprompt as fp
from fedprompt.methods.fml import fml
from tiny_federations import ONE_CLIENT, descend, last, mixed_federation


def test_a_step_descends_both_stated_objectives(float64):
    made = mixed_federation(**ONE_CLIENT | {"steps": 1, "clients": [1]})
    predictions = last(fml, made, learning_rate=0.5, alpha=0.3, beta=0.6)
    private, messenger = made.new_model(1), made.new_model(0)
    images, labels = next(made.batches(1, 0))
    logits = private(images), messenger(images)
    found = fp.snapshot(predictions.of(1).own), fp.snapshot(predictions.received(5).shared)
    for k, share in enumerate((0.3, 0.6)):
        own, other = logits[k], logits[1 - k].detach().softmax(1)
        divergence = (other * (other.log() - own.log_softmax(1))).sum(1).mean()
        objective = share * F.cross_entropy(own, labels) + (1 - share) * divergence
        model = (private, messenger)[k]
        descend(objective, model.parameters(), 0.5)
        torch.testing.assert_close(found[k], fp.snapshot(model))
