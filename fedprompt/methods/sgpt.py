"""One global model in which each image selects its own group of prompts, trained in two blocks.

All images share some prompts. Each image also selects one of G groups, by the key nearest to its
features without prompts. A client first trains the shared prompts and the head without groups. It
then trains the groups, the keys and the head, with the shared prompts frozen. Deng et al.,
"Unlocking the Potential of Prompt-Tuning in Bridging Generalized and Personalized Federated
Learning" (SGPT), CVPR 2024.

Up: shared prompts, group prompts, keys, the number of selections of each key, and the head.
Down: shared prompts, group prompts, keys, the total number of selections of each key, and the head.

Deviations: clients cannot see the selections of others in the same round, so each adds its
selections to the counts of the broadcast. Shares of groups have a small offset; without it, unused
groups would be chosen without regard to their keys. Keys that no client selected keep their value.
Shared prompts enter the first half of the layers, and groups the second half. The head reads the
class token alone. The paper's mean with group tokens is worse on small transformers. The two blocks
share the batches of a round, half for each.

Arguments leave parts of the method out. Parts that no block trains are sent but not used. A large
offset selects the nearest key in training, too. The head may read the paper's mean.

Compared: equations of the paper, with the deviations above, float64, largest difference 1.7e-16
(2026-11).
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import fedprompt as fp
from fedprompt.methods.registry import LEARNING_RATE, register
from fedprompt.methods.setting import VitSetting, take_step


class _GroupedModel(nn.Module):
    """Shared prompts, group prompts with their keys, and a linear head on a frozen trunk."""

    def __init__(self, setting, num_groups, blocks, layers=(), offset=5e-4, averaged=False):
        super().__init__()
        self.trunk = setting.trunk
        self.used = set().union(*blocks)
        self.averaged = averaged
        early, late = torch.arange(self.trunk.depth).tensor_split(2)
        shared = partial(fp.LayeredPrompts, setting.num_prompts, layers=early.tolist())
        start = setting.new_model(prompts=shared)
        self.shared = start.prompts
        self.head = start.head
        self.groups = fp.GroupPrompts(num_groups, 1, self.trunk, layers=layers or late.tolist())
        rule = partial(fp.selection.select_nearest, offset=offset)
        self.selector = fp.SelectionKeys(num_groups, self.trunk.num_features, selector=rule)

    def query(self, images: Tensor) -> Tensor:
        """Encode images without prompts."""
        return fp.encode_prompted(self.trunk, images).pooled.detach()

    def logits(self, images: Tensor, *chosen: Tensor) -> Tensor:
        """Classify with the shared prompts and the prompts of the chosen groups, if any."""
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
        query = [self.query(images)] if grouped else []
        chosen = [self.selector(features).indices for features in query]
        loss = F.cross_entropy(self.logits(images, *chosen), labels)
        return loss + fp.key_loss(query[0], self.selector.keys, *chosen) if grouped else loss


def _server(model: _GroupedModel, decay: float) -> fp.Server:
    """Make the server, with momentum for groups and keys, and the selections of all rounds."""
    momentum = fp.update_by_name(dict.fromkeys(("groups", "selector"), fp.ema(decay=decay)))
    mean = fp.averaging_server(fp.snapshot(model), momentum)

    def answer(client, state):
        return {**state["values"], "selector.usage": state["usage"]}

    def step(server_round, payloads, state):
        used = sum(payload["selector.keys"].weight for payload in payloads.values())
        return {**mean.step(server_round, payloads, state), "usage": state["usage"] + used}

    usage = torch.zeros(len(model.selector.keys))
    return fp.Server({**mean.state, "usage": usage}, answer, step)


@register(
    "SGPT",
    families=("one model",),
    traits=("adapted",),
    search=LEARNING_RATE | {"decay": [0.0, 0.5], "num_groups": [5, 10]},
)
def sgpt(
    setting: VitSetting,
    *,
    learning_rate: float = 1e-2,
    decay: float = 0.5,
    num_groups: int = 5,
    blocks: Sequence[Sequence[str]] = (("shared", "head"), ("groups", "selector", "head")),
    layers: Sequence[int] = (),
    offset: float = 5e-4,
    averaged: bool = False,
) -> fp.Method:
    """SGPT."""
    model = setting.seeded(_GroupedModel, setting, num_groups, blocks, layers, offset, averaged)

    def train(data, answer, state):
        predict(data, answer, state).train()
        model.selector.start_round(answer["selector.usage"])
        for block, batches in zip(blocks, data.phases(len(blocks)), strict=True):
            with fp.training_only(model, *map(model.get_submodule, block)):
                optimizer = data.optimizer(model, learning_rate)
                for images, labels in batches:
                    take_step(optimizer, model.loss(images, labels, "groups" in block))
        rows = {"selector.keys": model.selector.counts}
        return fp.collect(model, weight=data.num_examples, rows=rows), state

    def predict(data, answer, state):
        fp.load_values(model, answer)
        return model.eval()

    def form(client):
        return fp.collect(model, weight=0, rows={"selector.keys": torch.zeros(num_groups)})

    return fp.Method(train, _server(model, decay), predict, form=form)
