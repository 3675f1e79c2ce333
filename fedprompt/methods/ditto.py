"""Each client trains a personal model next to the global one, and keeps it near the broadcast.

The global model is trained as in FedAvg. Each step of the personal model minimizes the loss of the
batch plus half the squared distance to the broadcast, times a weight. Li et al., "Ditto: Fair and
Robust Federated Learning Through Personalization", ICML 2021.

Up: prompts and head, L P D + D C + C numbers. Down: prompts and head.

Deviations: the paper leaves the start of a personal model open. Here it is the broadcast of the
client's first round. Both models are trained with the same batches, so there are twice as many
backward passes. Every client counts once, as in the authors' code, which draws clients by their
number of examples. Here all clients are equally likely.

Compared: litian96/ditto 26d9b29, with the deviations above, float64, largest difference 8.3e-17
(2026-11).
"""

import torch.nn.functional as F

import fedprompt as fp
from fedprompt.methods.registry import LEARNING_RATE, PERSONALIZED, register
from fedprompt.methods.steps import averaged, take_step
from fedprompt.methods.whole_networks import ImageSetting


@register("Ditto", **PERSONALIZED, search=LEARNING_RATE | {"proximal_weight": (1e-2, 1.0)})
def ditto(
    setting: ImageSetting, *, learning_rate: float = 1e-2, proximal_weight: float = 0.1
) -> fp.Method:
    """Ditto."""
    model = setting.new_model()

    def fit(data, start, answer, weight):
        fp.load_values(model, start)
        optimizer = data.optimizer(model, learning_rate)
        for images, labels in data.batches():
            loss = F.cross_entropy(model(images), labels)
            loss = loss + weight * fp.proximal_loss(model, answer)
            take_step(optimizer, loss)

    def train(data, answer, state):
        fit(data, answer, answer, 0.0)
        payload = fp.collect(model, weight=1.0)
        fit(data, state or answer, answer, proximal_weight)
        return payload, fp.snapshot(model)

    return averaged(model, train)
