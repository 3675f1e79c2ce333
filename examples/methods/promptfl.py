"""Clients learn one context before the class names of a frozen CLIP, and the server averages it.

Guo et al., "PromptFL: Let Federated Participants Cooperatively Learn Prompts Instead of Models",
IEEE Transactions on Mobile Computing 2023.

Up: a context. Down: a context.

Deviations: none.

Compared: equations of the paper, with the text encoder of KaiyangZhou/CoOp ff61507, float64,
largest difference 3e-15 (2026-11).
"""

from collections.abc import Iterator

import torch.nn.functional as F

import fedprompt as fp
from methods.federation import ClipFederation, Predictions

FAMILIES = ("CLIP",)
TRAITS = ()
SEARCH = {"learning_rate": (1e-3, 1e-1)}


def promptfl(federation: ClipFederation, *, learning_rate: float = 5e-3) -> Iterator[Predictions]:
    """PromptFL."""
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
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            payload = fp.collect(model, weight=federation.num_examples(client))
            payloads.append(federation.send_up(client, payload))
        values, state = server.step(values, fp.weighted_mean(payloads), state)
        fp.load_values(model, values)
        yield Predictions(everyone=model)
