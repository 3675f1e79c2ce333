"""Clients share one context and keep another, and transport divides the patches between them.

Both contexts describe each class. The partial transport of an image's patches to the two
descriptions decides which patches are compared with which. The plan has no gradient. Li et al.,
"Global and Local Prompts Cooperation via Optimal Transport for Federated Learning", CVPR 2024. The
variants are those of its ablation. Two controls are arguments: `local` keeps both contexts on the
client, and `pooled` compares the contexts with the pooled token alone.

Up: a context (T D numbers). Down: a context.

Deviations: transport is solved by Newton's method to its solution, where the paper stops Dykstra's
algorithm early. The optimizer is that of all methods, where the paper uses SGD.

Compared: HongxiaLee/FedOTP 9948611, with the deviations above, float64, largest difference 3.8e-8
(tolerance of the solver), without transport 6.4e-15 (2026-11).
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

import fedprompt as fp
from methods.federation import ClipFederation, Predictions

FAMILIES = ("CLIP",)
TRAITS = ("personalized",)
SEARCH = {"learning_rate": (1e-3, 1e-1), "mass": (0.4, 0.95)}


def fedotp(
    federation: ClipFederation,
    *,
    learning_rate: float = 5e-3,
    mass: float = 0.8,
    epsilon: float = 0.1,
    local: bool = False,
) -> Iterator[Predictions]:
    """FedOTP: partial transport."""
    solver = partial(fp.transport.newton, epsilon=epsilon)
    match = partial(fp.transport_logits, solver=solver, mass=mass)
    return two_contexts(federation, match, learning_rate, local=local)


def fedotp_classical(
    federation: ClipFederation, *, learning_rate: float = 5e-3, epsilon: float = 0.1
) -> Iterator[Predictions]:
    """FedOTP (classical): balanced transport, in which every patch has equal mass."""
    solver = partial(fp.transport.newton, epsilon=epsilon)
    match = partial(fp.transport_logits, solver=solver, mass=1.0)
    return two_contexts(federation, match, learning_rate)


def fedotp_average(
    federation: ClipFederation, *, learning_rate: float = 5e-3, pooled: bool = False
) -> Iterator[Predictions]:
    """FedOTP (average): the mean cosine of all patches and both contexts, without transport."""
    match = partial(fp.transport_logits, solver=fp.transport.independent, mass=1.0)
    return two_contexts(federation, match, learning_rate, pooled=pooled)


class TwoContexts(nn.Module):
    """Classifier of image tokens with a shared and a private context."""

    def __init__(self, federation: ClipFederation, match: Callable[..., Tensor]) -> None:
        super().__init__()
        self.tower, self.names, self.scale = federation.tower, federation.names, federation.scale
        self.match, rng = match, federation.generator(0, purpose="private context")
        self.shared = federation.new_context()
        self.private = fp.ContextPrompts(self.tower.dim, length=federation.length, generator=rng)

    def forward(self, tokens: Float[Tensor, "batch tokens dim"]) -> Float[Tensor, "batch classes"]:
        """Classify images by the tokens that are read: the patches follow the pooled one."""
        contexts = torch.cat([self.shared(), self.private()])
        text = self.tower(fp.prompted_text(contexts, self.names))
        return self.match(tokens[:, self.read], text, scale=self.scale)


def two_contexts(federation, match, learning_rate, local=False, pooled=False):
    kept = ["shared", "private"] if local else ["private"]
    model, server = TwoContexts(federation, match), fp.overwrite()
    model.read = slice(1) if pooled else slice(1, None)
    values = {} if local else fp.snapshot(model, only=["shared"])
    initial, private = fp.snapshot(model, only=kept), {}
    state = server.init(values)

    def of(client: int) -> TwoContexts:
        fp.load_values(model, {**values, **private.get(client, initial)})
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
            private[client] = fp.snapshot(model, only=kept)
            if not local:
                payload = fp.collect(model, weight=federation.num_examples(client), only=["shared"])
                payloads.append(federation.send_up(client, payload))
        if payloads:
            values, state = server.step(values, fp.weighted_mean(payloads), state)
        yield Predictions(client=of, newcomer=of)
