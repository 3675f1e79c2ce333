"""FedAvg with a proximal term that keeps each client near the broadcast.

Each step minimizes the loss of the batch plus half the squared distance to the broadcast, times a
weight. Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020.

Up: prompts and head. Down: prompts and head.

Deviations: clients take equal numbers of steps, so the paper's stragglers do not occur.

Compared: equations of the paper, float64, largest difference 1.1e-16 (2026-11).
"""

import torch.nn.functional as F

import fedprompt as fp
from fedprompt.methods.registry import LEARNING_RATE, register
from fedprompt.methods.steps import averaged, take_step
from fedprompt.methods.whole_networks import ImageSetting


@register(
    "FedProx", families=("one model",), search=LEARNING_RATE | {"proximal_weight": (1e-3, 1.0)}
)
def fedprox(
    setting: ImageSetting, *, learning_rate: float = 1e-2, proximal_weight: float = 1e-2
) -> fp.Method:
    """FedProx."""
    model = setting.new_model()

    def train(data, answer, state):
        fp.load_values(model, answer)
        optimizer = data.optimizer(model, learning_rate)
        for images, labels in data.batches():
            loss = F.cross_entropy(model(images), labels)
            loss = loss + proximal_weight * fp.proximal_loss(model, answer)
            take_step(optimizer, loss)  # zero_grad, backward and step
        return fp.collect(model, weight=data.num_examples), state

    return averaged(model, train)
