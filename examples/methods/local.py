"""Every client trains alone, and no message is sent.

The reference of every comparison: a federated method should be at least as accurate. A client
continues in each of its rounds from where it ended.

Up: nothing. Down: nothing.

Deviations: none.

Compared: its definition, since it has no paper, float64, largest difference 1.1e-16 (2026-11).
"""

from collections.abc import Iterator

import torch.nn.functional as F

from methods.federation import Predictions, VitFederation

FAMILIES = ("one model", "mixed models")
TRAITS = ("personalized", "different models")
SEARCH = {"learning_rate": (1e-3, 1e-1)}


def local(federation: VitFederation, *, learning_rate: float = 1e-2) -> Iterator[Predictions]:
    """Local training."""
    models = {client: federation.new_model(client) for client in federation.clients}
    for server_round in range(federation.rounds):
        for client in federation.cohort(server_round):
            optimizer = federation.optimizer(models[client], learning_rate)
            for images, labels in federation.batches(client, server_round):
                loss = F.cross_entropy(models[client](images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        yield Predictions(client=models.__getitem__, newcomer=federation.new_model)
