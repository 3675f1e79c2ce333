"""Clients keep their features private, and the server averages the head behind them.

The representation stays local and may differ between clients; the layers after it are global.
Liang et al., "Think Locally, Act Globally: Federated Learning with Local and Global
Representations", NeurIPS workshop 2019.

Up: the head, C(D + 1) numbers. Down: the head.

Deviations: both parts train together in every step, as in HtFLlib. The auxiliary losses of the
paper for the local representation are left out. The mean is weighted by numbers of examples, as in
the paper and HtFLlib. The authors' code counts clients equally and starts from a model of FedAvg.

Compared: pliang279/LG-FedAvg 7af0568 and TsingZ0/HtFLlib e959261, with the deviations above,
float64, largest difference 1.1e-16 (2026-11).
"""

import torch.nn.functional as F

import fedprompt as fp
from fedprompt.methods.registry import DIFFERENT_MODELS, LEARNING_RATE, register
from fedprompt.methods.steps import averaged, take_step
from fedprompt.methods.whole_networks import ImageSetting


@register("LG-FedAvg", **DIFFERENT_MODELS, search=LEARNING_RATE)
def lg_fedavg(setting: ImageSetting, *, learning_rate: float = 1e-2) -> fp.Method:
    """LG-FedAvg."""
    head = setting.new_model(setting.named_clients[0]).head

    def train(data, answer, state):
        model = setting.shared_head(data, answer, state)
        optimizer = data.optimizer(model, learning_rate)
        for images, labels in data.batches():
            take_step(optimizer, F.cross_entropy(model(images), labels))
        return fp.collect(model.head, weight=data.num_examples), fp.snapshot(model, buffers=True)

    return averaged(head, train, predict=setting.shared_head)
