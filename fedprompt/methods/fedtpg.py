"""A shared network generates the context from the names of a client's classes.

The text features of the class names are the keys of a cross-attention, and the contexts follow
from learned queries. Layer norms and a gated feed-forward layer surround the attention. A client
trains the network on its own classes only. So the network gives a context for any classes, also for
those that no client has. Qiu et al., "Federated Text-driven Prompt Generation for Vision-Language
Models", ICLR 2024.

Up: the network (T D + 14 D D + 2 D F + 17 D + 2 F numbers, for text features of width F). Down: the
same.

Deviations: none in the rule. Every client counts once, as in the authors' code. The network has no
self-attention layers, which is the default of that code. For tests, the names of all classes are
given, which is the paper's setting of base classes.

Compared: boschresearch/FedTPG f141c29, float64, largest difference 1.5e-15 (2026-11).
"""

from collections.abc import Sequence

import torch
import torch.nn as nn
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

import fedprompt as fp
from fedprompt.methods.models import ClipModel, ClipSetting
from fedprompt.methods.registry import register
from fedprompt.methods.steps import averaged, take_step


class _Network(nn.Module):
    """Learned queries attend to the names of classes, and a gated feed-forward layer follows."""

    def __init__(self, length: int, dim: int, key_dim: int) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.empty(length, dim).normal_(0, 0.02))
        widths = {"kdim": key_dim, "vdim": key_dim, "batch_first": True}
        self.attention = nn.MultiheadAttention(dim, 4, **widths)
        self.query_norm = nn.LayerNorm(dim)
        self.key_norm = nn.LayerNorm(key_dim)
        self.norm = nn.LayerNorm(dim)
        self.widen = nn.Linear(dim, 8 * dim)
        self.narrow = nn.Linear(4 * dim, dim)

    def forward(self, keys: Float[Tensor, "1 classes key_dim"]) -> Float[Tensor, "1 length dim"]:
        """Generate a context from the text features of names."""
        keys = self.key_norm(keys)
        mixed, _ = self.attention(self.query_norm(self.queries)[None], keys, keys)
        values, gates = self.widen(self.norm(mixed)).chunk(2, dim=-1)
        return mixed + self.narrow(values * F.gelu(gates))


class _GeneratedText(ClipModel):
    """Classifier of image tokens whose context is generated from class names."""

    def __init__(self, setting: ClipSetting) -> None:
        super().__init__(setting)
        self.class_names = setting.class_names
        width = setting.handwritten_text().shape[1]
        self.network = setting.seeded(_Network, setting.length, self.tower.dim, width)

    def context(self, class_names: Sequence[str]) -> Float[Tensor, "1 length dim"]:
        """Generate the context of any classes from the text features of their names."""
        return self.network(fp.zero_shot_classifier(self.tower, class_names, ["{}"])[None])

    def forward(
        self, tokens: Float[Tensor, "batch tokens dim"], class_names: Sequence[str] | None = None
    ) -> Float[Tensor, "batch classes"]:
        """Classify images into the given classes; without any, into all."""
        class_names = self.class_names if class_names is None else class_names
        names = self.tower.class_names(class_names)
        text = self.tower(fp.prompted_text(self.context(class_names), names))
        return fp.cosine_logits(tokens[:, 0], text[0], scale=self.scale)


@register("FedTPG", families=("CLIP",), search={"learning_rate": (3e-4, 3e-2)})
def fedtpg(setting: ClipSetting, *, learning_rate: float = 1e-2) -> fp.Method:
    """FedTPG."""
    model = _GeneratedText(setting)

    def train(data, answer, state):
        fp.load_values(model, answer)
        optimizer = data.optimizer(model, learning_rate)
        present = data.class_counts.nonzero().flatten()
        class_names = [setting.class_names[label] for label in present]
        for tokens, labels in data.batches():
            logits = model(tokens, class_names)
            loss = F.cross_entropy(logits, torch.searchsorted(present, labels))
            take_step(optimizer, loss)
        return fp.collect(model, weight=1.0), state

    return averaged(model, train)
