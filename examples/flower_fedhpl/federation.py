"""FedHPL divided into a client and a server that exchange messages.

The client function trains for one round. The server answers each client with a teacher for its
backbone width.
"""

from argparse import Namespace
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import fedprompt as fp
from embedded.tasks import Backbone, Task, load_backbone, load_task, shards

NAMES = ("S", "B", "L")  # three clients, three widths
ARGS = Namespace(seed=0, rounds=2, steps=2, batch_size=64, num_prompts=8, device="cpu")
MAX_BYTES = 100_000
Answers = Mapping[int, fp.interfaces.Message]


@cache
def setting() -> tuple[Task, list[Backbone], list[np.ndarray]]:
    """Load the images, the frozen backbones and the shards, which are present on every machine.

    A client uses its own shard only.
    """
    torch.set_num_threads(1)  # threads only wait in models this tiny
    task = load_task("digits", root=".", seed=ARGS.seed, image_size=16)
    backbones = [
        load_backbone(name, pretrained=False, image_size=16, device=torch.device(ARGS.device))
        for name in NAMES
    ]
    return (
        task,
        backbones,
        shards(
            task.train.labels, partition="noniid", alpha=0.3, num_clients=len(NAMES), seed=ARGS.seed
        ),
    )


def new_model(client: int) -> nn.ModuleDict:
    """Build the prompts and the head of a client, identical in every process."""
    task, backbones, _ = setting()
    backbone = backbones[client]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(ARGS.seed)
        prompts = fp.DeepPrompts(
            ARGS.num_prompts,
            backbone.dim,
            backbone.encoder.depth,
            patch_size=backbone.patch_size,
        )
        head = nn.Linear(backbone.dim, task.num_classes)
    return nn.ModuleDict({"prompts": prompts, "head": head})


def logits(model: nn.ModuleDict, backbone: Backbone, images: Tensor) -> Tensor:
    """Classify images."""
    images = (images - backbone.mean) / backbone.std
    return model["head"](fp.encode_prompted(backbone.encoder, images, model["prompts"]()).pooled)


def client_round(
    model: nn.ModuleDict, client: int, server_round: int, teacher: fp.Weighted
) -> dict[str, fp.Weighted]:
    """Train a client for one round; return the mean logits of each class."""
    task, backbones, split = setting()
    backbone, shard = backbones[client], split[client]
    optimizer = task.recipe.make_optimizer(model.parameters(), server_round / ARGS.rounds)
    stream = fp.stream_generator(ARGS.seed, server_round=server_round, client=client)
    for images, labels in task.train.training(
        shard, ARGS.device, size=ARGS.batch_size, steps=ARGS.steps, generator=stream
    ):
        scores = logits(model, backbone, images)
        loss = F.cross_entropy(scores, labels) + fp.distillation_loss(scores, labels, teacher)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    pieces = []
    with torch.no_grad():
        for images, labels in task.train.batches(shard, ARGS.device):
            scores = logits(model, backbone, images)
            correct = scores.argmax(1) == labels
            pieces.append(
                fp.class_means(scores, labels, num_classes=task.num_classes, keep=correct)
            )
    return {"logits": fp.weighted_mean(pieces)}


def train(
    client: int, server_round: int, broadcast: fp.interfaces.Message, state: Any
) -> tuple[fp.interfaces.Message, Any]:
    """Train one client for one round.

    Its prompts and head are personal. They stay in its state.
    """
    model = new_model(client)
    model.load_state_dict(state or model.state_dict())
    return client_round(model, client, server_round, broadcast["teacher"]), model.state_dict()


class Server:
    """Server that answers each client with the teacher of its backbone width.

    A client that sent no payload keeps its last answer.
    """

    def init(self) -> tuple[Answers, Any]:
        """Return empty teachers for all clients."""
        return {client: {"teacher": unknown()} for client in range(len(NAMES))}, {}

    def step(
        self, payloads: Mapping[int, fp.interfaces.Message], state: Any, /
    ) -> tuple[Answers, Any]:
        """Average the payloads for each client, weighted by the similarity of widths."""
        _, backbones, _ = setting()
        heard = sorted(payloads)
        dims = [backbones[client].dim for client in heard]
        teachers = fp.heterogeneous_means([payloads[client]["logits"] for client in heard], dims)
        last = {**self.init()[0], **state}
        replies = {c: {"teacher": teachers[dim]} for c, dim in zip(heard, dims, strict=True)}
        answers = {**last, **replies}
        return answers, answers


def unknown() -> fp.Weighted:
    """Return the teacher before the first round, which has the shapes of every message."""
    classes = setting()[0].num_classes
    return fp.Weighted(torch.zeros(classes, classes), torch.zeros(classes))


def fingerprint(client: int) -> dict[str, str]:
    """Return the fingerprint of the backbone that a client must have."""
    return fp.fingerprint(setting()[1][client].encoder, new_model(client)["prompts"]())


def broadcast(client: int) -> fp.wire.Expected:
    """Return the broadcast that a client expects."""
    return fp.wire.Expected({"teacher": unknown()}, fingerprint(client))


def expected_payload(client: int) -> fp.wire.Expected:
    """Return the payload that the server expects from a client."""
    return fp.wire.Expected({"logits": unknown()}, fingerprint(client))
