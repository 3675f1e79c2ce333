"""Clients train a private head first, then the shared prompts.

Half of the batches of a round fit the head to the received prompts. The other half trains the
prompts behind the fitted head, and only prompts are sent. Every client counts once in the mean.
Collins et al., "Exploiting Shared
Representations for Personalized Federated Learning", ICML 2021.

Up: prompts, L P D numbers. Down: prompts.

Deviations: the paper takes more steps for the head than for the representation. Here each has half
of the batches.

Compared: lgcollins/FedRep d82e629, with the deviations above, float64, largest difference 1.1e-16
(2026-11).
"""

import torch.nn.functional as F

import fedprompt as fp
from fedprompt.methods.registry import LEARNING_RATE, PERSONALIZED, register
from fedprompt.methods.steps import averaged, take_step
from fedprompt.methods.whole_networks import ImageSetting


@register("FedRep", **PERSONALIZED, search=LEARNING_RATE)
def fedrep(setting: ImageSetting, *, learning_rate: float = 2e-2) -> fp.Method:
    """FedRep."""
    model = setting.new_model(prompts=setting.deep_prompts)
    first = fp.snapshot(model)

    def train(data, answer, state):
        fp.load_values(model, {**first, **answer, **state})
        for part, batches in zip((model.head, model.prompts), data.phases(2), strict=True):
            with fp.training_only(model, part):
                optimizer = data.optimizer(model, learning_rate)
                for images, labels in batches:
                    take_step(optimizer, F.cross_entropy(model(images), labels))
        payload = fp.collect(model, weight=1.0, only=["prompts"])
        return payload, fp.snapshot(model, only=["head"])

    return averaged(model, train, shared=["prompts"])
