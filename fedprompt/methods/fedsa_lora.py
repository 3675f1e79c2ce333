"""Clients train both factors of LoRA, share the first one, and keep the second and their heads.

The mean of the factors A is general knowledge, and each client has its own B. Guo et al.,
"Selective Aggregation for Low-Rank Adaptation in Federated Learning" (FedSA-LoRA), ICLR 2025, of
which the abstract and the description of Figure 1 were read.

Up: the factors A, r L D numbers for rank r. Down: the factors A.

Deviations: the paper trains language models. The product has no scale, because the learning rate is
tuned. Clients are weighted by their numbers of examples.

Compared: the division into shared A, private B and private classifier in Pengxin-Guo/FedSA-LoRA
a2ea5d9, and its update by hand, float64, largest difference 2.2e-16 (2026-11).
"""

from functools import partial

import torch.nn.functional as F

import fedprompt as fp
from fedprompt.methods.models import VitSetting
from fedprompt.methods.registry import LEARNING_RATE, PERSONALIZED, register
from fedprompt.methods.steps import averaged, take_step


@register("FedSA-LoRA", **PERSONALIZED, search=LEARNING_RATE)
def fedsa_lora(setting: VitSetting, *, learning_rate: float = 1e-2, rank: int = 2) -> fp.Method:
    """FedSA-LoRA."""
    model = setting.new_model(tune=partial(fp.tuning.lora, rank=rank))
    first = fp.snapshot(model)
    shared = [name for name in first if ".lora_A." in name]
    private = [name for name in first if name not in shared]

    def train(data, answer, state):
        fp.load_values(model, {**first, **answer, **state})
        optimizer = data.optimizer(model, learning_rate)
        for images, labels in data.batches():
            take_step(optimizer, F.cross_entropy(model(images), labels))
        payload = fp.collect(model, weight=data.num_examples, only=shared)
        return payload, fp.snapshot(model, only=private)

    return averaged(model, train, shared=shared)
