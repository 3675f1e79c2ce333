"""Clients train one factor of LoRA and a linear head; the other factor stays as it was drawn.

All clients draw the same A from the seed and train B, which is zero at first. So the mean of the
products B A is the product of the means. Sun et al., "Improving LoRA in Privacy-preserving
Federated Learning" (FFA-LoRA), ICLR 2024, of which the abstract was read, and Singhal et al.
(FedEx-LoRA), ACL 2025, Section 2.

Up: B and head, 3 r L D + D C + C numbers for rank r. Down: B and head.

Deviations: the paper trains language models, also with differential privacy, which is left out
here. The product has no scale, because the learning rate is tuned. In the code, clients count
equally.

Compared: the server's step of FFA-LoRA in RaghavSinghal10/fedex-lora 683a3f3, since code of its own
authors was not available, with the deviations above, float64, largest difference 2.2e-16 (2026-11).
"""

from functools import partial

import fedprompt as fp
from fedprompt.methods.models import VitSetting
from fedprompt.methods.registry import LEARNING_RATE, register
from fedprompt.methods.steps import averaged, fedavg_client


@register("FFA-LoRA", families=("one model",), search=LEARNING_RATE)
def ffa_lora(setting: VitSetting, *, learning_rate: float = 1e-2, rank: int = 2) -> fp.Method:
    """FFA-LoRA."""
    model = setting.new_model(tune=partial(fp.tuning.lora, rank=rank))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_A." not in name)
    shared = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return averaged(model, fedavg_client(model, learning_rate, shared=shared), shared=shared)
