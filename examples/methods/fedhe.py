"""Clients send the mean logits of each class, and learn from the running mean of all that was sent.

Logits are collected during training, so no further forward pass is needed. Clients need not be
synchronized: the server adds each message to its mean when it is received. Chan and Ngai, "FedHe:
Heterogeneous Models and Communication-Efficient Federated Learning", MSN 2021.

Up: C(C + 1) numbers, which are mean logits and a count for each class in the batches. Down: the
same, for each known class.

Deviations: the server averages at the end of a round and never restarts its mean. The authors' code
restarts it after every ten messages a client, which are more than the rounds of this study.
Distillation begins in the second round, and not after as many messages as there are clients.

Compared: ChanYunHin/FedHe c2684c3, with the deviations above, float64, largest difference 1.4e-16
(2026-11).
"""

from collections.abc import Iterator

import torch

import fedprompt as fp
from methods.federation import Predictions, VitFederation

FAMILIES = ("mixed models",)
TRAITS = ("personalized", "different models")
SEARCH = {"learning_rate": (1e-3, 1e-1), "distillation_weight": (1e-2, 10.0)}


def fedhe(
    federation: VitFederation, *, learning_rate: float = 1e-2, distillation_weight: float = 1e-1
) -> Iterator[Predictions]:
    """FedHe."""
    classes = federation.num_classes
    models = {client: federation.new_model(client) for client in federation.clients}
    teacher = fp.Weighted(torch.zeros(classes, classes), torch.zeros(classes))
    for server_round in range(federation.rounds):
        sent = []
        for client in federation.cohort(server_round):
            model, pieces = models[client], []
            if server_round > 0:
                federation.send_down(client, {"logits": teacher})
            optimizer = federation.optimizer(model, learning_rate)
            for images, labels in federation.batches(client, server_round):
                logits = model(images)
                loss = fp.guided_loss(logits, logits, labels, teacher, weight=distillation_weight)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                pieces.append(fp.class_means(logits.detach(), labels, num_classes=classes))
            payload = {"logits": fp.weighted_mean(pieces)}
            mean = federation.send_up(client, payload)["logits"]
            sent.append(fp.Weighted(mean.value, mean.weight.sign()))  # one vote each
        teacher = fp.weighted_mean([teacher, *sent])
        yield Predictions(client=models.__getitem__, newcomer=federation.new_model)
