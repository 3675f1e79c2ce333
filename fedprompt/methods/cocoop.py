"""A small network adds a vector of each image to the context, and the server averages both.

All tokens of the context are shifted by the same vector, so each image has different text features.
CoCoOp is from Zhou et al., "Conditional Prompt Learning for Vision-Language Models", CVPR 2022. The
network has two layers, and its hidden width is a sixteenth of the width of the image features.

Up: a context and the network (T D + D F / 16 + F F / 16 numbers and biases, for image features of
width F). Down: the same.

Deviations: the paper trains on one machine. Here the context and the network are averaged over
clients, as PromptFL averages a context. Batches are as in all methods, not single images.

Compared: KaiyangZhou/CoOp ff61507, with the deviations above, float64, largest difference 3e-16
(2026-11).
"""

import torch.nn as nn
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

import fedprompt as fp
from fedprompt.methods.models import ClipModel, ClipSetting
from fedprompt.methods.registry import LEARNING_RATE, register
from fedprompt.methods.steps import averaged, fedavg_client


class _ConditionalText(ClipModel):
    """Classifier of image tokens, with a context for each image."""

    def __init__(self, setting: ClipSetting) -> None:
        super().__init__(setting)
        width = setting.handwritten_text().shape[1]
        hidden = max(1, width // 16)
        self.context = setting.new_context()
        self.network = nn.Sequential(
            nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, self.tower.dim)
        )

    def contexts(
        self, tokens: Float[Tensor, "batch tokens dim"]
    ) -> Float[Tensor, "batch 1 length width"]:
        """Return the context of each image."""
        shift = self.network(F.normalize(tokens[:, 0], dim=-1))
        return self.context() + shift[:, None, None]

    def forward(self, tokens: Float[Tensor, "batch tokens dim"]) -> Float[Tensor, "batch classes"]:
        """Classify images by their pooled token, which is first."""
        text = self.encode_names(self.contexts(tokens), per_sample=True)
        return fp.cosine_logits(tokens[:, 0], text[:, 0], scale=self.scale)


@register("CoCoOp (averaged)", families=("CLIP",), search=LEARNING_RATE)
def cocoop(setting: ClipSetting, *, learning_rate: float = 5e-3) -> fp.Method:
    """CoCoOp (averaged)."""
    model = setting.seeded(_ConditionalText, setting)
    return averaged(model, fedavg_client(model, learning_rate))
