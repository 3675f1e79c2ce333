"""Every client learns a context before the class names alone, and no message is sent.

CoOp (Zhou et al., "Learning to Prompt for Vision-Language Models", IJCV 2022) is the local
reference of CLIP methods. A client continues in each of its rounds from where it ended.

Up: nothing. Down: nothing.

Deviations: the optimizer is that of all methods, without the schedule of the paper.

Compared: equations of the paper, float64, largest difference 6.9e-15 (2026-11).
"""

from collections.abc import Iterator

import torch.nn.functional as F

from methods.federation import ClipFederation, Predictions

FAMILIES = ("CLIP",)
TRAITS = ("personalized",)
SEARCH = {"learning_rate": (1e-3, 1e-1)}


def coop(federation: ClipFederation, *, learning_rate: float = 1e-2) -> Iterator[Predictions]:
    """CoOp (local)."""
    models = {client: federation.new_model(client) for client in federation.clients}
    for server_round in range(federation.rounds):
        for client in federation.cohort(server_round):
            optimizer = federation.optimizer(models[client], learning_rate)
            for tokens, labels in federation.batches(client, server_round):
                loss = F.cross_entropy(models[client](tokens), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        yield Predictions(client=models.__getitem__, newcomer=federation.new_model)
