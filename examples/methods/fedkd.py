"""Each client trains a private mentor and a shared mentee, whose updates are sent as factors.

The two models learn from each other's logits and features, less where both are still wrong. The
update of each matrix of the mentee is sent as the largest parts of its singular value
decomposition, both ways. Wu et al., "Communication-Efficient Federated Learning via Knowledge
Distillation", Nature Communications 2022.

Up: R(M + N + 1) numbers for the update of an (M, N) matrix, and vectors in full. The rank R keeps a
given part of the squared singular values. Down: the mean update, in the same form, of each round
that the client does not have yet.

Deviations: an update is the change over a round, not the gradient of one step. Only the last
features are compared, and there is no loss between attention maps, as in HtFLlib. The divisor of
the mutual losses is held constant in differentiation. The prompts of all layers are one (PL, D)
matrix. The energy grows with r/R in round r of R, counted from 0, as in HtFLlib. In the authors'
code it grows with (r + 1)/R. Every client counts once, as in both codes. A client predicts with its
mentor, a newcomer with the mentee.

Compared: wuch15/FedKD 9b9e63f and TsingZ0/HtFLlib, with the deviations above, float64, largest
difference 5.6e-17 (2026-11).
"""

from collections.abc import Iterator, Mapping

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import fedprompt as fp
from methods.federation import Predictions, VitFederation

FAMILIES = ("mixed models",)
TRAITS = ("personalized", "different models", "adapted")
SEARCH = {"learning_rate": (1e-3, 1e-1)}


def compress(update: Mapping[str, Tensor], energy: float) -> dict[str, Tensor]:
    message = {}
    for name, change in update.items():
        if change.ndim < 2:
            message[name] = change
            continue
        left, scale, right = torch.linalg.svd(change.flatten(0, -2), full_matrices=False)
        kept = scale.square().cumsum(0)
        rank = 1 + int((kept < energy * kept[-1]).sum())
        message[f"{name}/left"], message[f"{name}/right"] = left[:, :rank], right[:rank]
        message[f"{name}/scale"] = scale[:rank]
    return message


def expand(message: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    update = {}
    for name, value in like.items():
        parts = (message.get(name + part) for part in ("", "/left", "/scale", "/right"))
        whole, left, scale, right = parts
        update[name] = whole if left is None else ((left * scale) @ right).reshape(value.shape)
    return update


def fedkd(
    federation: VitFederation,
    *,
    learning_rate: float = 1e-2,
    energies: tuple[float, float] = (0.95, 0.98),
) -> Iterator[Predictions]:
    """FedKD."""
    mentors = {client: federation.new_model(client) for client in federation.clients}
    mentee, sent, seen = federation.new_model(0), [], dict.fromkeys(mentors, 0)
    values, dim = fp.snapshot(mentee), mentee.head.in_features
    maps = {client: nn.Linear(dim, dim, bias=False) for client in mentors}
    for server_round in range(federation.rounds):
        energy = energies[0] + (energies[1] - energies[0]) * server_round / federation.rounds
        payloads = []
        for client in federation.cohort(server_round):
            for missed in sent[seen[client] :]:
                federation.send_down(client, missed)
            seen[client] = server_round
            fp.load_values(mentee, values)
            trained = nn.ModuleList([mentors[client], mentee, maps[client]])
            optimizer = federation.optimizer(trained, learning_rate)
            for images, labels in federation.batches(client, server_round):
                own, shared = (model.features(images) for model in trained[:2])
                logits, taught = mentors[client].head(own), mentee.head(shared)
                loss = F.cross_entropy(logits, labels) + F.cross_entropy(taught, labels)
                mutual = F.mse_loss(maps[client](shared), own)
                for pair in ((logits, taught), (taught, logits)):
                    mutual = mutual + fp.mutual_loss(*pair, temperature=1.0)
                loss = loss + mutual / loss.detach()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            after = fp.snapshot(mentee)
            update = compress({name: after[name] - values[name] for name in values}, energy)
            fp.load_values(mentee, expand(federation.send_up(client, update), values))
            payloads.append(fp.collect(mentee, weight=1.0))
        mean = {name: entry.value for name, entry in fp.weighted_mean(payloads).items()}
        sent.append(compress(mean, energy))
        mean = expand(sent[-1], values)
        values = {name: values[name] + mean[name] for name in values}
        fp.load_values(mentee, values)
        yield Predictions(client=mentors.__getitem__, newcomer=lambda client: mentee)
