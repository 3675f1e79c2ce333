"""Clients train the whole network and a linear head, and the server averages both.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS
2017 (FedAvg). The reference shows what prompts save, and what they cost in accuracy.

Up: network and head. Down: network and head.

Deviations: the network is pretrained, and stays in eval mode.

Compared: its definition, since it has no other source, float64, largest difference 0 (2026-11).
"""

import copy

import fedprompt as fp
from fedprompt.methods.models import VitSetting
from fedprompt.methods.registry import register
from fedprompt.methods.steps import averaged, fedavg_client


@register("Full tuning", families=("one model",), search={"learning_rate": (1e-4, 1e-2)})
def full_tuning(setting: VitSetting, *, learning_rate: float = 1e-3) -> fp.Method:
    """Full tuning."""

    def tune(frozen):
        network = copy.deepcopy(frozen)
        return network, list(network.parameters())

    model = setting.new_model(tune=tune)
    return averaged(model, fedavg_client(model, learning_rate))
