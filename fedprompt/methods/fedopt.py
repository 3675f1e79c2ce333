"""The server treats the movement of the average as a gradient and takes a step of an optimizer.

FedAvgM adds momentum (Hsu et al., "Measuring the Effects of Non-Identical Data Distribution for
Federated Visual Classification", 2019). FedAdam and FedYogi scale each coordinate by its past
movements (Reddi et al., "Adaptive Federated Optimization", ICLR 2021).

Up: prompts and head, L P D + D C + C numbers. Down: prompts and head.

Deviations: clients use the optimizer of all methods, and not plain gradient steps. The server rate
of FedAvgM is 1. FedAdam and FedYogi have the paper's decays, 0.9 and 0.99, and its adaptivity,
0.001. All three weight clients by their numbers of examples.

Compared: equations of the papers, with the deviations above, float64, largest difference 6.7e-16
(2026-11).
"""

from functools import partial
from typing import Any

import torch

import fedprompt as fp
from fedprompt.methods.registry import LEARNING_RATE, register
from fedprompt.methods.steps import averaged, fedavg_client
from fedprompt.methods.whole_networks import ImageSetting

_RATES = LEARNING_RATE | {"server_rate": (1e-3, 1e-1)}


@register(
    "FedAvgM", families=("one model",), search=LEARNING_RATE | {"momentum": [0.3, 0.5, 0.7, 0.9]}
)
def fedavgm(
    setting: ImageSetting, *, learning_rate: float = 1e-2, momentum: float = 0.5
) -> fp.Method:
    """FedAvgM."""
    make_optimizer = partial(torch.optim.SGD, lr=1.0, momentum=momentum)
    return _optimized(setting, fp.aggregation.fedopt(make_optimizer), learning_rate)


@register("FedAdam", families=("one model",), search=_RATES)
def fedadam(
    setting: ImageSetting, *, learning_rate: float = 1e-2, server_rate: float = 2e-2
) -> fp.Method:
    """FedAdam."""
    return _optimized(setting, fp.aggregation.adam(learning_rate=server_rate), learning_rate)


@register("FedYogi", families=("one model",), search=_RATES)
def fedyogi(
    setting: ImageSetting, *, learning_rate: float = 1e-2, server_rate: float = 2e-2
) -> fp.Method:
    """FedYogi."""
    return _optimized(setting, fp.aggregation.yogi(learning_rate=server_rate), learning_rate)


def _optimized(
    setting: ImageSetting, update: fp.interfaces.ServerUpdate[Any, Any], learning_rate: float
) -> fp.Method:
    """Make FedAvg whose server takes the steps of `update`."""
    model = setting.new_model()
    server = fp.averaging_server(fp.snapshot(model), update)
    return averaged(model, fedavg_client(model, learning_rate), server=server)
