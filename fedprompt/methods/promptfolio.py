"""Each class has a fixed mixture of the text features of a shared and of a private context.

Both contexts are trained with the loss of the mixture, and the server averages the shared one. Pan
et al., "Federated Learning from Vision-Language Foundation Models: Theoretical Analysis and
Method", NeurIPS 2024 (PromptFolio).

Up: the shared context (T D). Down: the shared context (T D).

Deviations: all clients begin with the same private context, which differs from the shared one.

Compared: PanBikang/PromptFolio 8f729aa, float64, largest difference 6.2e-15 (2026-11).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

import fedprompt as fp
from fedprompt.methods.models import ClipModel, ClipSetting
from fedprompt.methods.registry import LEARNING_RATE, PERSONALIZED_CLIP, register
from fedprompt.methods.steps import averaged, take_step


class _Portfolio(ClipModel):
    """Classifies with a mixture of the text features of a shared and of a private context."""

    def __init__(self, setting: ClipSetting, private_share: float) -> None:
        super().__init__(setting)
        self.private_share = private_share
        self.shared = setting.new_context()
        self.private = setting.drawn_contexts("private context")

    def text(self) -> Tensor:
        """Mix the text features (classes, dim) of length 1; the mixture is shorter."""
        features = self.encode_names(torch.cat([self.shared(), self.private()]))
        shared, private = F.normalize(features, dim=-1)
        return (1 - self.private_share) * shared + self.private_share * private

    def forward(self, tokens: Tensor) -> Tensor:
        """Classify images by their pooled token."""
        return self.scale * F.normalize(tokens[:, 0], dim=-1) @ self.text().T


@register(
    "PromptFolio",
    **PERSONALIZED_CLIP,
    search=LEARNING_RATE | {"private_share": [0.2, 0.4, 0.6, 0.8]},
)
def promptfolio(
    setting: ClipSetting, *, learning_rate: float = 5e-3, private_share: float = 0.4
) -> fp.Method:
    """PromptFolio."""
    model = _Portfolio(setting, private_share)
    first = fp.snapshot(model)

    def train(data, answer, state):
        fp.load_values(model, {**first, **answer, **state})
        optimizer = data.optimizer(model, learning_rate)
        for tokens, labels in data.batches():
            take_step(optimizer, F.cross_entropy(model(tokens), labels))
        payload = fp.collect(model, weight=data.num_examples, only=["shared"])
        return payload, fp.snapshot(model, only=["private"])

    return averaged(model, train, shared=["shared"])
