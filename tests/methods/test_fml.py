"""FML: the private model and the messenger descend the stated objectives."""

import torch
import torch.nn.functional as F

import fedprompt as fp
from fedprompt.methods.fml import fml
from tiny_federations import ONE_CLIENT, descend, last, mixed_federation


def test_steps_descend_both_stated_objectives(float64):
    """At first, both heads are 0, so only the second step shows the divergences."""
    made = mixed_federation(**ONE_CLIENT | {"steps": 2, "clients": [1]})
    predictions = last(fml, made, learning_rate=0.5, alpha=0.3, beta=0.6)
    private, messenger = made.new_model(1), made.new_model(0)
    for images, labels in made.batches(1, 0):
        logits = private(images), messenger(images)
        for k, share in enumerate((0.3, 0.6)):
            own, other = logits[k], logits[1 - k].detach().softmax(1)
            divergence = (other * (other.log() - own.log_softmax(1))).sum(1).mean()
            objective = share * F.cross_entropy(own, labels) + (1 - share) * divergence
            descend(objective, (private, messenger)[k].parameters(), 0.5)
    torch.testing.assert_close(fp.snapshot(predictions.of(1).own), fp.snapshot(private))
    found = fp.snapshot(predictions.received(5).shared)
    torch.testing.assert_close(found, fp.snapshot(messenger))
