"""Every client learns a context before the class names alone, and no message is sent.

CoOp (Zhou et al., "Learning to Prompt for Vision-Language Models", IJCV 2022) is the local
reference of CLIP methods. A client continues in each of its rounds from where it ended.

Up: nothing. Down: nothing.

Deviations: the optimizer is as in all methods, without the schedule of the paper.

Compared: equations of the paper, float64, largest difference 6.9e-15 (2026-11).
"""

import torch.nn.functional as F

import fedprompt as fp
from fedprompt.methods.models import ClipSetting
from fedprompt.methods.registry import LEARNING_RATE, PERSONALIZED_CLIP, register
from fedprompt.methods.steps import take_step


@register("CoOp (local)", **PERSONALIZED_CLIP, search=LEARNING_RATE)
def coop(setting: ClipSetting, *, learning_rate: float = 1e-2) -> fp.Method:
    """CoOp (local)."""

    def train(data, answer, state):
        model = setting.model(data.id, state)
        optimizer = data.optimizer(model, learning_rate)
        for tokens, labels in data.batches():
            take_step(optimizer, F.cross_entropy(model(tokens), labels))
        return {}, fp.snapshot(model)

    server = fp.averaging_server({})
    return fp.Method(train, server, setting.private_model, form=lambda client: {})
