"""PromptFL whose context has two halves: one is averaged, the other stays on the client.

FedPer keeps the last layers of a network on the client (Arivazhagan et al., "Federated Learning
with Personalization Layers", 2019). In a context, the last tokens take their place. The combination
is a baseline of pFedPrompt (Guo et al., WWW 2023) and FedOTP (Li et al., CVPR 2024).

Up: the first half of a context (T D / 2 numbers). Down: the same.

Deviations: none. The tokens are divided as in public code of this baseline: the first half is
shared.

Compared: PanBikang/PromptFolio 8f729aa, which has this baseline, float64, largest difference 9e-15
(2026-11).
"""

from collections.abc import Iterator

import torch
import torch.nn as nn
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

import fedprompt as fp
from methods.federation import ClipFederation, Predictions, PromptedText

FAMILIES = ("CLIP",)
TRAITS = ("personalized",)
SEARCH = {"learning_rate": (1e-3, 1e-1)}


class Halves(nn.Module):
    """Context whose first tokens and last tokens are two modules."""

    def __init__(self, context: Float[Tensor, "length dim"]) -> None:
        super().__init__()
        first, last = context.tensor_split(2)
        self.shared = fp.ContextPrompts(context.shape[1], init=first)
        self.own = fp.ContextPrompts(context.shape[1], init=last)

    def forward(self) -> Float[Tensor, "1 length dim"]:
        """Return the whole context."""
        return torch.cat([self.shared(), self.own()], 1)


def promptfl_fedper(
    federation: ClipFederation, *, learning_rate: float = 5e-3
) -> Iterator[Predictions]:
    """PromptFL + FedPer."""
    model = PromptedText(federation, Halves(federation.new_context()()[0]))
    values, server = fp.snapshot(model, only=["context.shared"]), fp.overwrite()
    initial = fp.snapshot(model, only=["context.own"])
    state, own = server.init(values), {}

    def of(client: int) -> PromptedText:
        fp.load_values(model, {**values, **own.get(client, initial)})
        return model

    for server_round in range(federation.rounds):
        payloads = []
        for client in federation.cohort(server_round):
            federation.send_down(client, values)
            optimizer = federation.optimizer(of(client), learning_rate)
            for tokens, labels in federation.batches(client, server_round):
                loss = F.cross_entropy(model(tokens), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            own[client] = fp.snapshot(model, only=["context.own"])
            size = federation.num_examples(client)
            payload = fp.collect(model, weight=size, only=["context.shared"])
            payloads.append(federation.send_up(client, payload))
        values, state = server.step(values, fp.weighted_mean(payloads), state)
        yield Predictions(client=of, newcomer=of)
