"""FedL2G with two architectures that share only guides, sent in half precision."""

from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

import fedprompt as fp
from federations import parts
from federations.parts import Answers, Federation, Server, State


class Prompted(nn.Module):
    """Frozen transformer with prompts and a head, guided in the logit space."""

    def __init__(self, trunk: fp.Trunk) -> None:
        super().__init__()
        self.trunk, self.prompts = trunk, fp.DeepPrompts(2, trunk.dim, trunk.depth, patch_size=4)
        self.head = nn.Linear(trunk.dim, parts.CLASSES)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits, twice."""
        logits = self.head(fp.encode_prompted(self.trunk, images, self.prompts()).pooled)
        return logits, logits


class Convolutional(nn.Sequential):
    """Small network with learnable pixels around its images, and with batch statistics."""

    def __init__(self) -> None:
        body = [
            nn.Conv2d(1, 6, 3, stride=2),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        ]
        super().__init__(
            fp.PadPrompts(16, padding=1, mean=(0.5,), std=(0.5,)),
            *body,
            nn.Linear(24, parts.CLASSES),
        )

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits, twice."""
        logits = super().forward(images)
        return logits, logits


def fedl2g() -> Federation:
    """Make the federation."""
    trunk = parts.vit(32)
    models = [
        parts.drawn(make, seed)
        for seed, make in enumerate((partial(Prompted, trunk), Convolutional, Convolutional))
    ]
    draw = torch.Generator().manual_seed(0)
    start = torch.randn(parts.CLASSES, parts.CLASSES, generator=draw)

    def train(
        client: int, server_round: int, broadcast: fp.interfaces.Message, state: State
    ) -> tuple[fp.interfaces.Message, State]:
        model = deepcopy(models[client])
        stream = fp.stream_generator(2, server_round=server_round, client=client)
        guides = broadcast["guides"].float()
        fp.load_values(model, state)
        sgd = torch.optim.SGD(model.parameters(), 0.05)
        for _ in range(parts.STEPS):
            images, labels = parts.batch(stream)
            parts.descend(sgd, fp.guided_loss(*model(images), labels, guides))
        gradient = fp.guide_gradient(
            model, guides, parts.batch(stream), parts.batch(stream), learning_rate=0.05
        )
        return {"guides": gradient._replace(value=gradient.value.bfloat16())}, model.state_dict()

    update = fp.descend(partial(torch.optim.SGD, lr=0.5, momentum=0.9), max_norm=100.0)

    def answers(guides: Tensor) -> Answers:
        return parts.for_all({"guides": guides.bfloat16()})

    def init() -> tuple[Answers, Any]:
        guides = start.clone()
        return answers(guides), {"guides": guides, "update": update.init(guides)}

    def step(payloads: Mapping[int, fp.interfaces.Message], state: Any) -> tuple[Answers, Any]:
        mean = fp.weighted_mean(payload["guides"] for payload in parts.by_id(payloads))
        guides, memory = update.step(state["guides"], mean, state["update"])
        return answers(guides), {"guides": guides, "update": memory}

    half = torch.zeros(parts.CLASSES, parts.CLASSES, dtype=torch.bfloat16)
    return Federation(
        cohort=parts.everybody,
        client=train,
        server=Server(init, step),
        payload_form=lambda client: {"guides": fp.Weighted(half, torch.zeros(parts.CLASSES))},
        broadcast_form=lambda client: {"guides": half},
        fingerprint=fp.fingerprint(trunk, models[0].prompts()),
    )
