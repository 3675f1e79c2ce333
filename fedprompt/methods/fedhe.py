"""Clients send the mean logits of each class, and learn from the running mean of all that was sent.

Logits are collected during training, so no further forward pass is needed. Clients need not be
synchronized: the server adds each message to its mean when it is received. Chan and Ngai, "FedHe:
Heterogeneous Models and Communication-Efficient Federated Learning", MSN 2021.

Up: C(C + 1) numbers, which are mean logits and a count for each class in the batches. Down: C
weights, and C mean logits for each known class.

Deviations: the server averages at the end of a round and never restarts its mean. The authors' code
restarts it after every ten messages a client, which are more than the rounds of this study.
Distillation begins in the second round, and not after as many messages as there are clients.

Compared: ChanYunHin/FedHe c2684c3, with the deviations above, float64, largest difference 1.4e-16
(2026-11).
"""

import fedprompt as fp
from fedprompt.guidance import guided_loss
from fedprompt.methods.registry import DIFFERENT_MODELS, LEARNING_RATE, register
from fedprompt.methods.steps import broadcast, take_step
from fedprompt.methods.whole_networks import ImageSetting


@register("FedHe", **DIFFERENT_MODELS, search=LEARNING_RATE | {"distillation_weight": (1e-2, 10.0)})
def fedhe(
    setting: ImageSetting, *, learning_rate: float = 1e-2, distillation_weight: float = 1e-1
) -> fp.Method:
    """FedHe."""
    classes = setting.num_classes
    unknown = setting.unknown_rows(classes)

    def train(data, answer, state):
        model = setting.model(data.id, state)
        teacher = answer["logits"]
        optimizer = data.optimizer(model, learning_rate)
        means = [unknown]
        for images, labels in data.batches():
            logits = model(images)
            loss = guided_loss(logits, logits, labels, teacher, guide_weight=distillation_weight)
            take_step(optimizer, loss)
            logits = logits.detach().to(unknown.value)
            means.append(fp.class_means(logits, labels, num_classes=classes))
        return {"logits": fp.weighted_mean(means)}, fp.snapshot(model, buffers=True)

    def step(server_round, payloads, state):
        means = [payload["logits"] for payload in payloads.values()]
        votes = [mean._replace(weight=mean.weight.sign()) for mean in means]  # one vote each
        return {"logits": fp.weighted_mean([state["logits"], *votes])}

    first = {"logits": unknown}
    server = fp.Server(first, broadcast, step)
    return fp.Method(train, server, setting.private_model, form=lambda client: first)
