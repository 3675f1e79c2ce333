"""Each client trains a personal model next to the global one, and keeps it near the broadcast.

The global model is that of FedAvg. Each step of the personal model minimizes the loss of the batch
plus half the squared distance to the broadcast, times a weight. Li et al., "Ditto: Fair and Robust
Federated Learning Through Personalization", ICML 2021.

Up: prompts and head, L P D + D C + C numbers. Down: prompts and head.

Deviations: the paper leaves the start of a personal model open. Here it is the broadcast of the
client's first round. Both models are trained with the same batches, so there are twice as many
backward passes. Every client counts once, as in the authors' code, which draws clients by their
number of examples. Here all clients are equally likely.

Compared: litian96/ditto 26d9b29, with the deviations above, float64, largest difference 8.3e-17
(2026-11).
"""

from collections.abc import Iterator

import torch.nn.functional as F

import fedprompt as fp
from methods.federation import Predictions, PromptedModel, VitFederation

FAMILIES = ("one model",)
TRAITS = ("personalized",)
SEARCH = {"learning_rate": (1e-3, 1e-1), "proximal_weight": (1e-2, 1.0)}


def ditto(
    federation: VitFederation, *, learning_rate: float = 1e-2, proximal_weight: float = 0.1
) -> Iterator[Predictions]:
    """Ditto."""
    model, server, own = federation.new_model(), fp.overwrite(), {}
    values = fp.snapshot(model)
    state = server.init(values)

    def personal(client: int) -> PromptedModel:
        fp.load_values(model, own.get(client, values))
        return model

    def train(client: int, server_round: int, weight: float) -> None:
        optimizer = federation.optimizer(model, learning_rate)
        for images, labels in federation.batches(client, server_round):
            loss = F.cross_entropy(model(images), labels)
            loss = loss + weight * fp.proximal_loss(model, values)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    for server_round in range(federation.rounds):
        payloads = []
        for client in federation.cohort(server_round):
            fp.load_values(model, federation.send_down(client, values))
            train(client, server_round, 0.0)
            payload = fp.collect(model, weight=1.0)
            payloads.append(federation.send_up(client, payload))
            personal(client)
            train(client, server_round, proximal_weight)
            own[client] = fp.snapshot(model)
        values, state = server.step(values, fp.weighted_mean(payloads), state)
        yield Predictions(client=personal, newcomer=personal)
