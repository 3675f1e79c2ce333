"""One global model in which each image selects its own group of prompts, trained in two blocks.

All images share some prompts. Each image also selects one of G groups, by the key nearest to its
features without prompts. A client first trains the shared prompts and the head without groups. It
then trains the groups, the keys and the head, with the shared prompts frozen. Deng et al.,
"Unlocking the Potential of Prompt-Tuning in Bridging Generalized and Personalized Federated
Learning" (SGPT), CVPR 2024.

Up: shared prompts, group prompts, keys, the number of selections of each key, and the head.
Down: shared prompts, group prompts, keys, the total number of selections of each key, and the head.

Deviations: clients cannot see the selections of others in the same round, so each adds its own
selections to those of the broadcast. Shares of groups have a small offset; without it, unused
groups would be chosen without regard to their keys. Keys that no client selected keep their value.
Shared prompts enter the first half of the layers, and groups the second half. The head reads the
class token alone. The paper's mean with group tokens is worse on small transformers. The two
blocks share the batches of a round, half for each.

Arguments leave parts of the method out. Parts that no block trains are sent but not used. A large
offset selects the nearest key in training, too. The head may read the paper's mean.

Compared: equations of the paper, with the deviations above, float64, largest difference 1.7e-16
(2026-11).
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import fedprompt as fp
from methods.federation import Predictions, VitFederation

FAMILIES = ("one model",)
TRAITS = ("adapted",)
SEARCH = {"learning_rate": (1e-3, 1e-1), "decay": [0.0, 0.5], "num_groups": [5, 10]}


class GroupedModel(nn.Module):
    """Shared prompts, group prompts with their keys, and a linear head on a frozen trunk."""

    def __init__(self, federation, num_groups, layers=(), rule=fp.select_nearest) -> None:
        super().__init__()
        self.trunk, self.used, self.averaged = federation.trunk, {"shared", "groups"}, False
        num, (early, late) = federation.num_prompts, torch.arange(self.trunk.depth).tensor_split(2)
        start = federation.new_model(prompts=partial(fp.LayeredPrompts, num, layers=early.tolist()))
        self.shared, self.head = start.prompts, start.head
        self.groups = fp.GroupPrompts(num_groups, 1, self.trunk, layers=layers or late.tolist())
        self.selector = fp.SelectionKeys(num_groups, self.trunk.num_features, selector=rule)

    def query(self, images: Tensor) -> Tensor:
        """Encode images without prompts."""
        return fp.encode_prompted(self.trunk, images).pooled.detach()

    def logits(self, images: Tensor, *chosen: Tensor) -> Tensor:
        """Classify with the shared prompts and those of the chosen groups, if any."""
        streams = [self.shared()] if "shared" in self.used else []
        encoded = fp.encode_prompted(self.trunk, images, *streams, *map(self.groups, chosen))
        read = [encoded.pooled[:, None], *encoded.streams[len(streams) :]]
        return self.head(torch.cat(read, 1).mean(1) if self.averaged else encoded.pooled)

    def forward(self, images: Tensor) -> Tensor:
        """Classify with the nearest group of each image, if groups are used."""
        chosen = [self.selector(self.query(images)).indices] if "groups" in self.used else []
        return self.logits(images, *chosen)

    def loss(self, images: Tensor, labels: Tensor, grouped: bool) -> Tensor:
        """Compute the loss of a block, with the loss of the keys if it has groups."""
        query = self.query(images) if grouped else None
        chosen = [self.selector(query).indices] if grouped else []
        loss = F.cross_entropy(self.logits(images, *chosen), labels)
        return loss + fp.key_loss(query, self.selector.keys, *chosen) if grouped else loss


def sgpt(
    federation: VitFederation,
    *,
    learning_rate: float = 1e-2,
    decay: float = 0.5,
    num_groups: int = 5,
    blocks: Sequence[Sequence[str]] = (("shared", "head"), ("groups", "selector", "head")),
    layers: Sequence[int] = (),
    offset: float = 5e-4,
    averaged: bool = False,
) -> Iterator[Predictions]:
    """SGPT."""
    model = GroupedModel(federation, num_groups, layers, partial(fp.select_nearest, offset=offset))
    model.used, model.averaged = set().union(*blocks), averaged
    server = fp.update_by_name(dict.fromkeys(("groups", "selector"), fp.ema(decay=decay)))
    state, usage = server.init(values := fp.snapshot(model)), torch.zeros(num_groups)
    for server_round in range(federation.rounds):
        payloads = []
        for client in federation.cohort(server_round):
            fp.load_values(model.train(), federation.send_down(client, values))
            model.selector.start_round(federation.send_down(client, {"usage": usage})["usage"])
            batches = federation.batches(client, server_round)
            for number, block in enumerate(blocks, 1):
                parts, steps = [*map(model.get_submodule, block)], federation.steps // len(blocks)
                optimizer = federation.optimizer(nn.ModuleList(parts), learning_rate)
                with fp.training_only(model, *parts):
                    for images, labels in islice(batches, steps if number < len(blocks) else None):
                        loss = model.loss(images, labels, "groups" in block)
                        optimizer.zero_grad()
                        loss.backward()
                        optimizer.step()
            rows, size = {"selector.keys": model.selector.counts}, federation.num_examples(client)
            payloads.append(federation.send_up(client, fp.collect(model, weight=size, rows=rows)))
        values, state = server.step(values, mean := fp.weighted_mean(payloads), state)
        usage = usage + mean["selector.keys"].weight
        fp.load_values(model.eval(), values)
        yield Predictions(everyone=model)
