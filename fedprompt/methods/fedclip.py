"""Clients train an attention over the image features of a frozen CLIP, and the server averages it.

Two linear layers and a softmax compute one factor for each dimension of an image feature. In
training, each image of a batch has to find the sentence of its class among the sentences of the
batch, and each sentence its image. Lu et al., "FedCLIP: Fast Generalization and Personalization for
CLIP in Federated Learning", 2023 (arXiv:2302.13485), by the authors' code.

Up: the attention, 2 D² + 2 D numbers. Down: the attention.

Deviations: the optimizer is the one of all methods, and the last round counts. The code has Adam
with a new state in each round, and reports the round that is best on validation images.

Compared: microsoft/PersonalizedFL 441670e, with the deviations above, float64, largest difference
1.7e-16 (2026-11).
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import fedprompt as fp
from fedprompt.methods.models import ClipSetting, Complete
from fedprompt.methods.registry import register
from fedprompt.methods.steps import averaged, take_step


class _Attended(Complete):
    """Zero-shot CLIP whose image features are multiplied by an attention over dimensions."""

    def __init__(self, setting: ClipSetting) -> None:
        super().__init__()
        self.text = setting.handwritten_text()
        self.scale = setting.scale
        dim = self.text.shape[1]
        layers = nn.Linear(dim, dim), nn.Tanh(), nn.Linear(dim, dim), nn.Softmax(dim=1)
        self.attention = nn.Sequential(*layers)

    def match(self, tokens: Tensor, text: Tensor) -> Tensor:
        """Compare images with sentences."""
        features = tokens[:, 0] * self.attention(tokens[:, 0])
        return fp.cosine_logits(features, text, scale=self.scale)

    def forward(self, tokens: Tensor) -> Tensor:
        """Classify images by their pooled token."""
        return self.match(tokens, self.text)


@register("FedCLIP", families=("CLIP",), search={"learning_rate": (1e-4, 1e-2)})
def fedclip(setting: ClipSetting, *, learning_rate: float = 1e-3) -> fp.Method:
    """FedCLIP."""
    model = setting.seeded(_Attended, setting)

    def train(data, answer, state):
        fp.load_values(model, answer)
        optimizer = data.optimizer(model, learning_rate)
        for tokens, labels in data.batches():
            logits = model.match(tokens, model.text[labels])
            pairs = torch.arange(len(labels), device=labels.device)
            loss = (F.cross_entropy(logits, pairs) + F.cross_entropy(logits.T, pairs)) / 2
            take_step(optimizer, loss)
        return fp.collect(model, weight=1.0), state

    return averaged(model, train)
