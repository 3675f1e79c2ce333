"""Clients tune prompts and a head, and learn from mean class logits of all clients.

A client sends the mean logits of each class, over the images that it classifies correctly. The
server averages them with more weight for trunks of similar width, and each sample is distilled
towards the row of its class. Ma et al., "FedHPL: Efficient Heterogeneous Federated Learning with
Prompt Tuning and Logit Distillation", 2024.

Up: C(C + 1) numbers, which are C rows of logits and C counts; with +P also the prompts, PLD
numbers, and with +H the projection and the head. Down: the same.

Deviations: a projection to a common width lies between trunk and head, as for every method of this
family. It is shared with the head. Teachers come from the clients of the last round only, since the
paper has no client sampling. The count of a class is that of the logits sent, because the paper's
count of all samples is not in its message.

Compared: no public code; with Equations 7 to 10 and App. C.4, sample by sample, float64, largest
difference 1.1e-16; for +P and +H, float32, 9e-8 (2026-11).
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

import fedprompt as fp
from methods.federation import Predictions, VitFederation

FAMILIES = ("mixed models",)
TRAITS = ("personalized", "different models")
SEARCH = {"learning_rate": (1e-3, 1e-1), "distillation_weight": (1e-1, 10.0)}


def fedhpl(
    federation: VitFederation,
    *,
    learning_rate: float = 1e-2,
    distillation_weight: float = 1.0,
    share: Sequence[str] = (),
) -> Iterator[Predictions]:
    """FedHPL: with `share`, these parts are averaged among equal trunks."""
    return taught(federation, share, learning_rate, distillation_weight)


def fedhpl_p(
    federation: VitFederation, *, learning_rate: float = 1e-2, distillation_weight: float = 1.0
) -> Iterator[Predictions]:
    """FedHPL +P: prompts are averaged among equal trunks."""
    return taught(federation, ["prompts"], learning_rate, distillation_weight)


def fedhpl_h(
    federation: VitFederation, *, learning_rate: float = 1e-2, distillation_weight: float = 1.0
) -> Iterator[Predictions]:
    """FedHPL +H: heads are averaged among equal trunks."""
    return taught(federation, ["projection", "head"], learning_rate, distillation_weight)


def taught(
    federation: VitFederation, share: Sequence[str], learning_rate: float, weight: float
) -> Iterator[Predictions]:
    classes = federation.num_classes
    models = {client: federation.new_model(client) for client in federation.clients}
    dims = {client: federation.trunk_of(client).num_features for client in models}
    unknown = fp.Weighted(torch.zeros(classes, classes), torch.zeros(classes))
    replies = {dim: {} for dim in dims.values()}
    for server_round in range(federation.rounds):
        sent = {}
        for client in federation.cohort(server_round):
            model, reply = models[client], federation.send_down(client, replies[dims[client]])
            fp.load_values(model, {name: reply[name] for name in reply if name != "logits"})
            optimizer = federation.optimizer(model, learning_rate)
            for images, labels in federation.batches(client, server_round):
                logits = model(images)
                loss = F.cross_entropy(logits, labels)
                teacher = reply.get("logits", unknown)
                loss = loss + weight * fp.distillation_loss(logits, labels, teacher)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            with torch.no_grad():
                images, labels = federation.own(client)
                logits = model(images)
            correct = logits.argmax(1) == labels
            payload = {"logits": fp.class_means(logits, labels, num_classes=classes, keep=correct)}
            if share:
                payload |= fp.collect(model, weight=federation.num_examples(client), only=share)
            sent[client] = federation.send_up(client, payload)
        # An entry of weight 0 for each width gives every width a teacher.
        entries = [payload["logits"] for payload in sent.values()] + [unknown] * len(replies)
        teachers = fp.heterogeneous_means(entries, [dims[client] for client in sent] + [*replies])
        for dim in replies:
            alike = [sent[client] for client in sent if dims[client] == dim]
            shared = fp.weighted_mean(alike) if alike else replies[dim]
            replies[dim] = {**shared, "logits": teachers[dim]}
        yield Predictions(client=models.__getitem__, newcomer=federation.new_model)
