"""PromptFL with a proximal term that keeps the context of each client near the broadcast.

Each step minimizes the loss of the batch plus half the squared distance to the broadcast, times a
weight. Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020. The combination
is a baseline of pFedPrompt (Guo et al., WWW 2023) and FedOTP (Li et al., CVPR 2024).

Up: a context (T D numbers). Down: a context.

Deviations: clients take equal numbers of steps, so the stragglers of FedProx do not occur.

Compared: equations of the paper, float64, largest difference 6.9e-15 (2026-11).
"""

from collections.abc import Iterator

import torch.nn.functional as F

import fedprompt as fp
from methods.federation import ClipFederation, Predictions

FAMILIES = ("CLIP",)
TRAITS = ()
SEARCH = {"learning_rate": (1e-3, 1e-1), "proximal_weight": (1e-3, 1e1)}


def promptfl_fedprox(
    federation: ClipFederation, *, learning_rate: float = 5e-3, proximal_weight: float = 0.1
) -> Iterator[Predictions]:
    """PromptFL + FedProx."""
    model, server = federation.new_model(), fp.overwrite()
    values = fp.snapshot(model)
    state = server.init(values)
    for server_round in range(federation.rounds):
        payloads = []
        for client in federation.cohort(server_round):
            fp.load_values(model, federation.send_down(client, values))
            optimizer = federation.optimizer(model, learning_rate)
            for tokens, labels in federation.batches(client, server_round):
                loss = F.cross_entropy(model(tokens), labels)
                loss = loss + proximal_weight * fp.proximal_loss(model, values)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            payload = fp.collect(model, weight=federation.num_examples(client))
            payloads.append(federation.send_up(client, payload))
        values, state = server.step(values, fp.weighted_mean(payloads), state)
        fp.load_values(model, values)
        yield Predictions(everyone=model)
