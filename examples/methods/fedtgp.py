"""FedProto with prototypes that the server trains to lie apart from each other.

A small network of the server makes one prototype for each class. Its loss puts the prototypes of
clients nearest to that of their class, by a margin. The margin grows with the distance between the
classes of the clients. Zhang et al., "FedTGP: Trainable Global Prototypes with
Adaptive-Margin-Enhanced Contrastive Learning for Data and Model Heterogeneity in Federated
Learning", AAAI 2024.

Up: C(D + 1) numbers, which are a prototype and a count for each class of the client. Down: CD
numbers.

Deviations: the margin is that of the authors' code, the largest distance of a class to its nearest
other class. All clients count with their last prototypes, also if they are not in the round. The
server takes full-batch Adam steps in place of SGD in batches, because prototypes are few.

Compared: TsingZ0/FedTGP c77cbbb, with the deviations above, float64, largest difference 5.6e-16
(prototypes 1.4e-14) (2026-11).
"""

from collections.abc import Iterator

import torch
import torch.nn as nn
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

import fedprompt as fp
from methods.federation import NearestPrototype, Predictions, PromptedModel, VitFederation

FAMILIES = ("mixed models",)
TRAITS = ("personalized", "different models")
SEARCH = {"learning_rate": (1e-3, 1e-1), "prototype_weight": (1e-1, 10.0)}


def new_network(classes: int, dim: int) -> nn.Sequential:
    layers = nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim)
    return nn.Sequential(nn.Embedding(classes, dim), *layers)


def adaptive_margin(means: fp.Weighted, threshold: float) -> float:
    known = means.value[means.weight > 0]
    apart = torch.cdist(known, known).fill_diagonal_(torch.inf).amin(1)
    return min(apart.max().item(), threshold)


def contrastive_loss(
    sent: Float[Tensor, "sent dim"], labels: Int[Tensor, "sent"], made: Tensor, margin: float
) -> Float[Tensor, ""]:
    distances = torch.cdist(sent, made) + margin * F.one_hot(labels, len(made))
    return F.cross_entropy(-distances, labels)


def fedtgp(
    federation: VitFederation,
    *,
    learning_rate: float = 1e-2,
    prototype_weight: float = 1.0,
    threshold: float = 100.0,
    server_rate: float = 1e-2,
    server_steps: int = 100,
) -> Iterator[Predictions]:
    """FedTGP."""
    classes, latest = federation.num_classes, {}
    models = {client: federation.new_model(client) for client in federation.clients}
    dim = models[federation.clients[0]].head.in_features
    network = new_network(classes, dim)
    server = torch.optim.Adam(network.parameters(), server_rate)
    prototypes = fp.Weighted(torch.zeros(classes, dim), torch.zeros(classes))

    def nearest(model: PromptedModel) -> NearestPrototype:
        return NearestPrototype(model, prototypes)

    for server_round in range(federation.rounds):
        for client in federation.cohort(server_round):
            model = models[client]
            if server_round > 0:
                federation.send_down(client, {"prototypes": prototypes.value})
            optimizer = federation.optimizer(model, learning_rate)
            for images, labels in federation.batches(client, server_round):
                features = model.features(images)
                guided = features, model.head(features), labels, prototypes
                loss = fp.guided_loss(*guided, weight=prototype_weight)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            with torch.no_grad():
                images, labels = federation.own(client)
                own = fp.class_means(model.features(images), labels, num_classes=classes)
            latest[client] = federation.send_up(client, {"prototypes": own})["prototypes"]
        sent = torch.cat([own.value[own.weight > 0] for own in latest.values()])
        labels = torch.cat([own.weight.nonzero()[:, 0] for own in latest.values()])
        margin = adaptive_margin(fp.class_means(sent, labels, num_classes=classes), threshold)
        for _ in range(server_steps):
            loss = contrastive_loss(sent, labels, network(torch.arange(classes)), margin)
            server.zero_grad()
            loss.backward()
            server.step()
        prototypes = fp.Weighted(network(torch.arange(classes)).detach(), torch.ones(classes))
        yield Predictions(
            client=lambda client: nearest(models[client]),
            newcomer=lambda client: nearest(federation.new_model(client)),
        )
