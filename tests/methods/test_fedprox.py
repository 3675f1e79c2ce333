"""FedProx: its step follows the stated objective."""

import torch
import torch.nn.functional as F

import fedprompt as fp
from fedprompt.methods.fedprox import fedprox
from tiny_federations import ONE_CLIENT, descend, last, parameters, vit_federation


def test_the_second_step_descends_the_stated_objective():
    """At the first step of a round, the proximal term has gradient 0."""
    federation = vit_federation(**ONE_CLIENT)
    found = parameters(last(fedprox, federation, learning_rate=0.5, proximal_weight=0.8), 0)
    model = federation.new_model()
    start = fp.snapshot(model)
    for images, labels in federation.batches(0, 0):
        distance = sum((p - start[name]).square().sum() for name, p in model.named_parameters())
        objective = F.cross_entropy(model(images), labels) + 0.8 / 2 * distance
        descend(objective, model.parameters(), 0.5)
    torch.testing.assert_close(found, fp.snapshot(model))
