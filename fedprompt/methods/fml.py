"""Each client trains a private model and a messenger, which learn from each other.

Only the messenger ("meme model") is averaged over clients, so private models may differ. Both have
the same loss: cross-entropy and the divergence from the other model. Shen et al., "Federated Mutual
Learning", 2020.

Up: the messenger, PLD + K + C(D + 1) numbers with a projection of K numbers. Down: the messenger.

Deviations: none. Every client counts once, as in the authors' code. The messenger has the trunk of
the first client. A client predicts with its private model, and with the messenger before its
first round. Each batch trains both models.

Compared: ZJU-DAI/Federated-Mutual-Learning b547bbf, float64, largest difference 8.3e-17 (2026-11).
"""

import torch.nn as nn
import torch.nn.functional as F

import fedprompt as fp
from fedprompt.methods.models import Personal
from fedprompt.methods.registry import DIFFERENT_MODELS, LEARNING_RATE, register
from fedprompt.methods.steps import averaged, take_step
from fedprompt.methods.whole_networks import ImageSetting


@register(
    "FML", **DIFFERENT_MODELS, search=LEARNING_RATE | {"alpha": (0.1, 0.9), "beta": (0.1, 0.9)}
)
def fml(
    setting: ImageSetting, *, learning_rate: float = 1e-2, alpha: float = 0.5, beta: float = 0.5
) -> fp.Method:
    """FML."""
    messenger = setting.new_model(0)
    first = fp.snapshot(messenger, buffers=True)

    def train(data, answer, state):
        model = setting.model(data.id, state)
        fp.load_values(messenger, {**first, **answer})
        optimizer = data.optimizer(nn.ModuleList([model, messenger]), learning_rate)
        for images, labels in data.batches():
            private, shared = model(images), messenger(images)
            loss = alpha * F.cross_entropy(private, labels)
            loss += (1 - alpha) * fp.mutual_loss(private, shared, temperature=1.0)
            loss += beta * F.cross_entropy(shared, labels)
            loss += (1 - beta) * fp.mutual_loss(shared, private, temperature=1.0)
            take_step(optimizer, loss)
        return fp.collect(messenger, weight=1.0), fp.snapshot(model, buffers=True)

    def predict(data, answer, state):
        fp.load_values(messenger, {**first, **answer})
        return Personal(setting.model(data.id, state), messenger, trained=bool(state))

    return averaged(messenger, train, predict=predict)
