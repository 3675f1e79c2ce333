"""The server trains one head on the class prototypes of all clients.

Clients train with the head that they received, and send the mean features of each class. The server
continues to train the head on these features. Yi et al., "FedGH: Heterogeneous Federated Learning
with Generalized Global Header", ACM Multimedia 2023.

Up: C(D + 1) numbers, which are a prototype and a count for each class of the client. Down: the
head, C(D + 1) numbers.

Deviations: the server takes several full-batch steps in place of one pass over the prototypes of
the round, because prototypes are few. A client predicts with the newest head of the server, as in
HtFLlib. The authors' code tests the head that the client trained.

Compared: LipingYi/FedGH ff50ac0 and TsingZ0/HtFLlib e959261, with the deviations above, float64,
largest difference 1.1e-16 (2026-11).
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

import fedprompt as fp
from fedprompt.methods.registry import LEARNING_RATE, register
from fedprompt.methods.setting import VitSetting


def train_head(
    head: nn.Linear, prototypes: list[fp.Weighted], *, learning_rate: float, steps: int
) -> None:
    """Train a head on the prototypes of clients."""
    features = torch.cat([entry.value[entry.weight > 0] for entry in prototypes])
    labels = torch.cat([entry.weight.nonzero()[:, 0] for entry in prototypes])
    optimizer = torch.optim.SGD(head.parameters(), learning_rate)
    for _ in range(steps):
        loss = F.cross_entropy(head(features), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@register(
    "FedGH",
    families=("mixed models",),
    traits=("personalized", "different models", "adapted"),
    search=LEARNING_RATE | {"server_rate": (1e-3, 1.0)},
)
def fedgh(
    setting: VitSetting,
    *,
    learning_rate: float = 1e-2,
    server_rate: float = 1e-1,
    server_steps: int = 20,
) -> fp.Method:
    """FedGH."""
    classes, head = setting.num_classes, setting.new_model().head
    unknown = fp.Weighted(torch.zeros(classes, head.in_features), torch.zeros(classes))

    def train(data, answer, state):
        model = predict(data, answer, state)
        optimizer = data.optimizer(model, learning_rate)
        for images, labels in data.batches():
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            images, labels = data.own()
            prototypes = fp.class_means(model.features(images), labels, num_classes=classes)
        return {"prototypes": prototypes}, fp.snapshot(model, buffers=True)

    def answer(client, state):
        return state

    def step(server_round, payloads, state):
        fp.load_values(head, state)
        prototypes = [payload["prototypes"] for payload in payloads.values()]
        train_head(head, prototypes, learning_rate=server_rate, steps=server_steps)
        return fp.snapshot(head)

    def predict(data, answer, state):
        model = setting.model(data.id, state)
        fp.load_values(model.head, answer)
        return model

    def form(client):
        return {"prototypes": unknown}

    return fp.Method(train, fp.Server(fp.snapshot(head), answer, step), predict, form=form)
