"""PromptFL whose context has two halves: one is averaged, the other stays on the client.

FedPer keeps the last layers of a network on the client (Arivazhagan et al., "Federated Learning
with Personalization Layers", 2019). In a context, the last tokens take their place. The combination
is a baseline of pFedPrompt (Guo et al., WWW 2023) and FedOTP (Li et al., CVPR 2024).

Up: the first half of a context (T D / 2 numbers). Down: the same.

Deviations: none. The tokens are divided as in public code of this baseline: the first half is
shared.

Compared: PanBikang/PromptFolio 8f729aa, which has this baseline, float64, largest difference 9e-15
(2026-11).
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

import fedprompt as fp
from fedprompt.methods.models import ClipSetting, PromptedClassifier
from fedprompt.methods.registry import LEARNING_RATE, PERSONALIZED_CLIP, register
from fedprompt.methods.steps import averaged, take_step


class _Halves(nn.Module):
    """Context whose first tokens and last tokens are two modules."""

    def __init__(self, context: Float[Tensor, "length dim"]) -> None:
        super().__init__()
        first, last = context.tensor_split(2)
        self.shared = fp.ContextPrompts(context.shape[1], init=first)
        self.private = fp.ContextPrompts(context.shape[1], init=last)

    def forward(self) -> Float[Tensor, "1 length dim"]:
        """Return the whole context."""
        return torch.cat([self.shared(), self.private()], 1)


@register("PromptFL + FedPer", **PERSONALIZED_CLIP, search=LEARNING_RATE)
def promptfl_fedper(setting: ClipSetting, *, learning_rate: float = 5e-3) -> fp.Method:
    """PromptFL + FedPer."""
    model = PromptedClassifier(setting, _Halves(setting.new_context().context.detach()[0]))
    first = fp.snapshot(model)

    def train(data, answer, state):
        fp.load_values(model, {**first, **answer, **state})
        optimizer = data.optimizer(model, learning_rate)
        for tokens, labels in data.batches():
            take_step(optimizer, F.cross_entropy(model(tokens), labels))
        payload = fp.collect(model, weight=data.num_examples, only=["context.shared"])
        return payload, fp.snapshot(model, only=["context.private"])

    return averaged(model, train, shared=["context.shared"])
