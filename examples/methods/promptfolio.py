"""Each class has a fixed mixture of the text features of a shared and of a private context.

Both contexts are trained with the loss of the mixture, and the server averages the shared one. Pan
et al., "Federated Learning from Vision-Language Foundation Models: Theoretical Analysis and
Method", NeurIPS 2024 (PromptFolio).

Up: the shared context (T D). Down: the shared context (T D).

Deviations: all clients begin with the same private context, which differs from the shared one.

Compared: PanBikang/PromptFolio 8f729aa, float64, largest difference 6.2e-15 (2026-11).
"""

from collections.abc import Iterator

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import fedprompt as fp
from methods.federation import ClipFederation, Predictions

FAMILIES = ("CLIP",)
TRAITS = ("personalized",)
SEARCH = {"learning_rate": (1e-3, 1e-1), "private_share": [0.2, 0.4, 0.6, 0.8]}


class Portfolio(nn.Module):
    """Classifies with a mixture of the text features of a shared and of a private context."""

    def __init__(self, federation: ClipFederation, private_share: float) -> None:
        super().__init__()
        self.tower, self.names, self.scale = federation.tower, federation.names, federation.scale
        self.private_share = private_share
        size = {"dim": federation.tower.dim, "length": federation.length}
        draw = federation.generator(0, purpose="private context")
        self.shared = federation.new_context()
        self.private = fp.ContextPrompts(**size, generator=draw)

    def text(self) -> Tensor:
        """Mix the text features (classes, dim) of length 1; the mixture is shorter."""
        contexts = torch.cat([self.shared(), self.private()])
        features = self.tower(fp.prompted_text(contexts, self.names))
        shared, private = F.normalize(features, dim=-1)
        return (1 - self.private_share) * shared + self.private_share * private

    def forward(self, tokens: Tensor) -> Tensor:
        """Classify images by their pooled token."""
        return self.scale * F.normalize(tokens[:, 0], dim=-1) @ self.text().T


def promptfolio(
    federation: ClipFederation, *, learning_rate: float = 5e-3, private_share: float = 0.4
) -> Iterator[Predictions]:
    """PromptFolio."""
    model, server = Portfolio(federation, private_share), fp.overwrite()
    values, new = (fp.snapshot(model, only=[part]) for part in ("shared", "private"))
    state, own = server.init(values), {}

    def personal(client: int) -> nn.Module:
        fp.load_values(model, {**values, **own.get(client, new)})
        return model

    for server_round in range(federation.rounds):
        payloads = []
        for client in federation.cohort(server_round):
            federation.send_down(client, values)
            optimizer = federation.optimizer(personal(client), learning_rate)
            for tokens, labels in federation.batches(client, server_round):
                loss = F.cross_entropy(model(tokens), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            own[client] = fp.snapshot(model, only=["private"])
            payload = fp.collect(model, weight=federation.num_examples(client), only=["shared"])
            payloads.append(federation.send_up(client, payload))
        values, state = server.step(values, fp.weighted_mean(payloads), state)
        yield Predictions(client=personal, newcomer=personal)
