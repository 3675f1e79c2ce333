"""The server sends each client a mixture of all models, with more weight for similar ones.

The weight of another client decreases with the squared distance of the two models. A client trains
its own model and keeps it near the mixture. Huang et al., "Personalized Cross-Silo Federated
Learning on Non-IID Data", AAAI 2021.

Up: prompts and head, L P D + D C + C numbers. Down: a mixture of prompts and heads, as many.

Deviations: the paper's step of the server is its temperature divided by the number of clients. So
the weights are at least 0, and at an infinite temperature they give the mean. `proximal_weight` is
the paper's lambda divided by this step. Only the cohort trains in a round, and the server mixes the
last models of all clients. Training continues from a client's own model.

Compared: TsingZ0/PFLlib d832e76 and equations of the paper, with the deviations above, float64,
largest difference 8e-17 (2026-11).
"""

import torch.nn.functional as F

import fedprompt as fp
from fedprompt.methods.registry import LEARNING_RATE, PERSONALIZED, register
from fedprompt.methods.setting import VitSetting, attentive_server, averaged, take_step


@register(
    "FedAMP",
    **PERSONALIZED,
    search=LEARNING_RATE | {"proximal_weight": (1e-2, 1.0), "temperature": (1.0, 100.0)},
)
def fedamp(
    setting: VitSetting,
    *,
    learning_rate: float = 1e-2,
    proximal_weight: float = 0.1,
    temperature: float = 10.0,
) -> fp.Method:
    """FedAMP."""
    model = setting.new_model()
    first = fp.collect(model, weight=1.0)

    def train(data, answer, state):
        center = {name: entry.value for name, entry in answer.items()}
        fp.load_values(model, state or first)
        optimizer = data.optimizer(model, learning_rate)
        for images, labels in data.batches():
            loss = F.cross_entropy(model(images), labels)
            loss = loss + proximal_weight * fp.proximal_loss(model, center)
            take_step(optimizer, loss)
        return fp.collect(model, weight=1.0), fp.snapshot(model)

    server = attentive_server(setting.clients, first, temperature)
    return averaged(model, train, server=server)
