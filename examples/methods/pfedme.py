"""Clients descend the Moreau envelope of their loss, and keep its minimizer as their own model.

For each batch, a few steps minimize the loss plus half the squared distance to the local copy of
the global model, times a weight. The local copy then moves towards this personal model. Dinh et
al., "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020.

Up: the local copy of prompts and head, L P D + D C + C numbers. Down: prompts and head.

Deviations: inner steps are those of the clients' optimizer, three for each batch, where the paper
uses five. So there are three times as many backward passes. The paper's server rate (beta) is 1.
`outer_step` is the paper's product of the outer learning rate and the proximal weight. The personal
model starts each round at the broadcast, which the paper leaves open. Only the clients of a round
train. In the paper all clients train, and the server averages a sample of them. Every client counts
once in the mean; the authors' code weights clients by their numbers of examples, and also has a
weight decay of 0.001 in the inner steps.

Compared: CharlieDinh/pFedMe caf24b1, with the deviations above, float64, largest difference 1.1e-16
(2026-11).
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

import fedprompt as fp
from methods.federation import Predictions, PromptedModel, VitFederation

FAMILIES = ("one model",)
TRAITS = ("personalized",)
SEARCH = {
    "learning_rate": (1e-3, 1e-1),
    "proximal_weight": (1e-2, 10.0),
    "outer_step": (1e-1, 1.0),
}


def pfedme(
    federation: VitFederation,
    *,
    learning_rate: float = 1e-2,
    proximal_weight: float = 0.1,
    outer_step: float = 0.5,
    inner_steps: int = 3,
) -> Iterator[Predictions]:
    """pFedMe."""  # noqa: D403
    model, server, own = federation.new_model(), fp.overwrite(), {}
    values = fp.snapshot(model)
    state = server.init(values)

    def personal(client: int) -> PromptedModel:
        fp.load_values(model, own.get(client, values))
        return model

    for server_round in range(federation.rounds):
        payloads = []
        for client in federation.cohort(server_round):
            local = federation.send_down(client, values)
            fp.load_values(model, local)
            optimizer = federation.optimizer(model, learning_rate)
            for images, labels in federation.batches(client, server_round):
                for _ in range(inner_steps):
                    loss = F.cross_entropy(model(images), labels)
                    loss = loss + proximal_weight * fp.proximal_loss(model, local)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                own[client] = fp.snapshot(model)
                local = {
                    name: torch.lerp(value, own[client][name], outer_step)
                    for name, value in local.items()
                }
            fp.load_values(model, local)
            payloads.append(federation.send_up(client, fp.collect(model, weight=1.0)))
        values, state = server.step(values, fp.weighted_mean(payloads), state)
        yield Predictions(client=personal, newcomer=personal)
