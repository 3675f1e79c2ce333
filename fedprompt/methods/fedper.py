"""Clients share the prompts and keep their heads.

Prompts and head are trained together, but only the prompts are averaged. Arivazhagan et al.,
"Federated Learning with Personalization Layers", 2019 (arXiv:1912.00818).

Up: prompts, L P D numbers. Down: prompts.

Deviations: the shared layers are the prompts, in place of the first layers of a network.

Compared: equations of the paper, float64, largest difference 7e-17 (2026-11).
"""

import torch.nn.functional as F

import fedprompt as fp
from fedprompt.methods.registry import LEARNING_RATE, PERSONALIZED, register
from fedprompt.methods.steps import averaged, take_step
from fedprompt.methods.whole_networks import ImageSetting


@register("FedPer", **PERSONALIZED, search=LEARNING_RATE)
def fedper(setting: ImageSetting, *, learning_rate: float = 1e-2) -> fp.Method:
    """FedPer."""
    model = setting.new_model(prompts=setting.deep_prompts)
    first = fp.snapshot(model)

    def train(data, answer, state):
        fp.load_values(model, {**first, **answer, **state})
        optimizer = data.optimizer(model, learning_rate)
        for images, labels in data.batches():
            take_step(optimizer, F.cross_entropy(model(images), labels))
        payload = fp.collect(model, weight=data.num_examples, only=["prompts"])
        return payload, fp.snapshot(model, only=["head"])

    return averaged(model, train, shared=["prompts"])
