"""Clients send logits of public images, and learn from the mean over clients.

A client first learns from the mean logits of the last round (the digest). It then learns from its
own images (the revisit), and sends its new logits. Li and Wang, "FedMD: Heterogenous Federated
Learning via Model Distillation", NeurIPS workshop 2019.

Up: N(C + 1) numbers for N public images, which are logits and a weight for each image. Down: NC
numbers.

Deviations: public images have no labels here, so the training on public labels that precedes the
paper's rounds is left out. The trunks are pretrained instead. Digest and revisit have half of the
batches each. The mean is over the clients of the last round. The loss of the digest is the absolute
difference of logits, as in the authors' code.

Compared: diogenes0319/FedMD_clean ab7a07b, with the deviations above, float64, largest difference
6e-17 (2026-11).
"""

from collections.abc import Iterator
from itertools import islice

import torch
import torch.nn.functional as F

import fedprompt as fp
from methods.federation import Predictions, VitFederation

FAMILIES = ("mixed models",)
TRAITS = ("personalized", "public data", "different models")
SEARCH = {"learning_rate": (1e-3, 1e-1)}


def fedmd(federation: VitFederation, *, learning_rate: float = 1e-2) -> Iterator[Predictions]:
    """FedMD."""
    public, consensus = federation.public, None
    models = {client: federation.new_model(client) for client in federation.clients}
    for server_round in range(federation.rounds):
        payloads = []
        for client in federation.cohort(server_round):
            model, digested = models[client], 0
            optimizer = federation.optimizer(model, learning_rate)
            if consensus is not None:
                target = federation.send_down(client, {"logits": consensus})["logits"]
                digested = federation.steps // 2
                draw = federation.generator(server_round, client, purpose="public")
                for _ in range(digested):
                    chosen = torch.randperm(len(public), generator=draw)[: federation.batch_size]
                    loss = F.l1_loss(model(public[chosen]), target[chosen])
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
            batches = federation.batches(client, server_round)
            for images, labels in islice(batches, federation.steps - digested):
                loss = F.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            with torch.no_grad():
                logits = fp.Weighted(model(public), torch.ones(len(public)))
            payloads.append(federation.send_up(client, {"logits": logits}))
        consensus = fp.weighted_mean(payloads)["logits"].value
        yield Predictions(client=models.__getitem__, newcomer=federation.new_model)
