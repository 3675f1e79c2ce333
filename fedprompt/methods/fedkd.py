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

from collections.abc import Callable, Iterable, Mapping

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import fedprompt as fp
from fedprompt.interfaces import Payload
from fedprompt.methods.models import Personal
from fedprompt.methods.registry import DIFFERENT_MODELS, LEARNING_RATE, adapted, register
from fedprompt.methods.steps import take_step
from fedprompt.methods.whole_networks import ImageSetting


def _compress(update: Mapping[str, Tensor], energy: float) -> dict[str, fp.Weighted]:
    """Keep the largest singular values of each matrix, with a part of their squared sum.

    A row has the left and the right vector of a singular value, and the value is its weight.
    """
    message = {}
    for name, change in update.items():
        scale = torch.tensor(1.0)
        if change.ndim > 1:
            left, scale, right = torch.linalg.svd(change.flatten(0, -2), full_matrices=False)
            energies = scale.square().cumsum(0)
            scale[1 + int((energies < energy * energies[-1]).sum()) :] = 0
            change = torch.cat([left.mT, right], 1) * (scale > 0)[:, None]
        message[name] = fp.Weighted(change, scale)
    return message


def _expand(message: Mapping[str, fp.Weighted], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Multiply the factors of each matrix."""
    update = {}
    for name, value in like.items():
        change, scale = message[name]
        if value.ndim > 1:
            left, right = change[scale > 0].split([value[..., 0].numel(), value.shape[-1]], 1)
            change = ((left.mT * scale[scale > 0]) @ right).reshape(value.shape)
        update[name] = change
    return update


def _weighted(values: Mapping[str, Tensor], weight: float) -> dict[str, fp.Weighted]:
    """Give all values the same weight."""
    return {name: fp.Weighted(value, torch.tensor(weight)) for name, value in values.items()}


def _received(answer: Payload, before: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the mentee of the server: in full, or by the update that the client lacks."""
    change = _expand(fp.part(answer, "update"), before)
    full = fp.part(answer, "mentee").items()
    return {
        name: value if weight else before[name] + change[name] for name, (value, weight) in full
    }


def _loss(models: nn.ModuleDict, images: Tensor, labels: Tensor) -> Tensor:
    """Compute the loss of both models, which learn less from each other where both are wrong."""
    features = models["mentor"].features(images)
    shared_features = models["mentee"].features(images)
    logits = models["mentor"].head(features)
    shared_logits = models["mentee"].head(shared_features)
    loss = F.cross_entropy(logits, labels) + F.cross_entropy(shared_logits, labels)
    mutual = F.mse_loss(models["mapping"](shared_features), features)
    for pair in ((logits, shared_logits), (shared_logits, logits)):
        mutual = mutual + fp.mutual_loss(*pair, temperature=1.0)
    return loss + mutual / loss.detach()


def _factored_server(
    first: Mapping[str, Tensor], clients: Iterable[str], energy: Callable[[int], float]
) -> fp.Server:
    """Make the server, which sends its update to the clients that have all earlier ones."""
    zeros = {name: torch.zeros_like(value) for name, value in first.items()}
    absent = _weighted(zeros, 0.0)
    unchanged = _compress(zeros, 1.0)

    def answer(client, state):
        near = str(client) in state["latest"]  # it lacks the last update alone
        whole, update = (absent, state["update"]) if near else (state["mentee"], unchanged)
        return fp.named("mentee", whole) | fp.named("update", update)

    def step(server_round, payloads, state):
        changes = [_weighted(_expand(payload, first), 1.0) for payload in payloads.values()]
        mean = {name: entry.value for name, entry in fp.weighted_mean(changes).items()}
        update = _compress(mean, energy(server_round))
        change = _expand(update, first)
        values = {name: state["mentee"][name].value + change[name] for name in first}
        return {"mentee": _weighted(values, 1.0), "update": update, "latest": [*map(str, payloads)]}

    # All clients make the same first mentee.
    state = {"mentee": _weighted(first, 1.0), "update": unchanged, "latest": [*clients]}
    return fp.Server(state, answer, step)


@register("FedKD", **adapted(DIFFERENT_MODELS), search=LEARNING_RATE)
def fedkd(
    setting: ImageSetting,
    *,
    learning_rate: float = 1e-2,
    energies: tuple[float, float] = (0.95, 0.98),
) -> fp.Method:
    """FedKD."""
    mentee = setting.new_model(0)
    first, whole = fp.snapshot(mentee), fp.snapshot(mentee, buffers=True)
    dim = mentee.head.in_features
    mapping = setting.seeded(nn.Linear, dim, dim, False)
    new = fp.snapshot(mapping)

    def train(data, answer, state):
        before = _received(answer, state.get("mentee", first))
        mentor = setting.model(data.id, state.get("mentor", {}))
        fp.load_values(mentee, {**whole, **before})
        fp.load_values(mapping, state.get("map", new))
        models = nn.ModuleDict({"mentor": mentor, "mentee": mentee, "mapping": mapping})
        optimizer = data.optimizer(models, learning_rate)
        for images, labels in data.batches():
            loss = _loss(models, images, labels)
            take_step(optimizer, loss)
        change = {name: after - before[name] for name, after in fp.snapshot(mentee).items()}
        private = {"mentor": fp.snapshot(mentor, buffers=True), "map": fp.snapshot(mapping)}
        return _compress(change, energy(data.server_round)), private | {"mentee": before}

    def energy(server_round):
        return energies[0] + (energies[1] - energies[0]) * server_round / setting.rounds

    def predict(data, answer, state):
        fp.load_values(mentee, {**whole, **_received(answer, state.get("mentee", first))})
        mentor = setting.model(data.id, state.get("mentor", {}))
        return Personal(mentor, mentee, trained=bool(state))

    server = _factored_server(first, map(str, setting.named_clients), energy)
    return fp.Method(train, server, predict, form=lambda client: server.state["update"])
