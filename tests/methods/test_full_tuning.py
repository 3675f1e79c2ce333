"""Full tuning: all parameters of the network and the head, averaged."""

import copy

import pytest
import torch
import torch.nn.functional as F

from fedprompt.methods.full_tuning import full_tuning
from low_rank import ONE_ROUND, RATE, initial, mean
from tiny_federations import descend, last, parameters, vit_federation

pytestmark = pytest.mark.usefixtures("float64")


def test_the_server_has_the_mean_of_networks_that_clients_train():
    federation = vit_federation(**ONE_ROUND)
    found = parameters(last(full_tuning, federation, learning_rate=RATE), 0)
    sent = []
    for client in range(5):
        network, head = copy.deepcopy(federation.trunk.model), torch.nn.Linear(8, 3)
        network.requires_grad_()
        for parameter, value in zip(head.parameters(), initial(federation)[:2], strict=True):
            parameter.data = value.clone()
        own = [*head.parameters(), *network.parameters()]
        for images, labels in federation.batches(client, 0):
            descend(F.cross_entropy(head(network(images)), labels), own, RATE)
        sent.append([each.detach() for each in own])
    torch.testing.assert_close(list(found.values()), mean(federation, sent))
    assert not any(each.requires_grad for each in federation.trunk.model.parameters())
