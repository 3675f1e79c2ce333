"""Clients descend the Moreau envelope of their loss, and keep its minimizer as a personal model.

For each batch, a few steps minimize the loss plus half the squared distance to the local copy of
the global model, times a weight. The local copy then moves towards this personal model. Dinh et
al., "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020.

Up: the local copy of prompts and head, L P D + D C + C numbers. Down: prompts and head.

Deviations: inner steps use the clients' optimizer, three for each batch, where the paper uses five.
So there are three times as many backward passes. The paper's server rate (beta) is 1. `outer_step`
is the paper's product of the outer learning rate and the proximal weight. The personal model starts
each round at the broadcast, which the paper leaves open. Only the clients of a round train. In the
paper all clients train, and the server averages a sample of them. Every client counts once in the
mean; the authors' code weights clients by their numbers of examples, and also has a weight decay of
0.001 in the inner steps.

Compared: CharlieDinh/pFedMe caf24b1, with the deviations above, float64, largest difference 1.1e-16
(2026-11).
"""

import torch
import torch.nn.functional as F

import fedprompt as fp
from fedprompt.methods.registry import LEARNING_RATE, PERSONALIZED, register
from fedprompt.methods.steps import averaged, take_step
from fedprompt.methods.whole_networks import ImageSetting


@register(
    "pFedMe",
    **PERSONALIZED,
    search=LEARNING_RATE | {"proximal_weight": (1e-2, 10.0), "outer_step": (1e-1, 1.0)},
)
def pfedme(
    setting: ImageSetting,
    *,
    learning_rate: float = 1e-2,
    proximal_weight: float = 0.1,
    outer_step: float = 0.5,
    inner_steps: int = 3,
) -> fp.Method:
    """pFedMe."""  # noqa: D403
    model = setting.new_model()

    def train(data, answer, state):
        fp.load_values(model, answer)
        local = personal = answer
        optimizer = data.optimizer(model, learning_rate)
        for images, labels in data.batches():
            for _ in range(inner_steps):
                loss = F.cross_entropy(model(images), labels)
                loss = loss + proximal_weight * fp.proximal_loss(model, local)
                take_step(optimizer, loss)
            personal = fp.snapshot(model)
            local = {
                name: torch.lerp(local[name], value, outer_step) for name, value in personal.items()
            }
        fp.load_values(model, local)
        return fp.collect(model, weight=1.0), personal

    return averaged(model, train)
