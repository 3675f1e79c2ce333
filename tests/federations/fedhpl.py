"""FedHPL with two widths: shared class logits, prompts and heads by width, local momentum."""

from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

import fedprompt as fp
from federations import parts
from federations.parts import Answers, Federation, Server, State

DIMS = (32, 64, 32)
LOGITS = "logits"
"""Name of the class means in payloads, and of the teacher in broadcasts."""


def new_model(dim: int, depth: int) -> nn.ModuleDict:
    """Make the trainable modules of a client of this width."""
    return nn.ModuleDict(
        {
            "prompts": fp.DeepPrompts(3, dim, depth, patch_size=4),
            "head": nn.Linear(dim, parts.CLASSES),
        }
    )


def fedhpl() -> Federation:
    """Make the federation."""
    trunks = {dim: parts.vit(dim) for dim in sorted(set(DIMS))}
    models = {
        dim: parts.drawn(partial(new_model, dim, trunk.depth), seed=dim)
        for dim, trunk in trunks.items()
    }
    unknown = fp.Weighted(torch.zeros(parts.CLASSES, parts.CLASSES), torch.zeros(parts.CLASSES))

    def train(
        client: int, server_round: int, broadcast: fp.interfaces.Message, state: State
    ) -> tuple[fp.interfaces.Message, State]:
        trunk = trunks[DIMS[client]]
        model = deepcopy(models[DIMS[client]])
        stream = fp.stream_generator(0, server_round=server_round, client=client)
        fp.load_values(model, {name: value for name, value in broadcast.items() if name != LOGITS})
        sgd = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        sgd.state.update(
            {
                model.get_parameter(name): {"momentum_buffer": buffer.clone()}
                for name, buffer in state.items()
            }
        )
        means = []
        for _ in range(parts.STEPS):
            images, labels = parts.batch(stream)
            z = model["head"](fp.encode_prompted(trunk, images, model["prompts"]()).pooled)
            parts.descend(
                sgd,
                F.cross_entropy(z, labels)
                + fp.distillation_loss(z, labels, broadcast[LOGITS], temperature=4.5),
            )
            means.append(
                fp.class_means(
                    z.detach(), labels, num_classes=parts.CLASSES, keep=z.argmax(1) == labels
                )
            )
        payload = fp.collect(model, weight=parts.NUM_EXAMPLES[client]) | {
            LOGITS: fp.weighted_mean(means)
        }
        return payload, {
            name: sgd.state[parameter]["momentum_buffer"]
            for name, parameter in model.named_parameters()
        }

    update = fp.overwrite()

    def answers(
        teachers: Mapping[int, fp.Weighted], values: Mapping[str, fp.interfaces.Message]
    ) -> Answers:
        return {
            client: {LOGITS: teachers[dim], **values[str(dim)]} for client, dim in enumerate(DIMS)
        }

    def init() -> tuple[Answers, Any]:
        values = {str(dim): fp.snapshot(model) for dim, model in models.items()}
        memory = {width: update.init(own) for width, own in values.items()}
        return answers(dict.fromkeys(DIMS, unknown), values), {"values": values, "update": memory}

    def step(payloads: Mapping[int, fp.interfaces.Message], state: Any) -> tuple[Answers, Any]:
        teachers = fp.heterogeneous_means(
            [payload[LOGITS] for payload in parts.by_id(payloads)],
            [DIMS[client] for client in sorted(payloads)],
        )
        values, memory = {}, {}
        for dim in models:
            equals = parts.by_id(
                {client: payload for client, payload in payloads.items() if DIMS[client] == dim}
            )
            mean = fp.weighted_mean(
                [
                    {name: sent for name, sent in payload.items() if name != LOGITS}
                    for payload in equals
                ]
            )
            values[str(dim)], memory[str(dim)] = update.step(
                state["values"][str(dim)], mean, state["update"][str(dim)]
            )
        return answers(teachers, values), {"values": values, "update": memory}

    prints = {dim: fp.fingerprint(trunk, models[dim]["prompts"]()) for dim, trunk in trunks.items()}
    return Federation(
        cohort=parts.everybody,
        client=train,
        server=Server(init, step),
        payload_form=lambda client: fp.collect(models[DIMS[client]], weight=0) | {LOGITS: unknown},
        broadcast_form=lambda client: {LOGITS: unknown, **fp.snapshot(models[DIMS[client]])},
        fingerprint={
            f"{part} of width {dim}": text
            for dim, own in prints.items()
            for part, text in own.items()
        },
    )
