"""Each client trains a private model and a messenger, which learn from each other.

Only the messenger ("meme model") is averaged over clients, so private models may differ. Both have
the same loss: cross-entropy and the divergence from the other model. Shen et al., "Federated Mutual
Learning", 2020.

Up: the messenger, PLD + K + C(D + 1) numbers with a projection of K numbers. Down: the messenger.

Deviations: none. Every client counts once, as in the authors' code. The messenger has the trunk of
the first client. A client predicts with its private model, a newcomer with the messenger. Each
batch trains both models.

Compared: ZJU-DAI/Federated-Mutual-Learning b547bbf, float64, largest difference 8.3e-17 (2026-11).
"""

from collections.abc import Iterator

import torch.nn.functional as F

import fedprompt as fp
from methods.federation import Predictions, VitFederation

FAMILIES = ("mixed models",)
TRAITS = ("personalized", "different models")
SEARCH = {"learning_rate": (1e-3, 1e-1), "alpha": (0.1, 0.9), "beta": (0.1, 0.9)}


def fml(
    federation: VitFederation,
    *,
    learning_rate: float = 1e-2,
    alpha: float = 0.5,
    beta: float = 0.5,
) -> Iterator[Predictions]:
    """FML."""
    models = {client: federation.new_model(client) for client in federation.clients}
    messenger, server = federation.new_model(0), fp.overwrite()
    values = fp.snapshot(messenger)
    state = server.init(values)
    for server_round in range(federation.rounds):
        payloads = []
        for client in federation.cohort(server_round):
            model = models[client]
            fp.load_values(messenger, federation.send_down(client, values))
            optimizers = [federation.optimizer(each, learning_rate) for each in (model, messenger)]
            for images, labels in federation.batches(client, server_round):
                own, shared = model(images), messenger(images)
                loss = alpha * F.cross_entropy(own, labels)
                loss += (1 - alpha) * fp.mutual_loss(own, shared, temperature=1.0)
                loss += beta * F.cross_entropy(shared, labels)
                loss += (1 - beta) * fp.mutual_loss(shared, own, temperature=1.0)
                for optimizer in optimizers:
                    optimizer.zero_grad()
                loss.backward()
                for optimizer in optimizers:
                    optimizer.step()
            payload = fp.collect(messenger, weight=1.0)
            payloads.append(federation.send_up(client, payload))
        values, state = server.step(values, fp.weighted_mean(payloads), state)
        fp.load_values(messenger, values)
        yield Predictions(client=models.__getitem__, newcomer=lambda client: messenger)
