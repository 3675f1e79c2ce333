"""Clients tune prompts and a head, and learn from mean class logits of all clients.

A client sends the mean logits of each class, over the images that it classifies correctly. The
server averages them with more weight for trunks of similar width, and each sample is distilled
towards the row of its class. Ma et al., "FedHPL: Efficient Heterogeneous Federated Learning with
Prompt Tuning and Logit Distillation", 2024.

Up: C(C + 1) numbers, which are C rows of logits and C counts; with +P also the prompts, PLD
numbers, and with +H the projection and the head. Down: the same, from the second round on.

Deviations: a projection to a common width lies between trunk and head, as for every method of this
family. It is shared with the head. Teachers come from the clients of the last round only, since the
paper has no client sampling. The count of a class is the number of logits sent, because the paper's
count of all samples is not in its message.

Compared: no public code; with Equations 7 to 10 and App. C.4, sample by sample, float64, largest
difference 1.1e-16; for +P and +H, float32, 9e-8 (2026-11).
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

import fedprompt as fp
from fedprompt.methods.registry import LEARNING_RATE, register
from fedprompt.methods.setting import VitSetting

_ABOUT = dict[str, Any](
    families=("mixed models",),
    traits=("personalized", "different models"),
    search=LEARNING_RATE | {"distillation_weight": (1e-1, 10.0)},
)


@register("FedHPL", **_ABOUT)
def fedhpl(
    setting: VitSetting,
    *,
    learning_rate: float = 1e-2,
    distillation_weight: float = 1.0,
    share: Sequence[str] = (),
) -> fp.Method:
    """FedHPL: with `share`, these parts are averaged among equal trunks."""
    return _taught(setting, share, learning_rate, distillation_weight)


@register("FedHPL +P", **_ABOUT)
def fedhpl_p(
    setting: VitSetting, *, learning_rate: float = 1e-2, distillation_weight: float = 1.0
) -> fp.Method:
    """FedHPL +P: prompts are averaged among equal trunks."""
    return _taught(setting, ["prompts"], learning_rate, distillation_weight)


@register("FedHPL +H", **_ABOUT)
def fedhpl_h(
    setting: VitSetting, *, learning_rate: float = 1e-2, distillation_weight: float = 1.0
) -> fp.Method:
    """FedHPL +H: heads are averaged among equal trunks."""
    return _taught(setting, ["projection", "head"], learning_rate, distillation_weight)


def _taught(
    setting: VitSetting, share: Sequence[str], learning_rate: float, weight: float
) -> fp.Method:
    """Make the method, which averages some parts of equal trunks."""
    classes = setting.num_classes
    unknown = fp.Weighted(torch.zeros(classes, classes), torch.zeros(classes))

    def dim(client):
        return setting.trunk_of(client).num_features

    def parts(model, size):
        return fp.collect(model, weight=size, only=share) if share else {}

    def train(data, answer, state):
        model, teacher = predict(data, answer, state), answer["logits"]
        known = {n: entry for n, entry in answer.items() if n != "logits" and entry.weight.any()}
        fp.load_values(model, known)
        optimizer = data.optimizer(model, learning_rate)
        for images, labels in data.batches():
            logits = model(images)
            loss = F.cross_entropy(logits, labels)
            loss = loss + weight * fp.distillation_loss(logits, labels, teacher)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            images, labels = data.own()
            logits = model(images)
        correct = logits.argmax(1) == labels
        payload = {"logits": fp.class_means(logits, labels, num_classes=classes, keep=correct)}
        return payload | parts(model, data.num_examples), fp.snapshot(model, buffers=True)

    def answer(client, state):
        return state[str(dim(client))]

    def step(server_round, payloads, state):
        # An entry of weight 0 for each width gives every width a teacher.
        entries = [payload["logits"] for payload in payloads.values()] + [unknown] * len(state)
        teachers = fp.heterogeneous_means(entries, [*map(dim, payloads), *map(int, state)])
        new = {}
        for width, reply in state.items():
            alike = [payload for client, payload in payloads.items() if dim(client) == int(width)]
            shared = fp.weighted_mean(alike) if alike else reply
            new[width] = {**shared, "logits": teachers[int(width)]}
        return new

    def predict(data, answer, state):
        return setting.model(data.id, state)

    def form(client):
        return {"logits": unknown, **parts(setting.model(client, {}), 0)}

    first = {str(dim(kind)): form(kind) for kind in range(setting.num_backbones)}
    return fp.Method(train, fp.Server(first, answer, step), predict, form=form)
