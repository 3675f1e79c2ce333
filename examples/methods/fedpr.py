"""Clients change their prompts only in the approximate null space of the global prompts.

After each step, the change of a layer's prompts is projected onto the directions in which the
broadcast prompts of that layer are smallest. So the new prompts interfere little with the old ones.
Feng et al., "Learning Federated Visual Prompt in Null Space for MRI Reconstruction" (FedPR), CVPR
2023.

Up: prompts and head. Down: prompts and head.

Deviations: the paper has a pretrained head, which stays frozen. Here the head is new, so it is
trained and averaged, without a projection. The projection is not divided by its norm, because the
learning rate is tuned. As in the authors' code, there is no projection in the first round. The
number of directions is rounded to the nearest integer. The authors' code rounds it up, so it may
keep one direction more.

Compared: chunmeifeng/FedPR f5c3e67, with the deviations above, float64, largest difference 1.1e-16
(2026-11).
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

import fedprompt as fp
from methods.federation import Predictions, VitFederation

FAMILIES = ("one model",)
TRAITS = ()
SEARCH = {"learning_rate": (1e-3, 1e-1), "share": [0.5, 0.8, 0.9]}


def null_space(tokens: Tensor, share: float) -> Tensor:
    rising = torch.linalg.eigh((tokens.mT @ tokens).double()).eigenvectors
    smallest = rising[..., : round(share * tokens.shape[-1])]
    return (smallest @ smallest.mT).to(tokens.dtype)


def fedpr(
    federation: VitFederation, *, learning_rate: float = 1e-2, share: float = 0.8
) -> Iterator[Predictions]:
    """FedPR."""
    model, server = federation.new_model(), fp.overwrite()
    values, tokens = fp.snapshot(model), model.prompts.tokens
    state = server.init(values)
    for server_round in range(federation.rounds):
        payloads = []
        for client in federation.cohort(server_round):
            fp.load_values(model, federation.send_down(client, values))
            start = tokens.detach().clone()
            projection = null_space(start, share)
            optimizer = federation.optimizer(model, learning_rate)
            for images, labels in federation.batches(client, server_round):
                loss = F.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if server_round > 0:
                    with torch.no_grad():
                        tokens.copy_(start + (tokens - start) @ projection)
            payload = fp.collect(model, weight=federation.num_examples(client))
            payloads.append(federation.send_up(client, payload))
        values, state = server.step(values, fp.weighted_mean(payloads), state)
        fp.load_values(model, values)
        yield Predictions(everyone=model)
