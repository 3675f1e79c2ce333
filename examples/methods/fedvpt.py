"""Clients train visual prompts and a linear head, and the server averages both.

FedVPT has prompts before the first layer only, FedVPT-D before every layer. Both are FedAvg
(McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data",
AISTATS 2017) of visual prompt tuning (Jia et al., "Visual Prompt Tuning", ECCV 2022), and
baselines of SGPT (Deng et al., CVPR 2024).

Up: prompts and head. Down: prompts and head.

Deviations: none.

Compared: equations of the paper, float64, largest difference 1.1e-16 (2026-11).
"""

from collections.abc import Iterator

import torch.nn.functional as F

import fedprompt as fp
from methods.federation import Predictions, PromptedModel, VitFederation

FAMILIES = ("one model",)
TRAITS = ()
SEARCH = {"learning_rate": (1e-3, 1e-1)}


def fedvpt(federation: VitFederation, *, learning_rate: float = 1e-2) -> Iterator[Predictions]:
    """FedVPT: prompts before the first layer."""
    model = federation.new_model(
        prompts=lambda trunk: fp.ShallowPrompts(federation.num_prompts, trunk)
    )
    return fedavg(federation, model, learning_rate)


def fedvpt_d(federation: VitFederation, *, learning_rate: float = 1e-2) -> Iterator[Predictions]:
    """FedVPT-D: prompts before every layer."""
    return fedavg(federation, federation.new_model(), learning_rate)


def fedavg(
    federation: VitFederation, model: PromptedModel, learning_rate: float
) -> Iterator[Predictions]:
    values, server = fp.snapshot(model), fp.overwrite()
    state = server.init(values)
    for server_round in range(federation.rounds):
        payloads = []
        for client in federation.cohort(server_round):
            fp.load_values(model, federation.send_down(client, values))
            optimizer = federation.optimizer(model, learning_rate)
            for images, labels in federation.batches(client, server_round):
                loss = F.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            payload = fp.collect(model, weight=federation.num_examples(client))
            payloads.append(federation.send_up(client, payload))
        values, state = server.step(values, fp.weighted_mean(payloads), state)
        fp.load_values(model, values)
        yield Predictions(everyone=model)
