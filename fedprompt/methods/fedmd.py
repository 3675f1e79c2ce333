"""Clients send logits of public images, and learn from the mean over clients.

A client first learns from the mean logits of the last round (the digest). It then learns from its
own images (the revisit), and sends its new logits. Li and Wang, "FedMD: Heterogenous Federated
Learning via Model Distillation", NeurIPS workshop 2019.

Up: N(C + 1) numbers for N public images, which are logits and a weight for each image. Down: NC + 1
numbers, which are the mean logits and one weight. In the first round, only the weight.

Deviations: public images have no labels here, so the training on public labels that precedes the
paper's rounds is left out. The trunks are pretrained instead. Digest and revisit have half of the
batches each. The mean is over the clients of the last round. The loss of the digest is the absolute
difference of logits, as in the authors' code.

Compared: diogenes0319/FedMD_clean ab7a07b, with the deviations above, float64, largest difference
6e-17 (2026-11).
"""

from itertools import islice

import torch
import torch.nn.functional as F

import fedprompt as fp
from fedprompt.methods.registry import LEARNING_RATE, register
from fedprompt.methods.steps import broadcast, take_step
from fedprompt.methods.whole_networks import ImageSetting


@register(
    "FedMD",
    families=("mixed models",),
    traits=("personalized", "public data", "different models"),
    search=LEARNING_RATE,
)
def fedmd(setting: ImageSetting, *, learning_rate: float = 1e-2) -> fp.Method:
    """FedMD."""
    public = setting.public
    count = len(public)
    if not count:
        raise ValueError("`public` must have at least one input for FedMD; got none.")
    zeros = torch.zeros(count, setting.num_classes)

    def train(data, answer, state):
        model = setting.model(data.id, state)
        consensus, weight = answer["logits"]
        optimizer = data.optimizer(model, learning_rate)
        digested = data.steps // 2 if weight > 0 else 0  # from the second round on
        draw = data.generator("public")
        for _ in range(digested):
            chosen = torch.randperm(count, generator=draw)[: setting.batch_size]
            with data.autocast():
                take_step(optimizer, F.l1_loss(model(public[chosen]), consensus[chosen]))
        for images, labels in islice(data.batches(), data.steps - digested):
            take_step(optimizer, F.cross_entropy(model(images), labels))
        with torch.no_grad():
            logits = fp.Weighted(model(public), torch.ones(count))
        return {"logits": logits}, fp.snapshot(model, buffers=True)

    def step(server_round, payloads, state):
        mean = fp.weighted_mean(payloads.values())["logits"]
        return {"logits": fp.Weighted(mean.value, torch.tensor(1.0))}

    server = fp.Server({"logits": fp.Weighted(zeros, torch.tensor(0.0))}, broadcast, step)
    form = {"logits": fp.Weighted(zeros, torch.zeros(count))}
    return fp.Method(train, server, setting.private_model, form=lambda client: form)
