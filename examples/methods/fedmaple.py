"""Deep text prompts are learned together with the visual prompts that they are projected to.

Text prompts replace the context before every layer that both towers have. A linear projection of
each layer makes the visual prompts of that layer. The server averages both. This is FedAvg
(McMahan et al., AISTATS 2017) of MaPLe (Khattak et al., "MaPLe: Multi-Modal Prompt Learning", CVPR
2023), for L layers and images of width V.

Up: text prompts (L T D) and projections (L V (D + 1)). Down: text prompts and projections.

Deviations: all layers have prompts. MaPLe has them in 9 of 12 layers, with 2 tokens that begin at
the words of a template.

Compared: muzairkhattak/multimodal-prompt-learning 69bce21, with the deviations above, float64,
largest difference 1.0e-14 (2026-11).
"""

from collections.abc import Iterator

import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import fedprompt as fp
from methods.federation import ClipFederation, Predictions

FAMILIES = ("CLIP",)
TRAITS = ()
SEARCH = {"learning_rate": (1e-3, 1e-1)}
INPUTS = "images"


class Coupled(nn.Module):
    """Text prompts of each layer, and their projections to visual prompts."""

    def __init__(self, federation: ClipFederation) -> None:
        super().__init__()
        self.tower, self.names, self.scale = federation.tower, federation.names, federation.scale
        self.federation, self.trunk = federation, fp.vit_trunk(federation.clip.visual)
        depth, width = min(self.tower.depth, self.trunk.depth), self.tower.dim
        draw = federation.generator(0, purpose="prompts")
        size = {"num_contexts": depth, "length": federation.length}
        self.prompts = fp.ContextPrompts(width, **size, generator=draw)
        self.project = nn.ModuleList(nn.Linear(width, self.trunk.dim) for _ in range(depth))

    def forward(self, images: Tensor) -> Tensor:
        """Classify images."""
        layers = dict(enumerate(self.prompts()))
        visual = {layer: self.project[layer](tokens) for layer, tokens in layers.items()}
        visual[0] = self.federation.clip.visual.ln_pre(visual[0])
        stream = fp.PromptStream(visual, replace=True)
        image = fp.encode_prompted(self.trunk, images, stream).pooled
        first = fp.prompted_text(layers.pop(0)[None], self.names)
        text = self.tower(first, fp.PromptStream(layers, replace=True))[0]
        return fp.cosine_logits(image, text, scale=self.scale)


def fedmaple(federation: ClipFederation, *, learning_rate: float = 5e-3) -> Iterator[Predictions]:
    """FedMaPLe."""
    model, server = Coupled(federation), fp.overwrite()
    values = fp.snapshot(model)
    state = server.init(values)
    for server_round in range(federation.rounds):
        payloads = []
        for client in federation.cohort(server_round):
            fp.load_values(model, federation.send_down(client, values))
            optimizer = federation.optimizer(model, learning_rate)
            for images, labels in federation.batches(client, server_round):
                loss = F.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            payload = fp.collect(model, weight=federation.num_examples(client))
            payloads.append(federation.send_up(client, payload))
        values, state = server.step(values, fp.weighted_mean(payloads), state)
        fp.load_values(model, values)
        yield Predictions(everyone=model)
