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

from typing import Any

import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import fedprompt as fp
from fedprompt.methods.registry import LEARNING_RATE, register
from fedprompt.methods.setting import ClipSetting


class Coupled(nn.Module):
    """Text prompts of each layer, and their projections to visual prompts."""

    def __init__(self, setting: ClipSetting) -> None:
        super().__init__()
        self.tower, self.names, self.scale = setting.tower, setting.names, setting.scale
        self.visual, self.trunk = setting.clip.visual, fp.vit_trunk(setting.clip.visual)
        depth, width = min(self.tower.depth, self.trunk.depth), self.tower.dim
        draw = setting.generator(0, purpose="prompts")
        size = dict[str, Any](num_contexts=depth, length=setting.length)
        self.prompts = fp.ContextPrompts(width, **size, generator=draw)
        self.project = nn.ModuleList(nn.Linear(width, self.trunk.dim) for _ in range(depth))

    def forward(self, images: Tensor) -> Tensor:
        """Classify images."""
        layers = dict(enumerate(self.prompts()))
        visual = {layer: self.project[layer](tokens) for layer, tokens in layers.items()}
        visual[0] = self.visual.ln_pre(visual[0])
        stream = fp.PromptStream(visual, replace=True)
        image = fp.encode_prompted(self.trunk, images, stream).pooled
        first = fp.prompted_text(layers.pop(0)[None], self.names)
        text = self.tower(first, fp.PromptStream(layers, replace=True))[0]
        return fp.cosine_logits(image, text, scale=self.scale)


@register("FedMaPLe", families=("CLIP",), search=LEARNING_RATE, inputs="images")
def fedmaple(setting: ClipSetting, *, learning_rate: float = 5e-3) -> fp.Method:
    """FedMaPLe."""
    model = setting.seeded(Coupled, setting)
    parts = ["prompts", "project"]

    def train(data, answer, state):
        fp.load_values(model, answer)
        optimizer = data.optimizer(model, learning_rate)
        for images, labels in data.batches():
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return fp.collect(model, weight=data.num_examples, only=parts), state

    def predict(data, answer, state):
        fp.load_values(model, answer)
        return model

    def form(client):
        return fp.collect(model, weight=0, only=parts)

    server = fp.averaging_server(fp.snapshot(model, only=parts))
    return fp.Method(train, server, predict, form=form)
