"""FedOTP: shared contexts are averaged, and private contexts stay in the clients' states."""

from collections.abc import Mapping
from copy import deepcopy
from functools import cache, partial
from typing import Any

import open_clip
import torch
import torch.nn as nn
import torch.nn.functional as F

import fedprompt as fp
from federations import parts
from federations.parts import Answers, Federation, Server, State

CLASS_NAMES = [f"thing number {number}" for number in range(parts.CLASSES)]
VISION = {"layers": 1, "width": 16, "head_width": 8, "patch_size": 4, "image_size": 16}
TEXT = {"context_length": 16, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1}


@cache
def tokenizer() -> open_clip.tokenizer.SimpleTokenizer:
    """Make the tokenizer once, at first use: it reads a file of 49,408 tokens."""
    return open_clip.tokenizer.SimpleTokenizer(context_length=TEXT["context_length"])


def fedotp() -> Federation:
    """Make the federation."""
    clip = parts.drawn(lambda: open_clip.model.CLIP(16, VISION, TEXT), seed=0)
    tower = fp.TextTower(clip, tokenizer())
    names = tower.class_names(CLASS_NAMES)
    match = partial(
        fp.transport_logits, solver=partial(fp.transport.newton, epsilon=0.1), mass=0.8, scale=20.0
    )
    shared, *private = (
        fp.ContextPrompts(tower.dim, length=2, generator=torch.Generator().manual_seed(seed))
        for seed in range(1 + parts.CLIENTS)
    )

    def train(
        client: int, server_round: int, broadcast: fp.interfaces.Message, state: State
    ) -> tuple[fp.interfaces.Message, State]:
        model = nn.ModuleDict({"shared": deepcopy(shared), "private": deepcopy(private[client])})
        stream = fp.stream_generator(3, server_round=server_round, client=client)
        fp.load_values(model["shared"], broadcast)
        fp.load_values(model["private"], state)
        adam = torch.optim.Adam(model.parameters(), 0.01)
        for _ in range(parts.STEPS):
            images, labels = parts.batch(stream, channels=3)
            text = tower(
                fp.prompted_text(torch.cat([model["shared"](), model["private"]()]), names)
            )
            parts.descend(
                adam, F.cross_entropy(match(fp.image_tokens(clip, images)[1], text), labels)
            )
        payload = fp.collect(model["shared"], weight=parts.NUM_EXAMPLES[client])
        return payload, model["private"].state_dict()

    update = fp.overwrite()

    def init() -> tuple[Answers, Any]:
        values = fp.snapshot(shared)
        return parts.for_all(values), {"values": values, "update": update.init(values)}

    def step(payloads: Mapping[int, fp.interfaces.Message], state: Any) -> tuple[Answers, Any]:
        values, memory = update.step(
            state["values"], fp.weighted_mean(parts.by_id(payloads)), state["update"]
        )
        return parts.for_all(values), {"values": values, "update": memory}

    return Federation(
        cohort=parts.two_of_three,
        client=train,
        server=Server(init, step),
        payload_form=lambda client: fp.collect(shared, weight=0),
        broadcast_form=lambda client: fp.snapshot(shared),
        fingerprint=fp.fingerprint(tower, class_names=CLASS_NAMES),
    )
