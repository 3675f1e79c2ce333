"""Clients share the prompts and keep their heads.

Prompts and head are trained together, but only the prompts are averaged. Arivazhagan et al.,
"Federated Learning with Personalization Layers", 2019 (arXiv:1912.00818).

Up: prompts, L P D numbers. Down: prompts.

Deviations: the shared layers are the prompts, in place of the first layers of a network.

Compared: equations of the paper, float64, largest difference 7e-17 (2026-11).
"""

import fedprompt as fp
from fedprompt.methods.models import VitSetting
from fedprompt.methods.registry import LEARNING_RATE, PERSONALIZED, register
from fedprompt.methods.steps import partly_averaged


@register("FedPer", **PERSONALIZED, search=LEARNING_RATE)
def fedper(setting: VitSetting, *, learning_rate: float = 1e-2) -> fp.Method:
    """FedPer."""
    model = setting.new_model(prompts=setting.deep_prompts)
    return partly_averaged(model, learning_rate, shared=["prompts"], private=["head"])
