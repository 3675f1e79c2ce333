"""The server sends each client a mixture of all models, with more weight for similar ones.

The weight of another client decreases with the squared distance of the two models. A client trains
its own model and keeps it near the mixture. Huang et al., "Personalized Cross-Silo Federated
Learning on Non-IID Data", AAAI 2021.

Up: prompts and head, L P D + D C + C numbers. Down: a mixture of prompts and heads, as many.

Deviations: the paper's step of the server is its temperature divided by the number of clients. So
the weights are at least 0, and at an infinite temperature they give the mean. `proximal_weight` is
the paper's lambda divided by this step. Only the cohort trains in a round, and the server mixes the
last models of all clients. Training continues from a client's own model.

Compared: TsingZ0/PFLlib d832e76 and equations of the paper, with the deviations above, float64,
largest difference 8e-17 (2026-11).
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

import fedprompt as fp
from methods.federation import Message, Predictions, PromptedModel, VitFederation

FAMILIES = ("one model",)
TRAITS = ("personalized",)
SEARCH = {
    "learning_rate": (1e-3, 1e-1),
    "proximal_weight": (1e-2, 1.0),
    "temperature": (1.0, 100.0),
}


def fedamp(
    federation: VitFederation,
    *,
    learning_rate: float = 1e-2,
    proximal_weight: float = 0.1,
    temperature: float = 10.0,
) -> Iterator[Predictions]:
    """FedAMP."""
    model = federation.new_model()
    first = fp.collect(model, weight=1.0)
    own = dict.fromkeys(federation.clients, first)

    def personal(client: int) -> PromptedModel:
        fp.load_values(model, own[client])
        return model

    def received(client: int) -> PromptedModel:
        fp.load_values(model, mixed([*own.values(), first], temperature)[-1])
        return model

    for server_round in range(federation.rounds):
        mixtures = dict(zip(own, mixed(list(own.values()), temperature), strict=True))
        for client in federation.cohort(server_round):
            mixture = federation.send_down(client, mixtures[client])
            center = {name: entry.value for name, entry in mixture.items()}
            optimizer = federation.optimizer(personal(client), learning_rate)
            for images, labels in federation.batches(client, server_round):
                loss = F.cross_entropy(model(images), labels)
                loss = loss + proximal_weight * fp.proximal_loss(model, center)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            own[client] = federation.send_up(client, fp.collect(model, weight=1.0))
        yield Predictions(client=personal, newcomer=received)


def mixed(payloads: Sequence[Message], temperature: float) -> list[Message]:
    return fp.mixtures(payloads, attention(fp.distances(payloads), temperature))


def attention(distances: Tensor, temperature: float) -> Tensor:
    others = torch.exp(-distances.square() / temperature) / len(distances)
    others = others.fill_diagonal_(0)
    return others + torch.diag(1 - others.sum(1))
