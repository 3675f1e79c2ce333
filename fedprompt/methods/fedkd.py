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

from collections.abc import Mapping

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import fedprompt as fp
from fedprompt.methods.registry import register
from fedprompt.methods.setting import VitSetting


def compress(update: Mapping[str, Tensor], energy: float) -> dict[str, Tensor]:
    """Keep the largest singular values of each matrix, with a part of their squared sum."""
    message = {}
    for name, change in update.items():
        if change.ndim < 2:
            message[name] = change
            continue
        left, scale, right = torch.linalg.svd(change.flatten(0, -2), full_matrices=False)
        kept = scale.square().cumsum(0)
        rank = 1 + int((kept < energy * kept[-1]).sum())
        factors = {"left": left[:, :rank], "scale": scale[:rank], "right": right[:rank]}
        message |= {f"{name}/{part}": each.contiguous() for part, each in factors.items()}
    return message


def expand(message: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Multiply the factors of each matrix."""
    update = {}
    for name, value in like.items():
        if name in message:
            update[name] = message[name]
        else:
            left, scale, right = (message[f"{name}/{part}"] for part in ("left", "scale", "right"))
            update[name] = ((left * scale) @ right).reshape(value.shape)
    return update


@register(
    "FedKD",
    families=("mixed models",),
    traits=("personalized", "different models", "adapted"),
    search={"learning_rate": (1e-3, 1e-1)},
)
def fedkd(
    setting: VitSetting,
    *,
    learning_rate: float = 1e-2,
    energies: tuple[float, float] = (0.95, 0.98),
) -> fp.Method:
    """FedKD."""
    mentee = setting.new_model(0)
    first, dim = fp.snapshot(mentee), mentee.head.in_features
    mapping = setting.seeded(nn.Linear, dim, dim, False)
    new = fp.snapshot(mapping)

    def energy(server_round):
        return energies[0] + (energies[1] - energies[0]) * server_round / setting.rounds

    def followed(values, answer):
        """Apply the mean updates of the rounds that were missed."""
        for number in sorted({int(name.split(".")[0]) for name in answer}):
            change = expand(fp.part(answer, str(number)), values)
            values = {name: values[name] + change[name] for name in values}
        return values

    def train(data, answer, state):
        values = followed(state.get("mentee", first), answer)
        mentor = setting.model(data.id, state.get("mentor", {}))
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
        after = fp.snapshot(mentee)
        change = {name: after[name] - values[name] for name in values}
        own = {"mentor": fp.snapshot(mentor), "mentee": values, "map": fp.snapshot(mapping)}
        return compress(change, energy(data.server_round)), own

    def answer(client, state):
        missed = range(state["seen"].get(str(client), 0), len(state["sent"]))
        updates = [fp.named(str(number), state["sent"][number]) for number in missed]
        return {name: value for update in updates for name, value in update.items()}

    def step(server_round, payloads, state):
        changes = [expand(each, first) for each in payloads.values()]
        one = torch.tensor(1.0)
        mean = fp.weighted_mean(
            {name: fp.Weighted(value, one) for name, value in each.items()} for each in changes
        )
        mean = compress({name: each.value for name, each in mean.items()}, energy(server_round))
        seen = dict.fromkeys(map(str, payloads), len(state["sent"]))
        return {"sent": [*state["sent"], mean], "seen": state["seen"] | seen}

    def predict(data, answer, state):
        if state:
            return setting.model(data.id, state["mentor"])
        fp.load_values(mentee, followed(first, answer))
        return mentee

    return fp.Method(train, fp.Server({"sent": [], "seen": {}}, answer, step), predict)
