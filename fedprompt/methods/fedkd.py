"""Each client trains a private mentor and a shared mentee, whose updates are sent as factors.

The two models learn from each other's logits and features, less where both are still wrong. The
update of each matrix of the mentee is sent as the largest parts of its singular value
decomposition, both ways. Wu et al., "Communication-Efficient Federated Learning via Knowledge
Distillation", Nature Communications 2022.

Up: R(M + N) numbers and min(M, N) singular values for the update of an (M, N) matrix, and vectors
in full. All but R singular values are 0. They keep a given part of the squared sum. Down: the mean
update in the same form, or the whole mentee for a client that was not in the round before.

Deviations: an update is the change over a round, not the gradient of one step. Only the last
features are compared, and there is no loss between attention maps, as in HtFLlib. The divisor of
the mutual losses is held constant in differentiation. The prompts of all layers are one (PL, D)
matrix. The energy grows with r/R in round r of R, counted from 0, as in HtFLlib. In the authors'
code it grows with (r + 1)/R. Every client counts once, as in both codes. A client predicts with its
mentor, and with the mentee before its first round.

Compared: wuch15/FedKD 9b9e63f and TsingZ0/HtFLlib, with the deviations above, float64, largest
difference 5.6e-17 (2026-11).
"""

from collections.abc import Mapping

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import fedprompt as fp
from fedprompt.methods.registry import LEARNING_RATE, register
from fedprompt.methods.setting import VitSetting


def compress(update: Mapping[str, Tensor], energy: float) -> dict[str, fp.Weighted]:
    """Keep the largest singular values of each matrix, with a part of their squared sum.

    A row has the left and the right vector of a singular value, and the value is its weight.
    """
    message = {}
    for name, change in update.items():
        scale = torch.tensor(1.0)
        if change.ndim > 1:
            left, scale, right = torch.linalg.svd(change.flatten(0, -2), full_matrices=False)
            kept = scale.square().cumsum(0)
            scale[1 + int((kept < energy * kept[-1]).sum()) :] = 0
            change = torch.cat([left.mT, right], 1) * (scale > 0)[:, None]
        message[name] = fp.Weighted(change, scale)
    return message


def expand(message: Mapping[str, fp.Weighted], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Multiply the factors of each matrix."""
    update = {}
    for name, value in like.items():
        change, scale = message[name]
        if value.ndim > 1:
            left, right = change[scale > 0].split([value[..., 0].numel(), value.shape[-1]], 1)
            change = ((left.mT * scale[scale > 0]) @ right).reshape(value.shape)
        update[name] = change
    return update


@register(
    "FedKD",
    families=("mixed models",),
    traits=("personalized", "different models", "adapted"),
    search=LEARNING_RATE,
)
def fedkd(
    setting: VitSetting,
    *,
    learning_rate: float = 1e-2,
    energies: tuple[float, float] = (0.95, 0.98),
) -> fp.Method:
    """FedKD."""
    mentee = setting.new_model()
    first, dim = fp.snapshot(mentee), mentee.head.in_features
    zeros, one = {name: torch.zeros_like(value) for name, value in first.items()}, torch.tensor(1.0)
    absent = {name: fp.Weighted(value, 0 * one) for name, value in zeros.items()}
    unchanged, mapping = compress(zeros, 1.0), setting.seeded(nn.Linear, dim, dim, False)
    new = fp.snapshot(mapping)

    def followed(answer, state):
        """Return the mentee of the server: in full, or by the update that the client lacks."""
        before, change = state.get("mentee", first), expand(fp.part(answer, "update"), first)
        full = fp.part(answer, "mentee").items()
        return {name: v if known else before[name] + change[name] for name, (v, known) in full}

    def train(data, answer, state):
        values, mentor = followed(answer, state), setting.model(data.id, state.get("mentor", {}))
        fp.load_values(mentee, values)
        fp.load_values(mapping, state.get("map", new))
        optimizer = data.optimizer(nn.ModuleList([mentor, mentee, mapping]), learning_rate)
        for images, labels in data.batches():
            own, shared = mentor.features(images), mentee.features(images)
            logits, taught = mentor.head(own), mentee.head(shared)
            loss = F.cross_entropy(logits, labels) + F.cross_entropy(taught, labels)
            mutual = F.mse_loss(mapping(shared), own)
            for pair in ((logits, taught), (taught, logits)):
                mutual = mutual + fp.mutual_loss(*pair, temperature=1.0)
            loss = loss + mutual / loss.detach()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        change = {name: after - values[name] for name, after in fp.snapshot(mentee).items()}
        own = {"mentor": fp.snapshot(mentor, buffers=True), "map": fp.snapshot(mapping)}
        return compress(change, energy(data.server_round)), own | {"mentee": values}

    def energy(server_round):
        return energies[0] + (energies[1] - energies[0]) * server_round / setting.rounds

    def answer(client, state):
        near = str(client) in state["latest"]  # it lacks the last update alone
        whole, update = (absent, state["update"]) if near else (state["mentee"], unchanged)
        return fp.named("mentee", whole) | fp.named("update", update)

    def step(server_round, payloads, state):
        changes = (expand(payload, first).items() for payload in payloads.values())
        mean = fp.weighted_mean({n: fp.Weighted(v, one) for n, v in change} for change in changes)
        update = compress({n: entry.value for n, entry in mean.items()}, energy(server_round))
        change, before = expand(update, first), state["mentee"]
        values = {n: fp.Weighted(before[n].value + change[n], one) for n in first}
        return {"mentee": values, "update": update, "latest": [*map(str, payloads)]}

    def predict(data, answer, state):
        if state:
            return setting.model(data.id, state["mentor"])
        fp.load_values(mentee, followed(answer, {}))
        return mentee

    def form(client):
        return unchanged

    latest = [str(client) for client in setting.clients]  # they make the same first mentee
    begin = {"mentee": fp.collect(mentee, weight=1), "update": unchanged, "latest": latest}
    return fp.Method(train, fp.Server(begin, answer, step), predict, form=form)
