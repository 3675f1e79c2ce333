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
from fedprompt.methods.registry import DIFFERENT_MODELS, LEARNING_RATE, adapted, register
from fedprompt.methods.steps import broadcast, known_rows, prototypes, take_step
from fedprompt.methods.whole_networks import ImageSetting


def _train_head(
    head: nn.Linear, entries: list[fp.Weighted], *, learning_rate: float, steps: int
) -> None:
    """Train a head on the prototypes of clients."""
    features, labels = known_rows(entries)
    optimizer = torch.optim.SGD(head.parameters(), learning_rate)
    for _ in range(steps):
        loss = F.cross_entropy(head(features), labels)
        take_step(optimizer, loss)


@register("FedGH", **adapted(DIFFERENT_MODELS), search=LEARNING_RATE | {"server_rate": (1e-3, 1.0)})
def fedgh(
    setting: ImageSetting,
    *,
    learning_rate: float = 1e-2,
    server_rate: float = 1e-1,
    server_steps: int = 20,
) -> fp.Method:
    """FedGH."""
    head = setting.new_model(0).head

    def train(data, answer, state):
        model = setting.shared_head(data, answer, state)
        optimizer = data.optimizer(model, learning_rate)
        for images, labels in data.batches():
            take_step(optimizer, F.cross_entropy(model(images), labels))
        return {"prototypes": prototypes(model, data)}, fp.snapshot(model, buffers=True)

    def step(server_round, payloads, state):
        fp.load_values(head, state)
        entries = [payload["prototypes"] for payload in payloads.values()]
        _train_head(head, entries, learning_rate=server_rate, steps=server_steps)
        return fp.snapshot(head)

    server = fp.Server(fp.snapshot(head), broadcast, step)
    form = {"prototypes": setting.unknown_rows(head.in_features)}
    return fp.Method(train, server, setting.shared_head, form=lambda client: form)
