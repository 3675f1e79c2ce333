"""The server treats the movement of the average as a gradient and takes a step of an optimizer.

FedAvgM adds momentum (Hsu et al., "Measuring the Effects of Non-Identical Data Distribution for
Federated Visual Classification", 2019). FedAdam and FedYogi scale each coordinate by its past
movements (Reddi et al., "Adaptive Federated Optimization", ICLR 2021).

Up: prompts and head, L P D + D C + C numbers. Down: prompts and head.

Deviations: clients use the optimizer of all methods, and not plain gradient steps. The server rate
of FedAvgM is 1. FedAdam and FedYogi have the paper's decays, 0.9 and 0.99, and its adaptivity,
0.001. All three weight clients by their numbers of examples.

Compared: equations of the papers, with the deviations above, float64, largest difference 6.7e-16
(2026-11).
"""

from collections.abc import Iterator

import torch.nn.functional as F

import fedprompt as fp
from methods.federation import Predictions, VitFederation

FAMILIES = ("one model",)
TRAITS = ()
SEARCH = {
    "learning_rate": (1e-3, 1e-1),
    "momentum": [0.3, 0.5, 0.7, 0.9],
    "server_rate": (1e-3, 1e-1),
}


def fedavgm(
    federation: VitFederation, *, learning_rate: float = 1e-2, momentum: float = 0.5
) -> Iterator[Predictions]:
    """FedAvgM."""
    return optimized(federation, fp.fedavgm(momentum=momentum), learning_rate)


def fedadam(
    federation: VitFederation, *, learning_rate: float = 1e-2, server_rate: float = 2e-2
) -> Iterator[Predictions]:
    """FedAdam."""
    return optimized(federation, fp.fedadam(learning_rate=server_rate), learning_rate)


def fedyogi(
    federation: VitFederation, *, learning_rate: float = 1e-2, server_rate: float = 2e-2
) -> Iterator[Predictions]:
    """FedYogi."""
    return optimized(federation, fp.fedyogi(learning_rate=server_rate), learning_rate)


def optimized(
    federation: VitFederation, server: fp.ServerUpdate, learning_rate: float
) -> Iterator[Predictions]:
    model = federation.new_model()
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
