"""Clients train the global model so that one gradient step on their own images adapts it well.

Each step descends the loss after such an adaptation. The exact method differentiates through the
adaptation. Its first-order approximation leaves out the Hessian. Fallah et al., "Personalized
Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning Approach", NeurIPS
2020.

Up: prompts and head, L P D + D C + C numbers. Down: prompts and head.

Deviations: the paper draws three batches a step. Here half of each batch adapts and also gives the
Hessian, and the other half gives the outer gradient. The outer steps are those of the clients'
optimizer. A client adapts with all its training images, in one step, when its predictions are
requested. Every client counts once in the mean.

Compared: equations of the paper with the exact Hessian, with the deviations above, float64, largest
difference 1.1e-16 (2026-11).
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

import fedprompt as fp
from methods.federation import Predictions, PromptedModel, VitFederation

FAMILIES = ("one model",)
TRAITS = ("personalized",)
SEARCH = {"learning_rate": (1e-3, 1e-1), "inner_rate": (1e-2, 1.0)}


def perfedavg(
    federation: VitFederation, *, learning_rate: float = 1e-2, inner_rate: float = 0.1
) -> Iterator[Predictions]:
    """Per-FedAvg."""
    return meta_learned(federation, learning_rate, inner_rate, exact=True)


def perfedavg_first_order(
    federation: VitFederation, *, learning_rate: float = 1e-2, inner_rate: float = 0.1
) -> Iterator[Predictions]:
    """Per-FedAvg (first order)."""
    return meta_learned(federation, learning_rate, inner_rate, exact=False)


def meta_learned(
    federation: VitFederation, learning_rate: float, inner_rate: float, *, exact: bool
) -> Iterator[Predictions]:
    model, server = federation.new_model(), fp.overwrite()
    values = fp.snapshot(model)
    state = server.init(values)

    def received(client: int) -> PromptedModel:
        fp.load_values(model, values)
        return model

    def personal(client: int) -> PromptedModel:
        adapted = adapt(received(client), *federation.own(client), inner_rate, exact=False)
        fp.load_values(model, adapted)
        return model

    for server_round in range(federation.rounds):
        payloads = []
        for client in federation.cohort(server_round):
            federation.send_down(client, values)
            optimizer = federation.optimizer(received(client), learning_rate)
            for images, labels in federation.batches(client, server_round):
                with sdpa_kernel(SDPBackend.MATH):  # other kernels have no second derivative
                    adapted = adapt(model, images[::2], labels[::2], inner_rate, exact=exact)
                    logits = functional_call(model, adapted, (images[1::2],))
                loss = F.cross_entropy(logits, labels[1::2])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            payloads.append(federation.send_up(client, fp.collect(model, weight=1.0)))
        values, state = server.step(values, fp.weighted_mean(payloads), state)
        yield Predictions(client=personal, newcomer=received)


def adapt(
    model: PromptedModel, images: Tensor, labels: Tensor, inner_rate: float, *, exact: bool
) -> dict[str, Tensor]:
    parameters = dict(model.named_parameters())
    loss = F.cross_entropy(model(images), labels)
    gradients = torch.autograd.grad(loss, list(parameters.values()), create_graph=exact)
    return {
        name: parameter - inner_rate * gradient
        for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True)
    }
