"""Clients send the mean features of each class, and pull features to the means over all clients.

The mean of a class over the clients that have it is its prototype. The loss of a client adds the
squared distance of each sample's features to the prototype of its class. The class of the nearest
prototype is predicted. Tan et al., "FedProto: Federated Prototype Learning across Heterogeneous
Clients", AAAI 2022.

Up: C(D + 1) numbers, which are a prototype and a count for each class of the client. Down: C
weights, and a prototype for each known class.

Deviations: clients that are not in a round count with their last prototypes, so that a prototype
does not lose the classes of absent clients. The squared distance is the mean over the D numbers, as
in the authors' code. Means are weighted by counts, as in the paper, where the authors' code counts
clients equally. The paper's factor 1/N before a mean that is weighted by counts is left out,
because it would shrink prototypes.

Compared: yuetan031/FedProto 97e42e2 and Equation 6 of the paper, with the deviations above,
float64, largest difference 3e-16 (2026-11).
"""

import torch
from jaxtyping import Float
from torch import Tensor

import fedprompt as fp
from fedprompt.guidance import guided_loss
from fedprompt.methods.models import Complete, PromptedModel
from fedprompt.methods.registry import DIFFERENT_MODELS, LEARNING_RATE, register
from fedprompt.methods.steps import prototypes, take_step
from fedprompt.methods.whole_networks import ImageSetting


@register("FedProto", **DIFFERENT_MODELS, search=LEARNING_RATE | {"prototype_weight": (1e-1, 10.0)})
def fedproto(
    setting: ImageSetting, *, learning_rate: float = 1e-2, prototype_weight: float = 1.0
) -> fp.Method:
    """FedProto."""
    unknown = setting.unknown_rows(setting.new_model(0).head.in_features)

    def train(data, answer, state):
        model = setting.model(data.id, state)
        guide = answer["prototypes"]
        optimizer = data.optimizer(model, learning_rate)
        for images, labels in data.batches():
            features = model.features(images)
            logits = model.head(features)
            loss = guided_loss(features, logits, labels, guide, guide_weight=prototype_weight)
            take_step(optimizer, loss)
        return {"prototypes": prototypes(model, data)}, fp.snapshot(model, buffers=True)

    def answer(client, state):
        return {"prototypes": state["mean"]}

    def step(server_round, payloads, state):
        new = {str(client): payload["prototypes"] for client, payload in payloads.items()}
        latest = state["latest"] | new
        mean = fp.weighted_mean(latest[client] for client in sorted(latest, key=int))
        return {"latest": latest, "mean": mean}

    def predict(data, answer, state):
        return NearestPrototype(setting.model(data.id, state), answer["prototypes"])

    server = fp.Server({"latest": {}, "mean": unknown}, answer, step)
    return fp.Method(train, server, predict, form=lambda client: {"prototypes": unknown})


class NearestPrototype(Complete):
    """Classify by the nearest prototype: logits are negative Euclidean distances.

    Args:
        model: Model of the features.
        prototypes: Prototype of each class. Classes of weight 0 are never predicted.
    """

    def __init__(self, model: PromptedModel, prototypes: fp.Weighted) -> None:
        super().__init__()
        self.model = model
        self.prototypes = prototypes.value
        self.known = prototypes.weight > 0

    def forward(self, images: Tensor) -> Float[Tensor, "batch classes"]:
        """Classify images."""
        distances = torch.cdist(self.model.features(images), self.prototypes)
        return (-distances).masked_fill(~self.known, -1e4)
