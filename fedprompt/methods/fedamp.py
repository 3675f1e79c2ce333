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

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

import fedprompt as fp
from fedprompt.methods.registry import LEARNING_RATE, PERSONALIZED, register
from fedprompt.methods.steps import averaged, take_step
from fedprompt.methods.whole_networks import ImageSetting


@register(
    "FedAMP",
    **PERSONALIZED,
    search=LEARNING_RATE | {"proximal_weight": (1e-2, 1.0), "temperature": (1.0, 100.0)},
)
def fedamp(
    setting: ImageSetting,
    *,
    learning_rate: float = 1e-2,
    proximal_weight: float = 0.1,
    temperature: float = 10.0,
) -> fp.Method:
    """FedAMP."""
    model = setting.new_model()
    first = fp.collect(model, weight=1.0)

    def train(data, answer, state):
        center = {name: entry.value for name, entry in answer.items()}
        fp.load_values(model, state or first)
        optimizer = data.optimizer(model, learning_rate)
        for images, labels in data.batches():
            loss = F.cross_entropy(model(images), labels)
            loss = loss + proximal_weight * fp.proximal_loss(model, center)
            take_step(optimizer, loss)
        return fp.collect(model, weight=1.0), fp.snapshot(model)

    server = attentive_server(setting.named_clients, first, temperature)
    return averaged(model, train, server=server)


def attentive_server(
    clients: Sequence[int], first: fp.interfaces.Payload, temperature: float
) -> fp.Server:
    """Make the server of FedAMP, which mixes the last payloads of all clients.

    Args:
        clients: Ids of the clients.
        first: Payload of a client that has not sent any.
        temperature: Squared distance at which the weight of another client falls to 1/e.
    """
    clients = sorted(clients)

    def answer(client: int, state: fp.interfaces.State) -> Any:
        row = clients.index(client) if client in clients else -1
        return fp.aggregation.mixtures(models(state["latest"]), state["attention"][row, None])[0]

    def step(server_round: int, payloads: Mapping[int, Any], state: fp.interfaces.State) -> Any:
        latest = state["latest"] | {str(client): sent for client, sent in payloads.items()}
        return {"latest": latest, "attention": rows(latest)}

    def models(latest: Mapping[str, Any]) -> list[Any]:
        return [*(latest.get(str(client), first) for client in clients), first]  # last: a newcomer

    def rows(latest: Mapping[str, Any]) -> Float[Tensor, "rows clients"]:
        distances = fp.aggregation.distances(models(latest))
        of_clients = F.pad(attention(distances[:-1, :-1], temperature), (0, 1))
        return torch.cat([of_clients, attention(distances, temperature)[-1:]])

    return fp.Server({"latest": {}, "attention": rows({})}, answer, step, changes=False)


def attention(
    distances: Float[Tensor, "clients clients"], temperature: float
) -> Float[Tensor, "clients clients"]:
    """Weigh the models of other clients by their nearness, and the client's own by the rest."""
    others = torch.exp(-distances.square() / temperature) / len(distances)
    others.fill_diagonal_(0)
    return others + torch.diag(1 - others.sum(1))
