"""Clients train a linear head on frozen features, and the server averages it.

There are no prompts, so the features never change. The reference shows how much prompts add.

Up: head, D C + C numbers. Down: head.

Deviations: none.

Compared: its definition, since it has no paper, float64, largest difference 1.1e-16 (2026-11).
"""

import fedprompt as fp
from fedprompt.methods.registry import register
from fedprompt.methods.steps import averaged, fedavg_client
from fedprompt.methods.whole_networks import ImageSetting


@register("Head tuning", families=("one model",), search={"learning_rate": (3e-3, 3e-1)})
def head_tuning(setting: ImageSetting, *, learning_rate: float = 3e-2) -> fp.Method:
    """Head tuning."""
    model = setting.new_model(prompts=lambda trunk: None)
    return averaged(model, fedavg_client(model, learning_rate))
