"""Clients train their own head first, then the shared prompts.

Half of the batches of a round fit the head to the received prompts. The other half trains the
prompts behind the fitted head, and only prompts are sent. Every client counts once in the mean.
Collins et al., "Exploiting Shared
Representations for Personalized Federated Learning", ICML 2021.

Up: prompts, L P D numbers. Down: prompts.

Deviations: the paper takes more steps for the head than for the representation. Here each has half
of the batches.

Compared: lgcollins/FedRep d82e629, with the deviations above, float64, largest difference 1.1e-16
(2026-11).
"""

from collections.abc import Iterator
from itertools import islice

import torch
import torch.nn.functional as F

import fedprompt as fp
from methods.federation import Batch, Predictions, PromptedModel, VitFederation

FAMILIES = ("one model",)
TRAITS = ("personalized",)
SEARCH = {"learning_rate": (1e-3, 1e-1)}


def fedrep(federation: VitFederation, *, learning_rate: float = 2e-2) -> Iterator[Predictions]:
    """FedRep."""
    model, server = federation.new_model(), fp.overwrite()
    values, first_head = (fp.snapshot(model, only=[part]) for part in ("prompts", "head"))
    heads, state = {}, server.init(values)

    def personal(client: int) -> PromptedModel:
        fp.load_values(model, values | heads.get(client, first_head))
        return model

    for server_round in range(federation.rounds):
        payloads = []
        for client in federation.cohort(server_round):
            federation.send_down(client, values)
            personal(client)
            batches = federation.batches(client, server_round)
            with fp.training_only(model, model.head):
                optimizer = federation.optimizer(model, learning_rate)
                train(model, optimizer, islice(batches, federation.steps // 2))
            with fp.training_only(model, model.prompts):
                train(model, federation.optimizer(model, learning_rate), batches)
            heads[client] = fp.snapshot(model, only=["head"])
            payload = fp.collect(model, weight=1.0, only=["prompts"])
            payloads.append(federation.send_up(client, payload))
        values, state = server.step(values, fp.weighted_mean(payloads), state)
        yield Predictions(client=personal, newcomer=personal)


def train(model: PromptedModel, optimizer: torch.optim.Optimizer, batches: Iterator[Batch]) -> None:
    for images, labels in batches:
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
