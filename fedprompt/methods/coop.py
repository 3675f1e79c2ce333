"""Every client learns a context before the class names alone, and no message is sent.

CoOp (Zhou et al., "Learning to Prompt for Vision-Language Models", IJCV 2022) is the local
reference of CLIP methods. A client continues in each of its rounds from where it ended.

Up: nothing. Down: nothing.

Deviations: the optimizer is as in all methods, without the schedule of the paper.

Compared: equations of the paper, float64, largest difference 6.9e-15 (2026-11).
"""

import fedprompt as fp
from fedprompt.methods.local import local
from fedprompt.methods.models import ClipSetting
from fedprompt.methods.registry import LEARNING_RATE, PERSONALIZED_CLIP, register


@register("CoOp (local)", **PERSONALIZED_CLIP, search=LEARNING_RATE)
def coop(setting: ClipSetting, *, learning_rate: float = 1e-2) -> fp.Method:
    """CoOp (local)."""
    return local(setting, learning_rate=learning_rate)
