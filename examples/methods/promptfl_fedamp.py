"""Each client keeps a private context, and the server sends it a mixture of similar contexts.

The weight of another client's context falls with the squared distance to the own one, and the own
context has the rest. The client trains with a proximal term towards the mixture. FedAMP is from
Huang et al., "Personalized Cross-Silo Federated Learning on Non-IID Data", AAAI 2021. The
combination is a baseline of pFedPrompt (Guo et al., WWW 2023) and FedOTP (Li et al., CVPR 2024).

Up: a context (T D numbers). Down: a mixture (T D numbers).

Deviations: the paper's step of the server is its temperature divided by the number of clients. So
the weights are positive, and at an infinite temperature they are equal. `proximal_weight` is the
paper's lambda divided by this step. Only the clients of a round train, and the server mixes the
last contexts of all clients. Training continues from a client's own context.

Compared: TsingZ0/PFLlib d832e76 and equations of the paper, with the deviations above, float64,
largest difference 6.4e-15 (2026-11).
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

import fedprompt as fp
from methods.federation import ClipFederation, Message, Predictions, PromptedText

FAMILIES = ("CLIP",)
TRAITS = ("personalized",)
SEARCH = {
    "learning_rate": (1e-3, 1e-1),
    "proximal_weight": (1e-3, 1e1),
    "temperature": (1e-1, 1e2),
}


def promptfl_fedamp(
    federation: ClipFederation,
    *,
    learning_rate: float = 5e-3,
    proximal_weight: float = 0.1,
    temperature: float = 1.0,
) -> Iterator[Predictions]:
    """PromptFL + FedAMP."""
    model = federation.new_model()
    initial = fp.collect(model, weight=1)
    own = dict.fromkeys(federation.clients, initial)

    def personal(client: int) -> PromptedText:
        fp.load_values(model, own[client])
        return model

    def received(client: int) -> PromptedText:
        fp.load_values(model, mixed([*own.values(), initial], temperature)[-1])
        return model

    for server_round in range(federation.rounds):
        mixtures = dict(zip(own, mixed(list(own.values()), temperature), strict=True))
        for client in federation.cohort(server_round):
            values = {name: entry.value for name, entry in mixtures[client].items()}
            federation.send_down(client, values)
            optimizer = federation.optimizer(personal(client), learning_rate)
            for tokens, labels in federation.batches(client, server_round):
                loss = F.cross_entropy(model(tokens), labels)
                loss = loss + proximal_weight * fp.proximal_loss(model, values)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            own[client] = federation.send_up(client, fp.collect(model, weight=1))
        yield Predictions(client=personal, newcomer=received)


def mixed(payloads: Sequence[Message], temperature: float) -> list[dict[str, fp.Weighted]]:
    return fp.mixtures(payloads, attention(payloads, temperature))


def attention(payloads: Sequence[Message], temperature: float) -> Float[Tensor, "clients clients"]:
    others = torch.exp(-fp.distances(payloads).square() / temperature) / len(payloads)
    others.fill_diagonal_(0)
    return others + torch.diag(1 - others.sum(1))
