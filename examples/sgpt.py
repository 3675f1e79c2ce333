"""SGPT: one global model whose images choose their own group prompts.

Twenty clients have two digits each. Images share some prompts, and select one of ten groups by the
nearest key (Deng et al., CVPR 2024). The eight shared prompts, their layers and the head's class
token are not the paper's: see docs/methods/sgpt.md, and docs/results/mechanisms.md::

    python examples/sgpt.py
"""

from collections.abc import Iterable
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

import digits
import fedprompt as fp
from fedprompt import samples
from fedprompt.interfaces import Trunk

NUM_CLIENTS, COHORT, NUM_GROUPS = 20, 5, 10


@torch.no_grad()
def query_of(trunk: Trunk, images: Tensor) -> Tensor:
    """Encode images without any prompt: the query that selects a group."""
    return fp.encode_prompted(trunk, images).pooled


def logits_of(model: nn.ModuleDict, trunk: Trunk, images: Tensor, *chosen: Tensor) -> Tensor:
    """Classify with the shared prompts and those of the chosen groups, if any."""
    streams = [model["shared"](), *(model["groups"](indices) for indices in chosen)]
    return model["head"](fp.encode_prompted(trunk, images, *streams).pooled)


def train(model: nn.ModuleDict, trunk: Trunk, batches: Iterable[digits.Batch], *block: str) -> None:
    """Train the parts of one block; the other parts are frozen."""
    parts = [model[name] for name in block]
    optimizer = torch.optim.SGD(nn.ModuleList(parts).parameters(), 0.05, momentum=0.9)
    with fp.training_only(model, *parts):
        for images, labels in batches:
            if "groups" in block:
                query = query_of(trunk, images)
                chosen = model["selector"](query).indices
                loss = F.cross_entropy(logits_of(model, trunk, images, chosen), labels)
                loss = loss + fp.selection.key_loss(query, model["selector"].keys, chosen)
            else:
                loss = F.cross_entropy(logits_of(model, trunk, images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def main() -> None:
    quick = digits.parser(__doc__).parse_args().quick
    split = partial(fp.data.pathological, num_clients=NUM_CLIENTS, classes_per_client=2)
    federation = digits.federation(split, rounds=20, steps=8, quick=quick)
    torch.manual_seed(0)
    trunk = fp.vit_trunk(samples.vit("B"))
    shared = fp.LayeredPrompts(8, trunk, layers=(0, 1))
    groups = fp.GroupPrompts(NUM_GROUPS, 1, trunk, layers=(2, 3))
    selector, head = fp.selection.SelectionKeys(NUM_GROUPS, trunk.dim), nn.Linear(trunk.dim, 10)
    model = nn.ModuleDict({"shared": shared, "groups": groups, "selector": selector, "head": head})

    def predict(images: Tensor) -> Tensor:
        return logits_of(model, trunk, images, selector(query_of(trunk, images)).indices)

    values, usage = fp.snapshot(model), torch.zeros(NUM_GROUPS)
    server = fp.update_by_name({"groups": fp.ema(decay=0.5), "selector": fp.ema(decay=0.5)})
    state = server.init(values)
    for server_round in (bar := tqdm(range(federation.rounds), unit="round")):
        payloads, draw = [], fp.stream_generator(0, server_round=server_round, purpose="cohort")
        for client in fp.sample_clients(range(NUM_CLIENTS), size=COHORT, generator=draw):
            fp.load_values(model.train(), values)
            selector.start_round(usage)
            for block in (("shared", "head"), ("groups", "selector", "head")):
                train(model, trunk, federation.batches(client, server_round, size=32), *block)
            size = len(federation.shards[client])
            payloads.append(fp.collect(model, weight=size, rows={"selector.keys": selector.counts}))
        mean = fp.weighted_mean(payloads)
        values, state = server.step(values, mean, state)
        usage = usage + mean["selector.keys"].weight
        fp.load_values(model.eval(), values)
        accuracy = federation.accuracy(predict)
        bar.write(f"round {server_round + 1}: {100 * accuracy:.1f} %")
    chosen = selector(query_of(trunk, federation.test_images)).indices
    table = fp.metrics.contingency_table(chosen, federation.test_labels, NUM_GROUPS, 10)
    health = fp.selection.selection_health(table)
    print(
        f"One model recognizes {100 * accuracy:.1f} % of all digits; no client has more than two. "
        f"{health['dead_groups']:.0f} of {NUM_GROUPS} groups have no image, and "
        f"{100 * health['purity']:.0f} % of the images are of the largest class of their group."
    )


if __name__ == "__main__":
    main()
