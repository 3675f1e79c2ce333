"""FedAvg with an approximation of mixup, between images of a client and mean images of all clients.

In its first round, a client sends the means of small groups of its images and of their labels.
Clients train on the first-order expansion of mixup with these means. Yoon et al., "FedMix:
Approximation of Mixup under Mean Augmented Federated Learning", ICLR 2021.

Up: prompts and head; in the first round of a client also its n/M mean images with their labels, for
n images in groups of M.
Down: prompts and head, and the mean images that the client has not received yet.

Deviations: in the paper, all clients send means before the first round. Here they send them when
they first take part. Mean images are not augmented. The last group of a client may be smaller. A
batch needs two backward passes.

Compared: equations of the paper, with the deviations above, float64 (label shares in float32),
largest difference 9.9e-11 (2026-11).
"""

from collections.abc import Iterator

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import fedprompt as fp
from methods.federation import Message, Predictions, VitFederation

FAMILIES = ("one model",)
TRAITS = ()
SEARCH = {"learning_rate": (1e-3, 1e-1), "mix": (1e-2, 0.3), "group_size": [5, 10]}


def mixed_loss(
    model: nn.Module, images: Tensor, labels: Tensor, others: Tensor, their: Tensor, mix: float
) -> Tensor:
    images = ((1 - mix) * images).requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):  # other kernels of attention have no second derivative
        logits = model(images)
    own = F.cross_entropy(logits, labels)
    (slope,) = torch.autograd.grad(own, images, create_graph=True)
    return (1 - mix) * own + mix * F.cross_entropy(logits, their) + mix * (slope * others).sum()


def means(federation: VitFederation, client: int, group_size: int) -> Message:
    images, labels = federation.own(client)
    rng = federation.generator(0, client, purpose="means")
    groups = torch.randperm(len(images), generator=rng).split(group_size)
    shares = F.one_hot(labels, federation.num_classes).float()
    return {
        "images": torch.stack([images[group].mean(0) for group in groups]),
        "labels": torch.stack([shares[group].mean(0) for group in groups]),
    }


def fedmix(
    federation: VitFederation,
    *,
    learning_rate: float = 1e-2,
    mix: float = 0.05,
    group_size: int = 5,
) -> Iterator[Predictions]:
    """FedMix."""
    model, server = federation.new_model(), fp.overwrite()
    values, sent, received = fp.snapshot(model), {}, {}
    state = server.init(values)
    for server_round in range(federation.rounds):
        payloads, cohort = [], federation.cohort(server_round)
        for client in [each for each in cohort if each not in sent]:
            sent[client] = federation.send_up(client, means(federation, client, group_size))
        pool = {
            key: torch.cat([each[key] for each in sent.values()]) for key in ("images", "labels")
        }
        for client in cohort:
            fp.load_values(model, federation.send_down(client, values))
            have, received[client] = received.get(client, 0), len(pool["images"])
            federation.send_down(client, {name: value[have:] for name, value in pool.items()})
            rng = federation.generator(server_round, client, purpose="mixup")
            optimizer = federation.optimizer(model, learning_rate)
            for images, labels in federation.batches(client, server_round):
                drawn = torch.randint(len(pool["images"]), (len(images),), generator=rng)
                others, their = pool["images"][drawn], pool["labels"][drawn]
                loss = mixed_loss(model, images, labels, others, their, mix)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            payload = fp.collect(model, weight=federation.num_examples(client))
            payloads.append(federation.send_up(client, payload))
        values, state = server.step(values, fp.weighted_mean(payloads), state)
        fp.load_values(model, values)
        yield Predictions(everyone=model)
