"""Every client trains alone, and no message is sent.

The reference of every comparison: a federated method should be at least as accurate. A client
continues in each of its rounds from where it ended.

Up: nothing. Down: nothing.

Deviations: none.

Compared: its definition, since it has no paper, float64, largest difference 1.1e-16 (2026-11).
"""

import torch.nn.functional as F

import fedprompt as fp
from fedprompt.methods.registry import LEARNING_RATE, register
from fedprompt.methods.steps import take_step
from fedprompt.methods.whole_networks import ImageSetting


@register(
    "Local training",
    families=("one model", "mixed models"),
    traits=("personalized", "different models"),
    search=LEARNING_RATE,
)
def local(setting: ImageSetting, *, learning_rate: float = 1e-2) -> fp.Method:
    """Local training."""

    def train(data, answer, state):
        model = setting.model(data.id, state)
        optimizer = data.optimizer(model, learning_rate)
        for images, labels in data.batches():
            take_step(optimizer, F.cross_entropy(model(images), labels))
        return {}, fp.snapshot(model, buffers=True)

    server = fp.averaging_server({})
    return fp.Method(train, server, setting.private_model, form=lambda client: {})
