"""FedProto with prototypes that the server trains to lie apart from each other.

A small network of the server makes one prototype for each class. Its loss puts the prototypes of
clients nearest to the one of their class, by a margin. The margin grows with the distance between
the classes of the clients. Zhang et al., "FedTGP: Trainable Global Prototypes with
Adaptive-Margin-Enhanced Contrastive Learning for Data and Model Heterogeneity in Federated
Learning", AAAI 2024.

Up: C(D + 1) numbers, which are a prototype and a count for each class of the client. Down: from
the second round on, CD numbers and C weights, which are 1.

Deviations: the margin is as in the authors' code, the largest distance of a class to its nearest
other class. All clients count with their last prototypes, also if they are not in the round. The
server takes full-batch Adam steps in place of SGD in batches, because prototypes are few.

Compared: TsingZ0/FedTGP c77cbbb, with the deviations above, float64, largest difference 5.6e-16
(prototypes 1.4e-14) (2026-11).
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import fedprompt as fp
from fedprompt.methods.registry import LEARNING_RATE, register
from fedprompt.methods.setting import NearestPrototype, VitSetting
from fedprompt.rounds import load_optimizer, optimizer_state


def new_network(classes: int, dim: int) -> nn.Sequential:
    """Make the network from classes to prototypes."""
    layers = nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim)
    return nn.Sequential(nn.Embedding(classes, dim), *layers)


def adaptive_margin(means: fp.Weighted, threshold: float) -> float:
    """Return the largest distance of a mean to its nearest one, at most the threshold."""
    known = means.value[means.weight > 0]
    apart = torch.cdist(known, known).fill_diagonal_(torch.inf).amin(1)
    return min(apart.max().item(), threshold)


def contrastive_loss(sent: Tensor, labels: Tensor, made: Tensor, margin: float) -> Tensor:
    """Compute the loss of the server.

    Args:
        sent: Prototypes of clients (sent, dim).
        labels: Their classes (sent,).
        made: Prototypes of the server (classes, dim).
        margin: Number that is added to the distance from the prototype of the right class.
    """
    distances = torch.cdist(sent, made) + margin * F.one_hot(labels, len(made))
    return F.cross_entropy(-distances, labels)


@register(
    "FedTGP",
    families=("mixed models",),
    traits=("personalized", "different models"),
    search=LEARNING_RATE | {"prototype_weight": (1e-1, 10.0)},
)
def fedtgp(
    setting: VitSetting,
    *,
    learning_rate: float = 1e-2,
    prototype_weight: float = 1.0,
    threshold: float = 100.0,
    server_rate: float = 1e-2,
    server_steps: int = 100,
) -> fp.Method:
    """FedTGP."""
    classes, dim = setting.num_classes, setting.new_model().head.in_features
    network, every = setting.seeded(new_network, classes, dim), torch.arange(classes)
    unknown = fp.Weighted(torch.zeros(classes, dim), torch.zeros(classes))

    def train(data, answer, state):
        model, guide = setting.model(data.id, state), answer["prototypes"]
        optimizer = data.optimizer(model, learning_rate)
        for images, labels in data.batches():
            features = model.features(images)
            logits = model.head(features)
            loss = fp.guided_loss(features, logits, labels, guide, guide_weight=prototype_weight)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            images, labels = data.own()
            prototypes = fp.class_means(model.features(images), labels, num_classes=classes)
        return {"prototypes": prototypes}, fp.snapshot(model, buffers=True)

    def answer(client, state):
        return {"prototypes": state["made"]}

    def step(server_round, payloads, state):
        latest = state["latest"] | {str(c): new["prototypes"] for c, new in payloads.items()}
        entries = [latest[client] for client in sorted(latest, key=int)]
        sent = torch.cat([entry.value[entry.weight > 0] for entry in entries])
        labels = torch.cat([entry.weight.nonzero()[:, 0] for entry in entries])
        margin = adaptive_margin(fp.class_means(sent, labels, num_classes=classes), threshold)
        fp.load_values(network, state["network"])
        adam = torch.optim.Adam(network.parameters(), server_rate)
        load_optimizer(adam, state["adam"])
        for _ in range(server_steps):
            adam.zero_grad()
            contrastive_loss(sent, labels, network(every), margin).backward()
            adam.step()
        made = fp.Weighted(network(every).detach(), torch.ones(classes))
        kept = {"network": fp.snapshot(network), "adam": optimizer_state(adam)}
        return {"latest": latest, "made": made, **kept}

    def predict(data, answer, state):
        return NearestPrototype(setting.model(data.id, state), answer["prototypes"])

    def form(client):
        return {"prototypes": unknown}

    first = {"latest": {}, "made": unknown, "network": fp.snapshot(network), "adam": {}}
    return fp.Method(train, fp.Server(first, answer, step), predict, form=form)
