"""SGPT: shared and group prompts, keys weighted by their counts, and stateless clients."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import fedprompt as fp
from federations import parts
from federations.parts import Answers, Federation, Server, State

GROUPS = 3
USAGE = "usage"
"""Name of the number of selections of each group so far (int64)."""


def new_model(dim: int) -> nn.ModuleDict:
    """Make the modules that are trained and sent."""
    modules = {
        "shared": fp.LayeredPrompts(1, dim, layers=(0, 1), patch_size=4),
        "groups": fp.GroupPrompts(GROUPS, 1, dim, layers=(1,), patch_size=4),
        "selector": fp.SelectionKeys(GROUPS, dim),
        "head": nn.Linear(dim, parts.CLASSES),
    }
    return nn.ModuleDict(modules)


def sgpt() -> Federation:
    """Make the federation."""
    trunk = parts.vit(32)
    start = parts.drawn(lambda: new_model(trunk.dim), seed=0)

    def train(
        client: int, server_round: int, broadcast: fp.interfaces.Message, state: State
    ) -> tuple[fp.interfaces.Message, State]:
        model = deepcopy(start)
        stream = fp.stream_generator(1, server_round=server_round, client=client)
        fp.load_values(model, {name: value for name, value in broadcast.items() if name != USAGE})
        model["selector"].start_round(broadcast[USAGE])
        for block in (("shared", "head"), ("groups", "selector", "head")):
            sgd = torch.optim.SGD(
                [parameter for part in block for parameter in model[part].parameters()],
                0.05,
                momentum=0.9,
            )
            with fp.training_only(model, *(model[part] for part in block)):
                for _ in range(parts.STEPS):
                    images, labels = parts.batch(stream)
                    streams, extra = [model["shared"]()], torch.zeros(())
                    if "groups" in block:
                        query = fp.encode_prompted(trunk, images).pooled
                        chosen = model["selector"](query).indices
                        streams, extra = (
                            [*streams, model["groups"](chosen)],
                            fp.key_loss(query, model["selector"].keys, chosen),
                        )
                    z = model["head"](fp.encode_prompted(trunk, images, *streams).pooled)
                    parts.descend(sgd, F.cross_entropy(z, labels) + extra)
        return fp.collect(
            model,
            weight=parts.NUM_EXAMPLES[client],
            rows={"selector.keys": model["selector"].counts},
        ), {}

    update = fp.update_by_name({"selector": fp.ema(decay=0.5), "groups": fp.ema(decay=0.5)})

    def answers(values: Mapping[str, Tensor], usage: Tensor) -> Answers:
        return parts.for_all({**values, USAGE: usage})

    def init() -> tuple[Answers, Any]:
        values, usage = fp.snapshot(start), torch.zeros(GROUPS, dtype=torch.int64)
        return answers(values, usage), {
            "values": values,
            "usage": usage,
            "update": update.init(values),
        }

    def step(payloads: Mapping[int, fp.interfaces.Message], state: Any) -> tuple[Answers, Any]:
        mean = fp.weighted_mean(parts.by_id(payloads))
        values, memory = update.step(state["values"], mean, state["update"])
        usage = state["usage"] + mean["selector.keys"].weight.long()
        return answers(values, usage), {"values": values, "usage": usage, "update": memory}

    return Federation(
        cohort=parts.two_of_three,
        client=train,
        server=Server(init, step),
        payload_form=lambda client: fp.collect(
            start, weight=0, rows={"selector.keys": torch.zeros(GROUPS)}
        ),
        broadcast_form=lambda client: {
            **fp.snapshot(start),
            USAGE: torch.zeros(GROUPS, dtype=torch.int64),
        },
        fingerprint=fp.fingerprint(trunk, start["shared"](), start["groups"](torch.tensor([0]))),
    )
