"""One global model in which each image selects a group of prompts, trained in two blocks.

All images share some prompts. Each image also selects one of G groups, by the key nearest to its
features without prompts. A client first trains the shared prompts and the head without groups. It
then trains the groups, the keys and the head, with the shared prompts frozen. Deng et al.,
"Unlocking the Potential of Prompt-Tuning in Bridging Generalized and Personalized Federated
Learning" (SGPT), CVPR 2024.

Up: shared prompts, group prompts, keys, the number of selections of each key, and the head.
Down: shared prompts, group prompts, keys, the total number of selections of each key, and the head.

Deviations: clients cannot see the selections of others in the same round, so each adds its
selections to the counts of the broadcast; with ``live=False``, counts are those of the broadcast.
Shares of groups have a small offset; without it, unused groups would be chosen without regard to
their keys. Keys that no client selected keep their value. If the setting counts steps, the blocks
share the batches of a round; with epochs, each block has as many, as in the paper. These defaults
differ from the paper, and :func:`fedprompt.methods.papers.sgpt` has its values: there are five
groups; in a trunk of less than six blocks, shared prompts enter the first half of the layers, and
groups the second half; queries come from the last layer, also where domains differ. These are
fields of the setting: clients use AdamW in place of SGD, and its weight decay moves groups that no
image selected; a layer has eight shared prompts in place of one.

Arguments leave parts of the method out. Parts that no block trains are sent but not used. A large
offset selects the nearest key in training, too.

Compared: equations of the paper, with the deviations above and with its own values, for every
argument, float64, largest difference 2.3e-16 (2026-11).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import fedprompt as fp
from fedprompt.interfaces import PromptSelector
from fedprompt.methods.models import VitSetting, check_sequences
from fedprompt.methods.registry import LEARNING_RATE, register
from fedprompt.methods.steps import take_step
from fedprompt.selection import SelectionKeys, key_loss, select_nearest

PAPER_LAYERS = 6  # three with shared prompts, and three with groups


class _GroupedModel(nn.Module):
    """Shared prompts, group prompts with their keys, and a linear head on a frozen trunk."""

    def __init__(self, setting, num_groups, layers, replace, selector, live, *reads):
        super().__init__()
        self.trunk = setting.trunk
        self.used, self.query_depth, self.averaged, self.nearest = reads
        halves = torch.arange(min(self.trunk.depth, PAPER_LAYERS)).tensor_split(2)
        early, late = (own or half.tolist() for own, half in zip(layers, halves, strict=True))
        shared = partial(fp.LayeredPrompts, setting.num_prompts, layers=early, replace=replace)
        start = setting.new_model(prompts=shared)
        self.shared = start.prompts
        self.head = start.head
        self.groups = fp.GroupPrompts(num_groups, 1, self.trunk, layers=late, replace=replace)
        self.selector = SelectionKeys(
            num_groups, self.trunk.num_features, selector=selector, live=live
        )

    def query(self, images: Tensor) -> Tensor:
        """Encode images without prompts."""
        return fp.encode_prompted(self.trunk, images, depth=self.query_depth).pooled.detach()

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
        if not grouped:
            return F.cross_entropy(self.logits(images), labels)
        query, keys = self.query(images), self.selector.keys
        chosen = self.selector(query).indices
        inserted = select_nearest(query, keys).indices if self.nearest else chosen
        loss = F.cross_entropy(self.logits(images, inserted), labels)
        return loss + key_loss(query, keys, chosen)


def _server(model: _GroupedModel, decay: float, key_decay: float) -> fp.Server:
    """Make the server, with momentum for groups and keys, and the selections of all rounds."""
    rules = {"groups": fp.ema(decay=decay), "selector": fp.ema(decay=key_decay)}
    mean = fp.averaging_server(fp.snapshot(model), fp.update_by_name(rules))

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
    num_groups: int = 5,
    shared_layers: Sequence[int] = (),
    group_layers: Sequence[int] = (),
    replace: bool = True,
    averaged: bool = True,
    query_depth: int | None = None,
    decay: float = 0.5,
    key_decay: float | None = None,
    blocks: Sequence[Sequence[str]] = (("shared", "head"), ("groups", "selector", "head")),
    insert_nearest: bool = False,
    offset: float | None = None,
    live: bool = True,
    selector: PromptSelector | None = None,
) -> fp.Method:
    """SGPT.

    Args:
        setting: Setting with one trunk.
        learning_rate: Learning rate of both blocks.
        num_groups: Number of groups, at most the width of the trunk.
        shared_layers: Layers that shared prompts enter, 0-based. If empty, the first three, or the
            first half of less than six blocks.
        group_layers: Layers that group prompts enter. If empty, the next three, or the second half.
        replace: Whether new prompts take the place of the old ones, as in Eq. 2 and Alg. 3.
        averaged: Whether the head reads the mean of the class token and all group tokens. With n
            group layers, each of them has the weight 1/(n + 1), as in the authors' code. With
            `replace`, both have the weight 1/2, as in Alg. 3. Without groups, the head reads the
            class token.
        query_depth: Number of blocks that encode a query. If None, all.
        decay: Momentum of group prompts and keys on the server (Eq. 7).
        key_decay: Momentum of keys, if it is another one.
        blocks: Parts that each block trains, in order.
        insert_nearest: Whether training inserts the prompts of the nearest key (Eq. 5). Keys are
            trained and counted by `selector` in any case. If False, its choice decides both.
        offset: Number above 0, added to the shares of groups in Eq. 6. If None, the default of
            `selector`.
        live: Whether a client's selections in this round count in its next ones. If not, counts are
            fixed within a round.
        selector: Selection rule in training. If None,
            :func:`~fedprompt.selection.select_nearest`.
    """
    check_sequences(shared_layers=shared_layers, group_layers=group_layers, blocks=blocks)
    layers = shared_layers, group_layers
    _check(setting.trunk.depth, layers, query_depth, blocks)
    if offset is not None and not offset > 0:
        raise ValueError(f"`offset` must be above 0; got {offset}.")
    rule: Any = selector or select_nearest
    rule = rule if offset is None else partial(rule, offset=offset)
    reads = set().union(*blocks), query_depth, averaged, insert_nearest
    model = setting.seeded(_GroupedModel, setting, num_groups, layers, replace, rule, live, *reads)

    def train(data, answer, state):
        predict(data, answer, state).train()
        for block, batches in zip(blocks, data.phases(len(blocks)), strict=True):
            with fp.training_only(model, *map(model.get_submodule, block)):
                optimizer = data.optimizer(model, learning_rate)
                for images, labels in batches:
                    take_step(optimizer, model.loss(images, labels, "groups" in block))
        rows = {"selector.keys": model.selector.counts}
        return fp.collect(model, weight=data.num_examples, rows=rows), state

    def predict(data, answer, state):
        fp.load_values(model, answer)
        model.selector.start_round(answer["selector.usage"])
        return model.eval()

    def form(client):
        return fp.collect(model, weight=0, rows={"selector.keys": torch.zeros(num_groups)})

    server = _server(model, decay, decay if key_decay is None else key_decay)
    return fp.Method(train, server, predict, form=form)


def _check(depth, layers, query_depth, blocks):
    """Require values in their range, and blocks that train keys with the groups they select."""
    check_sequences(**{f"blocks[{position}]": block for position, block in enumerate(blocks)})
    if not all(layer in range(depth) for layer in (*layers[0], *layers[1])):
        raise ValueError(f"`shared_layers` and `group_layers` must be below {depth}; got {layers}.")
    if query_depth not in (None, *range(1, depth + 1)):
        raise ValueError(f"`query_depth` must be 1 to {depth}, or None; got {query_depth}.")
    parts, keys = {"shared", "groups", "selector", "head"}, {"groups", "selector"}
    if not blocks or any({*block} - parts or keys & {*block} == {"selector"} for block in blocks):
        rule = f'name parts among {sorted(parts)}, and "selector" with "groups" only'
        raise ValueError(f"`blocks` must {rule}; got {blocks}.")
