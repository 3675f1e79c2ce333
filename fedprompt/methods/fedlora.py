"""Clients train LoRA and a linear head, and the server averages both.

LoRA changes the query, key and value projections of every layer by products B A. The server
averages A and B separately, so the new product is not the mean of the products. Zhang et al.,
"Towards Building the Federated GPT: Federated Instruction Tuning" (FedIT), ICASSP 2024, as Singhal
et al. (FedEx-LoRA, ACL 2025) describe it in Eq. 3.

Up: LoRA and head, 4 r L D + D C + C numbers for rank r. Down: LoRA and head.

Deviations: the paper trains language models. The text of FedIT was not available. The product has
no scale, because the learning rate is tuned. In the code, clients count equally. Beyond the paper,
clients may have smaller ranks (`sizes`), and each row is averaged over the clients that have it.

Compared: the server's step of FedIT in RaghavSinghal10/fedex-lora 683a3f3, with the deviations
above, float64, largest difference 2.2e-16 (2026-11).
"""

from functools import partial

import fedprompt as fp
from fedprompt.methods.models import VitSetting
from fedprompt.methods.registry import LEARNING_RATE, register
from fedprompt.methods.sizes import Sizes, of_sizes
from fedprompt.methods.steps import averaged, fedavg_client


@register("FedLoRA", families=("one model",), search=LEARNING_RATE)
def fedlora(
    setting: VitSetting, *, learning_rate: float = 1e-2, rank: int = 2, sizes: Sizes | None = None
) -> fp.Method:
    """FedAvg of LoRA. A size is the rank of a client."""

    def make(rank: int) -> fp.Method:
        model = setting.new_model(tune=partial(fp.tuning.lora, rank=rank))
        return averaged(model, fedavg_client(model, learning_rate))

    return of_sizes(setting, make, sizes, rank=rank)
