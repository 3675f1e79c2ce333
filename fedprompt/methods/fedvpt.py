"""Clients train visual prompts and a linear head, and the server averages both.

FedVPT has prompts before the first layer only, FedVPT-D before every layer. Both are FedAvg
(McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data",
AISTATS 2017) of visual prompt tuning (Jia et al., "Visual Prompt Tuning", ECCV 2022), and
baselines of SGPT (Deng et al., CVPR 2024).

Up: prompts and head. Down: prompts and head.

Deviations: none.

Compared: equations of the paper, float64, largest difference 1.1e-16 (2026-11).
"""

import fedprompt as fp
from fedprompt.methods.models import VitSetting
from fedprompt.methods.registry import LEARNING_RATE, register
from fedprompt.methods.steps import averaged, fedavg_client
from fedprompt.methods.whole_networks import ImageSetting


@register("FedVPT", families=("one model",), search=LEARNING_RATE)
def fedvpt(setting: VitSetting, *, learning_rate: float = 1e-2) -> fp.Method:
    """FedVPT: prompts before the first layer."""
    model = setting.new_model(prompts=lambda trunk: fp.ShallowPrompts(setting.num_prompts, trunk))
    return averaged(model, fedavg_client(model, learning_rate))


@register("FedVPT-D", families=("one model",), search=LEARNING_RATE)
def fedvpt_d(setting: ImageSetting, *, learning_rate: float = 1e-2) -> fp.Method:
    """FedVPT-D: prompts before every layer."""
    model = setting.new_model()
    return averaged(model, fedavg_client(model, learning_rate))
