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
from fedprompt.guidance import guided_loss
from fedprompt.methods.fedproto import NearestPrototype
from fedprompt.methods.registry import DIFFERENT_MODELS, LEARNING_RATE, register
from fedprompt.methods.steps import adam_steps, known_rows, prototypes, take_step
from fedprompt.methods.whole_networks import ImageSetting


def _new_network(classes: int, dim: int) -> nn.Sequential:
    """Make the network from classes to prototypes."""
    layers = nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim)
    return nn.Sequential(nn.Embedding(classes, dim), *layers)


def _adaptive_margin(means: fp.Weighted, threshold: float) -> float:
    """Return the largest distance of a mean to its nearest one, at most the threshold."""
    rows = means.value[means.weight > 0]
    apart = torch.cdist(rows, rows).fill_diagonal_(torch.inf).amin(1)
    return min(apart.max().item(), threshold)


def _contrastive_loss(sent: Tensor, labels: Tensor, made: Tensor, margin: float) -> Tensor:
    """Compute the loss of the server.

    Args:
        sent: Prototypes of clients (sent, dim).
        labels: Their classes (sent,).
        made: Prototypes of the server (classes, dim).
        margin: Number that is added to the distance from the prototype of the right class.
    """
    distances = torch.cdist(sent, made) + margin * F.one_hot(labels, len(made))
    return F.cross_entropy(-distances, labels)


def _server(
    network: nn.Module, unknown: fp.Weighted, threshold: float, rate: float, steps: int
) -> fp.Server:
    """Make the server, which trains a prototype of each class on the last ones of all clients."""
    classes = torch.arange(len(unknown.weight))

    def answer(client, state):
        return {"prototypes": state["made"]}

    def step(server_round, payloads, state):
        latest = state["latest"] | {str(c): sent["prototypes"] for c, sent in payloads.items()}
        sent, labels = known_rows([latest[client] for client in sorted(latest, key=int)])
        means = fp.class_means(sent, labels, num_classes=len(classes))
        margin = _adaptive_margin(means, threshold)

        def loss():
            return _contrastive_loss(sent, labels, network(classes), margin)

        trained = adam_steps(network, loss, state, learning_rate=rate, steps=steps)
        made = fp.Weighted(network(classes).detach(), torch.ones(len(classes)))
        return {"latest": latest, "made": made, **trained}

    first = {"latest": {}, "made": unknown, "values": fp.snapshot(network), "adam": {}}
    return fp.Server(first, answer, step)


@register("FedTGP", **DIFFERENT_MODELS, search=LEARNING_RATE | {"prototype_weight": (1e-1, 10.0)})
def fedtgp(
    setting: ImageSetting,
    *,
    learning_rate: float = 1e-2,
    prototype_weight: float = 1.0,
    threshold: float = 100.0,
    server_rate: float = 1e-2,
    server_steps: int = 100,
) -> fp.Method:
    """FedTGP."""
    dim = setting.new_model(0).head.in_features
    network = setting.seeded(_new_network, setting.num_classes, dim)
    unknown = setting.unknown_rows(dim)

    def train(data, answer, state):
        model = setting.model(data.id, state)
        guide = answer["prototypes"]
        optimizer = data.optimizer(model, learning_rate)
        for images, labels in data.batches():
            features = model.features(images)
            logits = model.head(features)
            loss = guided_loss(features, logits, labels, guide, guide_weight=prototype_weight)
            take_step(optimizer, loss)
        return {"prototypes": prototypes(model, data)}, fp.snapshot(model, buffers=True)

    def predict(data, answer, state):
        return NearestPrototype(setting.model(data.id, state), answer["prototypes"])

    server = _server(network, unknown, threshold, server_rate, server_steps)
    return fp.Method(train, server, predict, form=lambda client: {"prototypes": unknown})
