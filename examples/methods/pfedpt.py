"""Each client keeps a learned border of its images, and the server averages the head.

The border is added to the pixels of every image. In each round a client first trains its border
with the head frozen. It then trains the head with its border frozen. Li et al., "Visual Prompt
Based Personalized Federated Learning" (pFedPT), 2023.

Up: the head, C·D weights and C biases. Down: the head.

Deviations: the paper shares and trains a whole network. Here the trunk is frozen, so the head is
all that clients share. The two phases share the batches of a round, half for each. In the authors'
code each phase has epochs of its own, and the optimizer of the border keeps its momentum over
rounds. The border is 1 pixel wide, as 2 of 32 pixels there.

Compared: hkgdifyu/pFedPT cebec63, with the deviations above, float64, largest difference 1.1e-16
(2026-11).
"""

from collections.abc import Iterator
from itertools import islice

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import fedprompt as fp
from methods.federation import Predictions, VitFederation

FAMILIES = ("one model",)
TRAITS = ("personalized", "adapted")
SEARCH = {"learning_rate": (1e-3, 1e-1), "border_rate": (1e-2, 1.0)}


class Bordered(nn.Module):
    """A network whose images have a learned border of pixels added to them."""

    def __init__(self, federation: VitFederation, width: int) -> None:
        super().__init__()
        self.network = federation.new_model(prompts=lambda trunk: None)
        channels, *size = federation.inputs.shape[1:]
        inside = [each - 2 * width for each in size]
        plain = {"mean": [0.0] * channels, "std": [1.0] * channels}
        self.border = fp.PadPrompts(tuple(inside), padding=width, **plain)
        draw = federation.generator(0, purpose="border")
        for pixels in self.border.parameters():
            nn.init.normal_(pixels, generator=draw)
        self.register_buffer("inside", torch.zeros(1, channels, *inside))

    def forward(self, images: Tensor) -> Tensor:
        """Classify images."""
        return self.network(images + self.border(self.inside))


def pfedpt(
    federation: VitFederation,
    *,
    learning_rate: float = 1e-2,
    border_rate: float = 1e-1,
    width: int = 1,
) -> Iterator[Predictions]:
    """pFedPT."""  # noqa: D403
    model, server, own = Bordered(federation, width), fp.overwrite(), {}
    head, fresh = (fp.snapshot(model, only=[part]) for part in ("network.head", "border"))
    state = server.init(head)

    def load(client: int) -> nn.Module:
        fp.load_values(model, head | own.get(client, fresh))
        return model

    for server_round in range(federation.rounds):
        payloads = []
        for client in federation.cohort(server_round):
            fp.load_values(load(client), federation.send_down(client, head))
            batches, half = federation.batches(client, server_round), federation.steps // 2
            phases = (model.border, half, border_rate), (model.network.head, None, learning_rate)
            for part, steps, rate in phases:
                optimizer = federation.optimizer(part, rate)
                with fp.training_only(model, part):
                    for images, labels in islice(batches, steps):
                        loss = F.cross_entropy(model(images), labels)
                        optimizer.zero_grad()
                        loss.backward()
                        optimizer.step()
            own[client] = fp.snapshot(model, only=["border"])
            weight = federation.num_examples(client)
            payload = fp.collect(model, weight=weight, only=["network.head"])
            payloads.append(federation.send_up(client, payload))
        head, state = server.step(head, fp.weighted_mean(payloads), state)
        yield Predictions(client=load, newcomer=load)
