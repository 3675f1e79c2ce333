"""Clients send the mean logits of each class, and learn from the mean of the other clients.

The teacher of a client leaves its logits out, so that it does not learn from itself. The loss is
the cross-entropy to the softmax of the teacher. Logits are collected during training. Jeong et al.,
"Communication-Efficient On-Device Machine Learning:
Federated Distillation and Augmentation under Non-IID Private Data", NeurIPS workshop 2018.

Up: C(C + 1) numbers, which are mean logits and a count for each class in the batches. Down: the
same, for each class that another client sent.

Deviations: the augmentation of the paper, which needs samples on the server, is another method.
Clients that are not in a round count with their last logits.

Compared: TsingZ0/HtFLlib e959261, with the teacher of the paper, float64, largest difference
1.1e-16 (2026-11).
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

import fedprompt as fp
from methods.federation import Predictions, VitFederation

FAMILIES = ("mixed models",)
TRAITS = ("personalized", "different models")
SEARCH = {"learning_rate": (1e-3, 1e-1), "distillation_weight": (1e-2, 10.0)}


def soft_cross_entropy(logits: Tensor, teacher: Tensor) -> Tensor:
    return F.cross_entropy(logits, teacher.softmax(1))


def feddistill(
    federation: VitFederation, *, learning_rate: float = 1e-2, distillation_weight: float = 1e-1
) -> Iterator[Predictions]:
    """FedDistill."""
    classes, latest = federation.num_classes, {}
    models = {client: federation.new_model(client) for client in federation.clients}
    unknown = fp.Weighted(torch.zeros(classes, classes), torch.zeros(classes))
    for server_round in range(federation.rounds):
        sent = {}
        for client in federation.cohort(server_round):
            model, pieces = models[client], []
            others = [latest[other] for other in latest if other != client]
            teacher = unknown
            if others:
                message = {"logits": fp.weighted_mean(others)}
                teacher = federation.send_down(client, message)["logits"]
            optimizer = federation.optimizer(model, learning_rate)
            for images, labels in federation.batches(client, server_round):
                logits = model(images)
                guide = {"weight": distillation_weight, "loss": soft_cross_entropy}
                loss = fp.guided_loss(logits, logits, labels, teacher, **guide)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                pieces.append(fp.class_means(logits.detach(), labels, num_classes=classes))
            payload = {"logits": fp.weighted_mean(pieces)}
            mean = federation.send_up(client, payload)["logits"]
            sent[client] = fp.Weighted(mean.value, mean.weight.sign())  # one vote each
        latest |= sent
        yield Predictions(client=models.__getitem__, newcomer=federation.new_model)
