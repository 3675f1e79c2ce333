"""FedVPT-D with plain gradient steps: the control row of SCAFFOLD.

SCAFFOLD takes plain gradient steps, and the other methods the steps of the clients' optimizer. This
row has the former without control variates, so it shows what they add. It is FedAvg (McMahan et
al., AISTATS 2017) of prompts and head.

Up: prompts and head, L P D + D C + C numbers. Down: prompts and head.

Deviations: every client counts once in the mean, as in SCAFFOLD.

Compared: its definition, float64, largest difference 1.1e-16 (2026-11).
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

import fedprompt as fp
from methods.federation import Predictions, VitFederation

FAMILIES = ("one model",)
TRAITS = ()
SEARCH = {"learning_rate": (5e-2, 1.0)}


def plain_steps(federation: VitFederation, *, learning_rate: float = 0.3) -> Iterator[Predictions]:
    """FedVPT-D (plain steps)."""
    model, server = federation.new_model(), fp.overwrite()
    values = fp.snapshot(model)
    state = server.init(values)
    for server_round in range(federation.rounds):
        payloads = []
        for client in federation.cohort(server_round):
            fp.load_values(model, federation.send_down(client, values))
            optimizer = torch.optim.SGD(model.parameters(), learning_rate)
            for images, labels in federation.batches(client, server_round):
                loss = F.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            payloads.append(federation.send_up(client, fp.collect(model, weight=1.0)))
        values, state = server.step(values, fp.weighted_mean(payloads), state)
        fp.load_values(model, values)
        yield Predictions(everyone=model)
