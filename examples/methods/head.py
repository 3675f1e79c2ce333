"""Clients train a linear head on frozen features, and the server averages it.

There are no prompts, so the features never change. The reference shows how much prompts add.

Up: head, D C + C numbers. Down: head.

Deviations: none.

Compared: its definition, since it has no paper, float64, largest difference 1.1e-16 (2026-11).
"""

from collections.abc import Iterator

import torch.nn.functional as F

import fedprompt as fp
from methods.federation import Predictions, VitFederation

FAMILIES = ("one model",)
TRAITS = ()
SEARCH = {"learning_rate": (1e-3, 1e-1)}


def head_tuning(federation: VitFederation, *, learning_rate: float = 3e-2) -> Iterator[Predictions]:
    """Head tuning."""
    model, server = federation.new_model(prompts=lambda trunk: None), fp.overwrite()
    values = fp.snapshot(model)
    state = server.init(values)
    for server_round in range(federation.rounds):
        payloads = []
        for client in federation.cohort(server_round):
            fp.load_values(model, federation.send_down(client, values))
            optimizer = federation.optimizer(model, learning_rate)
            for images, labels in federation.batches(client, server_round):
                loss = F.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            payload = fp.collect(model, weight=federation.num_examples(client))
            payloads.append(federation.send_up(client, payload))
        values, state = server.step(values, fp.weighted_mean(payloads), state)
        fp.load_values(model, values)
        yield Predictions(everyone=model)
