"""FedVPT-D with plain gradient steps: the control row of SCAFFOLD.

SCAFFOLD takes plain gradient steps, and the other methods the steps of the clients' optimizer. This
row has the former without control variates, so it shows what they add. It is FedAvg (McMahan et
al., AISTATS 2017) of prompts and head.

Up: prompts and head, L P D + D C + C numbers. Down: prompts and head.

Deviations: every client counts once in the mean, as in SCAFFOLD. `make_optimizer` of the setting is
not read.

Compared: its definition, float64, largest difference 1.1e-16 (2026-11).
"""

import torch
import torch.nn.functional as F

import fedprompt as fp
from fedprompt.methods.registry import register
from fedprompt.methods.steps import averaged, take_step
from fedprompt.methods.whole_networks import ImageSetting


@register("FedVPT-D (plain steps)", families=("one model",), search={"learning_rate": (3e-2, 3.0)})
def plain_steps(setting: ImageSetting, *, learning_rate: float = 0.3) -> fp.Method:
    """FedVPT-D (plain steps)."""
    model = setting.new_model()

    def train(data, answer, state):
        fp.load_values(model, answer)
        optimizer = torch.optim.SGD(model.parameters(), data.learning_rate(learning_rate))
        for images, labels in data.batches():
            take_step(optimizer, F.cross_entropy(model(images), labels))
        return fp.collect(model, weight=1.0), state

    return averaged(model, train)
