"""Clients send the mean features of each class, and pull features to the means over all clients.

The mean of a class over the clients that have it is its prototype. The loss of a client adds the
squared distance of each sample's features to the prototype of its class. The class of the nearest
prototype is predicted. Tan et al., "FedProto: Federated Prototype Learning across Heterogeneous
Clients", AAAI 2022.

Up: C(D + 1) numbers, which are a prototype and a count for each class of the client. Down: the
same, for each known class.

Deviations: clients that are not in a round count with their last prototypes, so that a prototype
does not lose the classes of absent clients. The squared distance is the mean over the D numbers, as
in the authors' code. Means are weighted by counts, as in the paper, where the authors' code counts
clients equally. The paper's factor 1/N before a mean that is weighted by counts is left out,
because it would shrink prototypes.

Compared: yuetan031/FedProto 97e42e2 and Equation 6 of the paper, with the deviations above,
float64, largest difference 3e-16 (2026-11).
"""

from collections.abc import Iterator

import torch

import fedprompt as fp
from methods.federation import NearestPrototype, Predictions, PromptedModel, VitFederation

FAMILIES = ("mixed models",)
TRAITS = ("personalized", "different models")
SEARCH = {"learning_rate": (1e-3, 1e-1), "prototype_weight": (1e-1, 10.0)}


def fedproto(
    federation: VitFederation, *, learning_rate: float = 1e-2, prototype_weight: float = 1.0
) -> Iterator[Predictions]:
    """FedProto."""
    classes = federation.num_classes
    models = {client: federation.new_model(client) for client in federation.clients}
    width = models[federation.clients[0]].head.in_features
    prototypes, latest = fp.Weighted(torch.zeros(classes, width), torch.zeros(classes)), {}

    def nearest(model: PromptedModel) -> NearestPrototype:
        return NearestPrototype(model, prototypes)

    for server_round in range(federation.rounds):
        for client in federation.cohort(server_round):
            model = models[client]
            if server_round > 0:
                federation.send_down(client, {"prototypes": prototypes})
            optimizer = federation.optimizer(model, learning_rate)
            for images, labels in federation.batches(client, server_round):
                features = model.features(images)
                logits = model.head(features)
                loss = fp.guided_loss(features, logits, labels, prototypes, weight=prototype_weight)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            with torch.no_grad():
                images, labels = federation.own(client)
                own = fp.class_means(model.features(images), labels, num_classes=classes)
            latest[client] = federation.send_up(client, {"prototypes": own})["prototypes"]
        prototypes = fp.weighted_mean(latest.values())
        yield Predictions(
            client=lambda client: nearest(models[client]),
            newcomer=lambda client: nearest(federation.new_model(client)),
        )
