"""Clients follow guide vectors, one for each class, and the server learns guides that help them.

A client adds to its loss the squared distance between the guide of a sample's class and its logits
(-l) or features (-f). It then takes one tentative step on a study batch, and computes the loss on
its quiz images. It sends the gradient of that loss with respect to the guides, and the server
descends the mean gradient. Zhang et al., "FedL2G: Learning to Guide Local Training in Heterogeneous
Federated Learning", 2024.

Up: at most C(G + 1) numbers, which are the rows of the classes of the study batch and a weight for
each class. G is C for FedL2G-l, and D for FedL2G-f. Down: CG numbers.

Deviations: before clients follow the guides, the guides learn for two rounds, in which clients
train without guides instead of not at all. The quiz has the paper's ten images, or a quarter of
those of a smaller client. The study batch is the last one of the round. Clients do not clip
gradients, and the guide loss has a tuned weight, which is 1 in the paper.

Compared: TsingZ0/FedL2G 4db2d14 by double backward, with the deviations above, float64, largest
difference 1.1e-16 (2026-11).
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
import torch.nn as nn
from jaxtyping import Float
from torch import Tensor

import fedprompt as fp
from methods.federation import Predictions, PromptedModel, VitFederation

FAMILIES = ("mixed models",)
TRAITS = ("personalized", "different models")
SEARCH = {
    "learning_rate": (1e-3, 1e-1),
    "guide_weight": (1e-2, 1.0),
    "server_rate": (1e-1, 1e3),
}


class Guided(nn.Module):
    """Model that returns what follows the guides, and logits."""

    def __init__(self, model: PromptedModel, *, by_features: bool) -> None:
        super().__init__()
        self.model, self.by_features = model, by_features

    def forward(
        self, images: Tensor
    ) -> tuple[Float[Tensor, "batch guided"], Float[Tensor, "batch classes"]]:
        """Return the guided output and logits."""
        features = self.model.features(images)
        logits = self.model.head(features)
        return (features if self.by_features else logits), logits


def fedl2g_l(
    federation: VitFederation,
    *,
    learning_rate: float = 1e-2,
    guide_weight: float = 0.1,
    server_rate: float = 1.0,
) -> Iterator[Predictions]:
    """FedL2G-l: guides of the logits."""
    return learn_to_guide(federation, False, learning_rate, guide_weight, server_rate)


def fedl2g_f(
    federation: VitFederation,
    *,
    learning_rate: float = 1e-2,
    guide_weight: float = 0.1,
    server_rate: float = 100.0,
) -> Iterator[Predictions]:
    """FedL2G-f: guides of the features."""
    return learn_to_guide(federation, True, learning_rate, guide_weight, server_rate)


def learn_to_guide(
    federation: VitFederation, by_features: bool, rate: float, weight: float, server_rate: float
) -> Iterator[Predictions]:
    models = {client: federation.new_model(client) for client in federation.clients}
    study, quiz = {}, {}
    for client in models:
        shard, draw = federation.shards[client], federation.generator(0, client, purpose="quiz")
        size, labels = max(1, min(10, len(shard) // 4)), federation.labels[shard]
        parts = fp.data.study_quiz_split(labels, quiz_size=size, generator=draw)
        study[client], chosen = (shard[torch.as_tensor(part)] for part in parts)
        quiz[client] = federation.inputs[chosen], federation.labels[chosen]
    studied, head = replace(federation, shards=study), models[federation.clients[0]].head
    draw = federation.generator(0, purpose="guides")
    width = head.in_features if by_features else federation.num_classes
    guides = torch.randn(federation.num_classes, width, generator=draw)
    server = fp.descend(partial(torch.optim.SGD, lr=server_rate), max_norm=100.0)
    state = server.init(guides)
    for server_round in range(federation.rounds):
        followed, gradients = weight if server_round >= 2 else 0.0, []
        for client in federation.cohort(server_round):
            model = Guided(models[client], by_features=by_features)
            federation.send_down(client, {"guides": guides})
            optimizer = federation.optimizer(model, rate)
            for images, labels in studied.batches(client, server_round):
                loss = fp.guided_loss(*model(images), labels, guides, weight=followed)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            gradient = fp.guide_gradient(
                model, guides, (images, labels), quiz[client], learning_rate=rate, weight=weight
            )
            gradients.append(federation.send_up(client, {"guides": gradient})["guides"])
        guides, state = server.step(guides, fp.weighted_mean(gradients), state)
        yield Predictions(client=models.__getitem__, newcomer=federation.new_model)
