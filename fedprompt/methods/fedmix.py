"""FedAvg with an approximation of mixup, between images of a client and mean images of all clients.

In its first round, a client sends the means of small groups of its images and of their labels.
Clients train on the first-order expansion of mixup with these means. Yoon et al., "FedMix:
Approximation of Mixup under Mean Augmented Federated Learning", ICLR 2021.

Up: prompts and head; in the first round of a client also its n/M mean images with their labels, for
n images in groups of M.
Down: prompts and head, and the mean images that the client has not received yet.

A round has two exchanges: means and values, then the training. The number of means depends on the
data of a client, so messages have no fixed form.

Deviations: in the paper, all clients send means before the first round. Here they send them when
they first take part. Mean images are not augmented. Images that are left over join the groups, so a
group has from M to 2M - 1 images. The mean of one image is the image itself. A client with fewer
than M images has one group, so a client with a single image sends it. A batch needs two backward
passes.

Compared: equations of the paper, with the deviations above, float64 (label shares in float32),
largest difference 9.9e-11 (2026-11).
"""

from collections.abc import Iterable

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import fedprompt as fp
from fedprompt.methods.registry import LEARNING_RATE, register
from fedprompt.methods.setting import ClientData
from fedprompt.methods.steps import take_step
from fedprompt.methods.whole_networks import ImageSetting


def _mixed_loss(
    model: nn.Module, images: Tensor, labels: Tensor, others: Tensor, their: Tensor, mix: float
) -> Tensor:
    """Approximate the loss of images that are mixed with mean images of others."""
    images = ((1 - mix) * images).requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):  # other kernels of attention have no second derivative
        logits = model(images)
    loss = F.cross_entropy(logits, labels)
    (slope,) = torch.autograd.grad(loss, images, create_graph=True)
    return (1 - mix) * loss + mix * F.cross_entropy(logits, their) + mix * (slope * others).sum()


def _means(data: ClientData, group_size: int) -> dict[str, Tensor]:
    """Average the images of a client, and their labels, in groups."""
    images, labels = data.own()
    order = torch.randperm(len(images), generator=data.at(0).generator("means"))
    groups = order.tensor_split(max(1, len(images) // group_size))
    shares = F.one_hot(labels, data.setting.num_classes).float()
    return {
        "images": torch.stack([images[group].mean(0) for group in groups]),
        "labels": torch.stack([shares[group].mean(0) for group in groups]),
    }


def _joined(pools: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Put the mean images of several clients into one pool."""
    pools = [pool for pool in pools if pool]
    return {key: torch.cat([pool[key] for pool in pools]) for key in ("images", "labels")}


@register(
    "FedMix",
    families=("one model",),
    search=LEARNING_RATE | {"mix": (1e-2, 0.3), "group_size": [5, 10]},
)
def fedmix(
    setting: ImageSetting, *, learning_rate: float = 1e-2, mix: float = 0.05, group_size: int = 5
) -> fp.Method:
    """FedMix."""
    model = setting.new_model()
    mean = fp.averaging_server(fp.snapshot(model))

    def train(data, answer, state):
        if "images" not in answer:  # the first of two exchanges: a new client sends its means
            return ({} if state else _means(data, group_size)), {**state, "values": dict(answer)}
        pool = _joined([state.get("pool", {}), answer])
        fp.load_values(model, state["values"])
        rng = data.generator("mixup")
        optimizer = data.optimizer(model, learning_rate)
        for images, labels in data.batches():
            drawn = torch.randint(len(pool["images"]), (len(images),), generator=rng)
            others, their = pool["images"][drawn], pool["labels"][drawn]
            loss = _mixed_loss(model, images, labels, others, their, mix)
            take_step(optimizer, loss)
        return fp.collect(model, weight=data.num_examples), {"pool": pool}

    def answer(client, state):
        have = state["have"].get(str(client), 0)
        new = {name: value[have:] for name, value in state["pool"].items()}
        return new if state["second"] else state["values"]

    def step(server_round, payloads, state):
        if not state["second"]:
            return {**state, "pool": _joined([state["pool"], *payloads.values()]), "second": True}
        have = dict.fromkeys(map(str, payloads), len(state["pool"]["images"]))
        new = {"have": state["have"] | have, "second": False}
        return {**state, **mean.step(server_round, payloads, state), **new}

    def predict(data, answer, state):
        fp.load_values(model, state.get("values", answer))  # the state has them between exchanges
        return model

    server = fp.Server({**mean.state, "pool": {}, "have": {}, "second": False}, answer, step)
    return fp.Method(train, server, predict, exchanges=2)
