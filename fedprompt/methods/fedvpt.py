"""Clients train visual prompts and a linear head, and the server averages both.

FedVPT has prompts before the first layer only, FedVPT-D before every layer. Both are FedAvg
(McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data",
AISTATS 2017) of visual prompt tuning (Jia et al., "Visual Prompt Tuning", ECCV 2022), and
baselines of SGPT (Deng et al., CVPR 2024).

Up: prompts and head. Down: prompts and head.

Deviations: none. Beyond the papers, clients may have fewer prompts or layers (`sizes`).

Compared: equations of the paper, float64, largest difference 1.1e-16 (2026-11).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import fedprompt as fp
from fedprompt.methods.models import PromptedModel, VitSetting
from fedprompt.methods.registry import LEARNING_RATE, register
from fedprompt.methods.sizes import Sizes, of_sizes, shorten, size_of_prompts
from fedprompt.methods.steps import averaged, fedavg_client
from fedprompt.methods.whole_networks import ImageSetting


@register("FedVPT", families=("one model",), search=LEARNING_RATE)
def fedvpt(
    setting: VitSetting, *, learning_rate: float = 1e-2, sizes: Sizes | None = None
) -> fp.Method:
    """FedVPT: prompts before the first layer. A size is the number of a client's prompts."""

    def new_model(setting: VitSetting) -> PromptedModel:
        return setting.new_model(
            prompts=lambda trunk: fp.ShallowPrompts(setting.num_prompts, trunk)
        )

    return _averaged(setting, new_model, learning_rate, sizes)


@register("FedVPT-D", families=("one model",), search=LEARNING_RATE)
def fedvpt_d(
    setting: ImageSetting, *, learning_rate: float = 1e-2, sizes: Sizes | None = None
) -> fp.Method:
    """FedVPT-D: prompts before every layer.

    A size is the number of a client's layers, or a pair of it and of the number of prompts at each.
    """
    return _averaged(setting, lambda setting: setting.new_model(), learning_rate, sizes)


def _averaged(
    setting: Any, new_model: Callable[[Any], Any], learning_rate: float, sizes: Sizes | None
) -> fp.Method:
    def make(**size: int) -> fp.Method:
        model = new_model(replace(setting, num_prompts=size["length"]) if size else setting)
        if size:
            shorten(model.prompts, **size)
        return averaged(model, fedavg_client(model, learning_rate))

    full = {} if sizes is None else size_of_prompts(new_model(setting).prompts)
    return of_sizes(setting, make, sizes, **full)
