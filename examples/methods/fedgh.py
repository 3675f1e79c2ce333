"""The server trains one head on the class prototypes of all clients.

Clients train with the head that they received, and send the mean features of each class. The server
continues to train the head on these features. Yi et al., "FedGH: Heterogeneous Federated Learning
with Generalized Global Header", ACM Multimedia 2023.

Up: C(D + 1) numbers, which are a prototype and a count for each class of the client. Down: the
head, C(D + 1) numbers.

Deviations: the server takes several full-batch steps in place of one pass over the prototypes of
the round, because prototypes are few. A client predicts with the newest head of the server, as in
HtFLlib. The authors' code tests the head that the client trained.

Compared: LipingYi/FedGH ff50ac0 and TsingZ0/HtFLlib e959261, with the deviations above, float64,
largest difference 1.1e-16 (2026-11).
"""

from collections.abc import Iterator

import torch
import torch.nn as nn
import torch.nn.functional as F

import fedprompt as fp
from methods.federation import Predictions, PromptedModel, VitFederation

FAMILIES = ("mixed models",)
TRAITS = ("personalized", "different models", "adapted")
SEARCH = {"learning_rate": (1e-3, 1e-1), "server_rate": (1e-3, 1.0)}


def train_head(
    head: nn.Linear, prototypes: list[fp.Weighted], *, learning_rate: float, steps: int
) -> None:
    features = torch.cat([own.value[own.weight > 0] for own in prototypes])
    labels = torch.cat([own.weight.nonzero()[:, 0] for own in prototypes])
    optimizer = torch.optim.SGD(head.parameters(), learning_rate)
    for _ in range(steps):
        loss = F.cross_entropy(head(features), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def fedgh(
    federation: VitFederation,
    *,
    learning_rate: float = 1e-2,
    server_rate: float = 1e-1,
    server_steps: int = 20,
) -> Iterator[Predictions]:
    """FedGH."""
    models = {client: federation.new_model(client) for client in federation.clients}
    head = federation.new_model().head

    def with_head(model: PromptedModel) -> PromptedModel:
        fp.load_values(model.head, fp.snapshot(head))
        return model

    for server_round in range(federation.rounds):
        prototypes = []
        for client in federation.cohort(server_round):
            model = models[client]
            fp.load_values(model.head, federation.send_down(client, fp.snapshot(head)))
            optimizer = federation.optimizer(model, learning_rate)
            for images, labels in federation.batches(client, server_round):
                loss = F.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            with torch.no_grad():
                images, labels = federation.own(client)
                features = model.features(images)
            own = fp.class_means(features, labels, num_classes=federation.num_classes)
            prototypes.append(federation.send_up(client, {"prototypes": own})["prototypes"])
        train_head(head, prototypes, learning_rate=server_rate, steps=server_steps)
        yield Predictions(
            client=lambda client: with_head(models[client]),
            newcomer=lambda client: with_head(federation.new_model(client)),
        )
