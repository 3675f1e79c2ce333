"""Clients send the mean logits of each class, and learn from the mean of the other clients.

The teacher of a client leaves its logits out, so that it does not learn from itself. The loss is
the cross-entropy to the softmax of the teacher. Logits are collected during training. Jeong et al.,
"Communication-Efficient On-Device Machine Learning: Federated Distillation and Augmentation under
Non-IID Private Data", NeurIPS workshop 2018.

Up: C(C + 1) numbers, which are mean logits and a count for each class in the batches. Down: C
weights, and C mean logits for each class that another client sent.

Deviations: the augmentation of the paper, which needs samples on the server, is another method.
Clients that are not in a round count with their last logits.

Compared: TsingZ0/HtFLlib e959261, with the teacher of the paper, float64, largest difference
1.1e-16 (2026-11).
"""

import torch.nn.functional as F
from torch import Tensor

import fedprompt as fp
from fedprompt.guidance import guided_loss
from fedprompt.methods.registry import DIFFERENT_MODELS, LEARNING_RATE, register
from fedprompt.methods.steps import take_step
from fedprompt.methods.whole_networks import ImageSetting


def _soft_cross_entropy(logits: Tensor, teacher: Tensor) -> Tensor:
    """Compute the cross-entropy with the probabilities of a teacher."""
    return F.cross_entropy(logits, teacher.softmax(1))


@register(
    "FedDistill", **DIFFERENT_MODELS, search=LEARNING_RATE | {"distillation_weight": (1e-2, 10.0)}
)
def feddistill(
    setting: ImageSetting, *, learning_rate: float = 1e-2, distillation_weight: float = 1e-1
) -> fp.Method:
    """FedDistill."""
    classes = setting.num_classes
    unknown = setting.unknown_rows(classes)
    guide = {"guide_weight": distillation_weight, "loss": _soft_cross_entropy}

    def train(data, answer, state):
        model = setting.model(data.id, state)
        optimizer = data.optimizer(model, learning_rate)
        means = [unknown]
        for images, labels in data.batches():
            logits = model(images)
            loss = guided_loss(logits, logits, labels, answer["logits"], **guide)
            take_step(optimizer, loss)
            logits = logits.detach().to(unknown.value)
            means.append(fp.class_means(logits, labels, num_classes=classes))
        return {"logits": fp.weighted_mean(means)}, fp.snapshot(model, buffers=True)

    def answer(client, state):
        others = [state[other] for other in sorted(state, key=int) if other != str(client)]
        return {"logits": fp.weighted_mean([unknown, *others])}

    def step(server_round, payloads, state):
        means = {str(client): payload["logits"] for client, payload in payloads.items()}
        votes = {client: mean._replace(weight=mean.weight.sign()) for client, mean in means.items()}
        return {**state, **votes}  # one vote each

    server = fp.Server({}, answer, step)
    return fp.Method(train, server, setting.private_model, form=lambda client: {"logits": unknown})
