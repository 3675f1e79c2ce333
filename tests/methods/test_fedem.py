"""FedEM: an E-step is Bayes' rule, and an M-step descends the likelihood of the mixture."""

from dataclasses import replace

import torch

from fedprompt.methods import fedem
from tiny_federations import ONE_CLIENT, descend, last, vit_federation


def test_two_rounds_are_those_of_em_by_hand(float64):
    """A prediction mixes probabilities, with the weights of the client or with equal ones."""
    federation = vit_federation(**ONE_CLIENT | {"rounds": 2})
    models = [replace(federation, seed=1000 * component).new_model() for component in range(3)]
    weights = torch.full((3,), 1 / 3)

    def mixed(images):
        parts = torch.stack([model(images).softmax(1) for model in models])
        return torch.einsum("w, w i c -> w i c", weights, parts)

    for server_round in range(2):
        images, labels = federation.own(0)
        joint = mixed(images)[:, range(len(labels)), labels].detach()
        weights = (joint / joint.sum(0)).mean(1)
        for images, labels in federation.batches(0, server_round):
            likelihood = mixed(images).sum(0)[range(len(labels)), labels]
            values = [each for model in models for each in model.parameters()]
            descend(-likelihood.log().mean(), values, 0.5)
    predictions = last(fedem, federation, learning_rate=0.5)
    found = predictions.of(0)
    assert weights.max() - weights.min() > 1e-3
    torch.testing.assert_close(found.weights, weights)
    torch.testing.assert_close(found(federation.inputs).exp(), mixed(federation.inputs).sum(0))
    torch.testing.assert_close(predictions.received(5).weights, torch.full((3,), 1 / 3))
