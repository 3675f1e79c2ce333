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

from collections.abc import Mapping, Sequence

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import fedprompt as fp
from fedprompt.methods.models import VitSetting
from fedprompt.methods.registry import LEARNING_RATE, PERSONALIZED, adapted, register
from fedprompt.methods.steps import averaged, take_step


class _Generator(nn.Module):
    """Prompts from a common basis and a descriptor for each client."""

    def __init__(self, clients: Sequence[int], basis: Tensor) -> None:
        super().__init__()
        self.basis = nn.Parameter(basis.clone())
        draw = {str(client): 0.02 * torch.randn_like(basis) for client in clients}
        self.descriptors = nn.ParameterDict(draw)
        self.attention = nn.MultiheadAttention(basis.shape[-1], num_heads=4, bias=False)

    def forward(self, client: int) -> Tensor:
        """Make the prompts of a client, or of the mean descriptor for a newcomer."""
        newcomer = str(client) not in self.descriptors
        clients = self.descriptors if newcomer else [str(client)]
        query = torch.stack([self.descriptors[client] for client in clients]).mean(0)
        return self.basis + self.attention(query, self.basis, self.basis, need_weights=False)[0]


def _follow(generator: _Generator, changes: Mapping[int, Tensor], learning_rate: float) -> None:
    """Take a step towards the changes that clients made to their prompts."""
    optimizer = torch.optim.SGD(generator.parameters(), lr=learning_rate)
    products = [(generator(client) * change).sum() for client, change in changes.items()]
    take_step(optimizer, -torch.stack(products).mean(0))


@register(
    "pFedPG", **adapted(PERSONALIZED), search=LEARNING_RATE | {"server_learning_rate": (1e-3, 0.3)}
)
def pfedpg(
    setting: VitSetting, *, learning_rate: float = 1e-2, server_learning_rate: float = 0.1
) -> fp.Method:
    """pFedPG."""  # noqa: D403
    model = setting.new_model(prompts=lambda trunk: fp.ShallowPrompts(setting.num_prompts, trunk))
    fresh = fp.snapshot(model)
    basis = fresh["prompts.tokens"][0].cpu()
    generator = setting.seeded(_Generator, setting.named_clients, basis)

    def train(data, answer, state):
        fp.load_values(model, {**fresh, **state, **answer})
        optimizer = data.optimizer(model, learning_rate)
        for images, labels in data.batches():
            take_step(optimizer, F.cross_entropy(model(images), labels))
        values = fp.snapshot(model)
        return {"change": values["prompts.tokens"] - answer["prompts.tokens"]}, values

    def answer(client, state):
        fp.load_values(generator, state)
        return {"prompts.tokens": generator(client).detach()[None]}

    def step(server_round, payloads, state):
        fp.load_values(generator, state)
        changes = {client: payload["change"][0] for client, payload in payloads.items()}
        _follow(generator, changes, server_learning_rate)
        return fp.snapshot(generator)

    server = fp.Server(fp.snapshot(generator), answer, step)
    form = {"change": fresh["prompts.tokens"]}
    return averaged(model, train, server=server)._replace(form=lambda client: form)
