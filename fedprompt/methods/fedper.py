"""Clients share the prompts and keep their heads.

Prompts and head are trained together, but only the prompts are averaged. Arivazhagan et al.,
"Federated Learning with Personalization Layers", 2019 (arXiv:1912.00818).

Up: prompts, L P D numbers. Down: prompts.

Deviations: the shared layers are the prompts, in place of the first layers of a network.

Compared: equations of the paper, float64, largest difference 7e-17 (2026-11).
"""

import torch.nn.functional as F

import fedprompt as fp
from fedprompt.methods.registry import register
from fedprompt.methods.setting import VitSetting


@register(
    "FedPer",
    families=("one model",),
    traits=("personalized",),
    search={"learning_rate": (1e-3, 1e-1)},
)
def fedper(setting: VitSetting, *, learning_rate: float = 1e-2) -> fp.Method:
    """FedPer."""
    model = setting.new_model()
    values, first_head = (fp.snapshot(model, only=[each]) for each in ("prompts", "head"))

    def train(data, answer, state):
        optimizer = data.optimizer(predict(data, answer, state), learning_rate)
        for images, labels in data.batches():
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        payload = fp.collect(model, weight=data.num_examples, only=["prompts"])
        return payload, fp.snapshot(model, only=["head"])

    def predict(data, answer, state):
        fp.load_values(model, {**answer, **(state or first_head)})
        return model

    def form(client):
        return fp.collect(model, weight=0, only=["prompts"])

    return fp.Method(train, fp.averaging_server(values), predict, form=form)
