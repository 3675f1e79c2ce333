"""One context for each class is scaled by keys of the clients, mixed by how an image looks.

Every client has a fixed random key. It multiplies the contexts by one plus its key. A linear query
of the image learns which client the image comes from. A prediction mixes all keys with the softmax
of the standardized query, separately for each image. Su et al., "Federated Adaptive Prompt Tuning
for Multi-Domain Collaborative Learning", AAAI 2024 (FedAPT). Another FedAPT of 2025 is about
adversarial attacks.

Up: contexts (C T D) and a query of one row of image features for each client. Down: the same. Keys
are drawn from a common seed.

Deviations: each client has its own key, even if several clients share a domain.

Compared: leondada/FedAPT 2f8060a, with the deviations above, float64, largest difference 4.4e-15
(logits 1e-14) (2026-11).
"""

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from einops import einsum
from torch import Tensor

import fedprompt as fp
from fedprompt.methods.models import ClipModel, ClipSetting
from fedprompt.methods.registry import LEARNING_RATE, register
from fedprompt.methods.steps import averaged, take_step


class _Adaptive(ClipModel):
    """Contexts of the classes, scaled by a mixture of keys for each image."""

    def __init__(self, setting: ClipSetting, temperature: float) -> None:
        super().__init__(setting)
        self.temperature = temperature
        draw = setting.stream(0, purpose="keys and contexts")
        size = dict[str, Any](length=setting.length, num_classes=setting.num_classes)
        self.contexts = fp.ContextPrompts(self.tower.dim, **size, generator=draw)
        count = len(setting.named_clients)
        self.query = nn.Linear(setting.handwritten_text().shape[1], count, bias=False)
        shape = (count, setting.length, self.tower.dim)
        self.keys = torch.rand(shape, generator=draw)

    def with_keys(self, tokens: Tensor, keys: Tensor) -> Tensor:
        """Classify each image with its key (batch, length, dim)."""
        contexts = self.contexts() * (1 + keys[:, None, None])
        text = self.encode_names(contexts, class_specific=True, per_sample=True)[:, 0]
        return fp.cosine_logits(tokens[:, 0], text.expand(len(tokens), -1, -1), scale=self.scale)

    def weights(self, tokens: Tensor) -> Tensor:
        """Weigh the keys for each image."""
        query = self.query(tokens[:, 0])
        if query.shape[1] == 1:  # the score of a single client has no deviation
            return torch.ones_like(query)
        standard = (query - query.mean(1, keepdim=True)) / query.std(1, keepdim=True)
        return (standard / self.temperature).softmax(1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Classify images with their mixtures of keys."""
        keys = einsum(self.weights(tokens), self.keys, "batch key, key ... -> batch ...")
        return self.with_keys(tokens, keys)


@register("FedAPT", families=("CLIP",), search=LEARNING_RATE | {"temperature": (1e-3, 1.0)})
def fedapt(
    setting: ClipSetting, *, learning_rate: float = 5e-3, temperature: float = 1e-2
) -> fp.Method:
    """FedAPT."""
    model = setting.seeded(_Adaptive, setting, temperature)

    def train(data, answer, state):
        fp.load_values(model, answer)
        optimizer = data.optimizer(model, learning_rate)
        number = list(setting.named_clients).index(data.id)
        for tokens, labels in data.batches():
            logits = model.with_keys(tokens, model.keys[number, None])
            origin = torch.full_like(labels, number)
            loss = F.cross_entropy(logits, labels)
            loss = loss + F.cross_entropy(model.query(tokens[:, 0]), origin)
            take_step(optimizer, loss)
        return fp.collect(model, weight=1.0), state

    return averaged(model, train)
