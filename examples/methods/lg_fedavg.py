"""Clients keep their features private, and the server averages the head behind them.

The representation stays local and may differ between clients; the layers after it are global.
Liang et al., "Think Locally, Act Globally: Federated Learning with Local and Global
Representations", NeurIPS workshop 2019.

Up: the head, C(D + 1) numbers. Down: the head.

Deviations: both parts train together in every step, as in HtFLlib. The auxiliary losses of the
paper for the local representation are left out. The mean is weighted by numbers of examples, as in
the paper and HtFLlib. The authors' code counts clients equally and starts from a model of FedAvg.

Compared: pliang279/LG-FedAvg 7af0568 and TsingZ0/HtFLlib e959261, with the deviations above,
float64, largest difference 1.1e-16 (2026-11).
"""

from collections.abc import Iterator

import torch.nn.functional as F

import fedprompt as fp
from methods.federation import Predictions, PromptedModel, VitFederation

FAMILIES = ("mixed models",)
TRAITS = ("personalized", "different models")
SEARCH = {"learning_rate": (1e-3, 1e-1)}


def lg_fedavg(federation: VitFederation, *, learning_rate: float = 1e-2) -> Iterator[Predictions]:
    """LG-FedAvg."""
    models = {client: federation.new_model(client) for client in federation.clients}
    head, server = fp.snapshot(models[federation.clients[0]].head), fp.overwrite()
    state = server.init(head)

    def with_head(model: PromptedModel) -> PromptedModel:
        fp.load_values(model.head, head)
        return model

    for server_round in range(federation.rounds):
        payloads = []
        for client in federation.cohort(server_round):
            model = models[client]
            fp.load_values(model.head, federation.send_down(client, head))
            optimizer = federation.optimizer(model, learning_rate)
            for images, labels in federation.batches(client, server_round):
                loss = F.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            payload = fp.collect(model.head, weight=federation.num_examples(client))
            payloads.append(federation.send_up(client, payload))
        head, state = server.step(head, fp.weighted_mean(payloads), state)
        yield Predictions(
            client=lambda client: with_head(models[client]),
            newcomer=lambda client: with_head(federation.new_model(client)),
        )
