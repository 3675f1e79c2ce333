"""The server generates the prompts of each client, and learns from how training changes them.

The generator attends from the learned descriptor of a client to a basis of prompts, which all
clients share. A client trains the prompts that it receives and its own head. The change of the
prompts stands for their negative gradient, which the server propagates through the generator. Yang
et al., "Efficient Model Personalization in Federated Learning via Client-Specific Prompt
Generation" (pFedPG), ICCV 2023.

Up: the change of P·D prompts. Down: P·D prompts.

Deviations: a descriptor has one row for each prompt, and the basis is added to the output of the
attention. The initial prompts then have the scale of the other methods. The step of the server uses
the clients of the round, not all clients. A client predicts with the prompts and the head of its
last round. A newcomer has the prompts of the mean descriptor and an untrained head.

Compared: no public code of the authors. Equations of the paper and MSungK/pFedPG 0715254, which is
by others, with the deviations above, float64, largest difference 1.1e-16 (2026-11).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import fedprompt as fp
from methods.federation import Predictions, PromptedModel, VitFederation

FAMILIES = ("one model",)
TRAITS = ("personalized", "adapted")
SEARCH = {"learning_rate": (1e-3, 1e-1), "server_learning_rate": (1e-3, 0.3)}


class Generator(nn.Module):
    """Prompts from a common basis and a descriptor for each client."""

    def __init__(self, clients: Sequence[int], basis: Tensor) -> None:
        super().__init__()
        self.basis = nn.Parameter(basis.clone())
        draw = {str(client): 0.02 * torch.randn_like(basis) for client in clients}
        self.descriptors = nn.ParameterDict(draw)
        self.attention = nn.MultiheadAttention(basis.shape[-1], num_heads=4, bias=False)

    def forward(self, client: int) -> Tensor:
        """Make the prompts of a client, or those of the mean descriptor for a newcomer."""
        known = self.descriptors.values()
        query = self.descriptors[str(client)] if str(client) in self.descriptors else mean(known)
        return self.basis + self.attention(query, self.basis, self.basis, need_weights=False)[0]


def mean(tensors: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(tensors)).mean(0)


def follow(generator: Generator, changes: Mapping[int, Tensor], learning_rate: float) -> None:
    optimizer = torch.optim.SGD(generator.parameters(), lr=learning_rate)
    agreement = mean((generator(client) * change).sum() for client, change in changes.items())
    optimizer.zero_grad()
    (-agreement).backward()
    optimizer.step()


def pfedpg(
    federation: VitFederation, *, learning_rate: float = 1e-2, server_learning_rate: float = 0.1
) -> Iterator[Predictions]:
    """pFedPG."""  # noqa: D403
    model = federation.new_model(
        prompts=lambda trunk: fp.ShallowPrompts(federation.num_prompts, trunk)
    )
    generator = Generator(federation.clients, model.prompts.tokens.detach()[0])
    fresh, own = fp.snapshot(model), {}

    def generated(client: int) -> dict[str, Tensor]:
        return {"prompts.tokens": generator(client).detach()[None]}

    def load(client: int) -> PromptedModel:
        fp.load_values(model, own.get(client) or fresh | generated(client))
        return model

    for server_round in range(federation.rounds):
        changes = {}
        for client in federation.cohort(server_round):
            sent = federation.send_down(client, generated(client))
            fp.load_values(load(client), sent)
            optimizer = federation.optimizer(model, learning_rate)
            for images, labels in federation.batches(client, server_round):
                loss = F.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            own[client] = fp.snapshot(model)
            change = own[client]["prompts.tokens"] - sent["prompts.tokens"]
            changes[client] = federation.send_up(client, {"change": change})["change"][0]
        follow(generator, changes, server_learning_rate)
        yield Predictions(client=load, newcomer=load)
