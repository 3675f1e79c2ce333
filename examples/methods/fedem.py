"""Each client mixes the same few models with its own weights, which it learns by EM.

In the E-step a client computes the probability of each component for each of its images, by Bayes'
rule from its mixture weights and the losses. In the M-step its weights become the mean of these
probabilities, and its loss is the sum of the components' losses, weighted by them. The server
averages each component. Marfoq et al., "Federated Multi-Task Learning under a Mixture of
Distributions" (FedEM), NeurIPS 2021.

Up: prompts and head of each component. Down: prompts and head of each component.

Deviations: batches are augmented. So the probabilities for the images of a batch are computed in
each step, from the losses of that step. A batch needs a forward pass of every component. Only the
clients of a round count in the mean. The authors' code also averages the old models of absent
clients. A newcomer mixes the components equally, where the paper runs EM on its data.

Compared: omarfoq/FedEM 996fadd, with the deviations above, float64, largest difference 1.1e-16
(2026-11).
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import fedprompt as fp
from methods.federation import Predictions, VitFederation

FAMILIES = ("one model",)
TRAITS = ("personalized", "adapted")
SEARCH = {"learning_rate": (1e-3, 1e-1), "num_components": [2, 3]}


class Mixture(nn.Module):
    """Components with different initial values, and the mixture weights of a client."""

    def __init__(self, federation: VitFederation, number: int) -> None:
        super().__init__()
        seeds = [federation.seed + 1000 * each for each in range(number)]
        self.components = nn.ModuleList(
            replace(federation, seed=seed).new_model() for seed in seeds
        )
        self.register_buffer("weights", torch.full((number,), 1 / number))

    def forward(self, images: Tensor) -> Tensor:
        """Compute the logarithm of the mixture of the components' probabilities."""
        logits = torch.stack([component(images) for component in self.components], 1)
        return (logits.log_softmax(-1) + self.weights.log()[:, None]).logsumexp(1)

    def losses(self, images: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss of each component for each image, (images, components)."""
        each = [F.cross_entropy(one(images), labels, reduction="none") for one in self.components]
        return torch.stack(each, 1)


def posterior(losses: Tensor, weights: Tensor) -> Tensor:
    return (weights.log() - losses.detach()).softmax(1)


def fedem(
    federation: VitFederation, *, learning_rate: float = 1e-2, num_components: int = 3
) -> Iterator[Predictions]:
    """FedEM."""
    model, server = Mixture(federation, num_components), fp.overwrite()
    values, uniform, own = fp.snapshot(model), model.weights.clone(), {}
    state = server.init(values)

    def load(client: int) -> Mixture:
        fp.load_values(model, values | {"weights": own.get(client, uniform)})
        return model

    for server_round in range(federation.rounds):
        payloads = []
        for client in federation.cohort(server_round):
            fp.load_values(load(client), federation.send_down(client, values))
            with torch.no_grad():
                losses = model.losses(*federation.own(client))
                own[client] = posterior(losses, model.weights).mean(0)
            optimizer = federation.optimizer(model, learning_rate)
            for images, labels in federation.batches(client, server_round):
                losses = model.losses(images, labels)
                loss = (posterior(losses, own[client]) * losses).sum(1).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            payload = fp.collect(model, weight=federation.num_examples(client))
            payloads.append(federation.send_up(client, payload))
        values, state = server.step(values, fp.weighted_mean(payloads), state)
        yield Predictions(client=load, newcomer=load)
