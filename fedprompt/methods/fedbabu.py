"""Clients train shared prompts behind a random head, which stays fixed until they personalize.

After the last round, each client trains prompts and head on its own data. Oh et al., "FedBABU:
Toward Enhanced Representation for Federated Image Classification", ICLR 2022.

Up: prompts, L P D numbers. Down: prompts.

Deviations: the body of the network is the prompts, because the trunk is frozen. A client
personalizes with the batches of all its rounds once more, and not with epochs of its data. So there
are twice as many backward passes. A client that never took part predicts as received. The mean is
weighted by numbers of examples, as in the paper. The authors' code counts clients equally.

Compared: jhoon-oh/FedBABU e34c15b, with the deviations above, float64, largest difference 1.1e-16
(2026-11).
"""

import torch.nn.functional as F

import fedprompt as fp
from fedprompt.methods.registry import LEARNING_RATE, PERSONALIZED, register
from fedprompt.methods.steps import averaged, take_step
from fedprompt.methods.whole_networks import ImageSetting


@register("FedBABU", **PERSONALIZED, search=LEARNING_RATE)
def fedbabu(setting: ImageSetting, *, learning_rate: float = 2e-2) -> fp.Method:
    """FedBABU."""
    model = setting.new_model(prompts=setting.deep_prompts)
    head = fp.snapshot(model, only=["head"])

    def fit(data, rounds):
        optimizer = data.optimizer(model, learning_rate)
        for server_round in rounds:
            for images, labels in data.at(server_round).batches():
                take_step(optimizer, F.cross_entropy(model(images), labels))

    def train(data, answer, state):
        fp.load_values(model, {**answer, **head})
        with fp.training_only(model, model.prompts):
            fit(data, [data.server_round])
        payload = fp.collect(model, weight=data.num_examples, only=["prompts"])
        return payload, {"rounds": [*state.get("rounds", []), data.server_round]}

    def predict(data, answer, state):
        fp.load_values(model, {**answer, **head})
        fit(data, state.get("rounds", []))
        return model

    return averaged(model, train, shared=["prompts"], predict=predict)
