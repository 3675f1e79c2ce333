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

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.nn as nn
import torch.nn.functional as F

import fedprompt as fp
from fedprompt.interfaces import Payload
from fedprompt.methods.registry import DIFFERENT_MODELS, LEARNING_RATE, register
from fedprompt.methods.setting import ClientData, VitSetting, take_step

_SEARCH = LEARNING_RATE | {"distillation_weight": (1e-1, 10.0)}


@register("FedHPL", **DIFFERENT_MODELS, search=_SEARCH)
def fedhpl(
    setting: VitSetting,
    *,
    learning_rate: float = 1e-2,
    distillation_weight: float = 1.0,
    share: Sequence[str] = (),
) -> fp.Method:
    """FedHPL: with `share`, these parts are averaged among trunks of one width."""
    return _taught(setting, share, learning_rate, distillation_weight)


@register("FedHPL +P", **DIFFERENT_MODELS, search=_SEARCH)
def fedhpl_p(
    setting: VitSetting, *, learning_rate: float = 1e-2, distillation_weight: float = 1.0
) -> fp.Method:
    """FedHPL +P: prompts are averaged among trunks of one width, which need one depth."""
    return _taught(setting, ["prompts"], learning_rate, distillation_weight)


@register("FedHPL +H", **DIFFERENT_MODELS, search=_SEARCH)
def fedhpl_h(
    setting: VitSetting, *, learning_rate: float = 1e-2, distillation_weight: float = 1.0
) -> fp.Method:
    """FedHPL +H: heads are averaged among trunks of one width."""
    share = ["head"] if setting.num_features is None else ["projection", "head"]
    return _taught(setting, share, learning_rate, distillation_weight)


def _taught(
    setting: VitSetting, share: Sequence[str], learning_rate: float, weight: float
) -> fp.Method:
    """Make the method, which averages some parts among trunks of one width."""
    unknown = setting.unknown_rows(setting.num_classes)

    def dim(client):
        return setting.trunk_of(client).num_features

    def message(logits, model, size):
        return {"logits": logits} | (fp.collect(model, weight=size, only=share) if share else {})

    def train(data, answer, state):
        model = setting.model(data.id, state)
        fp.load_values(model, {n: entry for n, entry in answer.items() if n != "logits"})
        optimizer = data.optimizer(model, learning_rate)
        for images, labels in data.batches():
            logits = model(images)
            loss = F.cross_entropy(logits, labels)
            loss = loss + weight * fp.distillation_loss(logits, labels, answer["logits"])
            take_step(optimizer, loss)
        payload = message(_correct_logits(model, data), model, data.num_examples)
        return payload, fp.snapshot(model, buffers=True)

    def answer(client, state):
        return state[str(dim(client))]

    def step(server_round, payloads, state):
        widths = [*map(dim, payloads)]
        # An entry of weight 0 for each width gives every width a teacher.
        entries = [payload["logits"] for payload in payloads.values()] + [unknown] * len(state)
        teachers = fp.heterogeneous_means(entries, [*widths, *map(int, state)])
        shared = _shared(payloads.values(), widths, state)
        return {width: {**shared[width], "logits": teachers[int(width)]} for width in state}

    def form(client):
        return message(unknown, setting.model(client, {}), 0)

    forms = {kind: form(kind) for kind in range(setting.num_backbones)}
    first: dict[str, Payload] = {str(dim(kind)): sent for kind, sent in forms.items()}
    _shared(forms.values(), [*map(dim, forms)], first)  # refuses prompts of unlike depth
    server = fp.Server(first, answer, step)
    return fp.Method(train, server, setting.private_model, form=form)


@torch.no_grad()
def _correct_logits(model: nn.Module, data: ClientData) -> fp.Weighted:
    """Average the logits of each class over the images that are classified correctly."""
    images, labels = data.own()
    logits = model(images)
    correct = logits.argmax(1) == labels
    return fp.class_means(logits, labels, num_classes=data.setting.num_classes, keep=correct)


def _shared(
    payloads: Iterable[Payload], widths: Sequence[int], replies: Mapping[str, Payload]
) -> dict[str, Payload]:
    """Average the entries of clients with equal widths; a width without clients keeps its reply."""
    sent: dict[str, list[Payload]] = {width: [] for width in replies}
    for payload, width in zip(payloads, widths, strict=True):
        sent[str(width)].append(payload)
    return {
        width: fp.weighted_mean(sent[width]) if sent[width] else reply
        for width, reply in replies.items()
    }
