"""SGPT: prompts that all samples share, and group prompts that each sample selects.

The method is by Deng et al. (CVPR 2024). Twenty clients with two digits each train one global
model that adapts to every image::

    python examples/studies/sgpt.py

``--shift feature`` gives each client one visual domain instead. With ``--full``, the study makes
the tables of its page. With weights, this command runs the setting of the paper::

    python examples/studies/sgpt.py --backbone vit_base_patch16_224.augreg_in21k --pretrained \
        --dataset cifar100 --root DIR --clients 100 --classes-per-client 10
"""

import sys
from pathlib import Path

# Makes `studies` and `embedded` importable.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from argparse import Namespace
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import fedprompt as fp
from embedded.shifts import Federation, Side
from embedded.tasks import Backbone
from studies import sgpt_report as report
from studies.memory import rounds
from studies.sgpt_setup import flags


def uncalibrated(query: Tensor, keys: Tensor, *, usage: Tensor | None = None) -> fp.Selection:
    """Select in training as at inference, without regard to the sizes of groups."""
    return fp.select_nearest(query, keys)


class Row(NamedTuple):
    """Row of the tables: trained parts of each block, selection rule, and server momentum.

    With `average`, the head reads the mean of the class token and the group tokens, and otherwise
    only the class token. If `average` is None, the flag decides.
    """

    blocks: list[tuple[str, ...]]
    selector: fp.PromptSelector = fp.select_nearest
    momentum: float = 0.5
    average: bool | None = None


SHARED, GROUPS = ("shared", "head"), ("groups", "selector", "head")
ROWS = {
    "head only": Row([("head",)]),
    # The next two have other prompt layers, see `new_model`.
    "FedVPT": Row([SHARED]),
    "FedVPT-D": Row([SHARED]),
    "shared only": Row([SHARED]),
    "group only": Row([GROUPS]),
    "joint": Row([("shared", *GROUPS)]),
    "inverted order": Row([GROUPS, SHARED]),
    "SGPT, no calibration": Row([SHARED, GROUPS], uncalibrated, momentum=0.0),
    "SGPT, no momentum": Row([SHARED, GROUPS], momentum=0.0),
    "SGPT, averaged tokens": Row([SHARED, GROUPS], average=True),
    "SGPT": Row([SHARED, GROUPS]),
}


def new_model(name: str, backbone: Backbone, num_classes: int, args: Namespace) -> nn.ModuleDict:
    """Make the trained modules; the frozen backbone is shared and not included."""
    dim, depth, size = backbone.dim, backbone.encoder.depth, backbone.patch_size
    elsewhere = {"FedVPT": (args.num_prompts, (0,)), "FedVPT-D": (args.num_prompts, range(depth))}
    length, layers = elsewhere.get(name, (args.shared_length, args.shared_layers))
    parts = {
        "shared": fp.LayeredPrompts(
            length, dim, layers=layers, replace=name == "FedVPT-D", patch_size=size
        ),
        "groups": fp.GroupPrompts(
            args.groups, args.group_length, dim, layers=args.group_layers, patch_size=size
        ),
        "selector": fp.SelectionKeys(args.groups, dim, selector=ROWS[name].selector),
        "head": nn.Linear(dim, num_classes),
    }
    learning = set().union(*ROWS[name].blocks)
    return nn.ModuleDict({part: module for part, module in parts.items() if part in learning}).to(
        args.device
    )


def logits(
    model: nn.ModuleDict, backbone: Backbone, images: Tensor, chosen: Tensor | None, average: bool
) -> Tensor:
    """Classify with the shared prompts and with those of the chosen groups, if any."""
    images = (images - backbone.mean) / backbone.std
    streams = [model["shared"]()] if "shared" in model else []
    if chosen is None:
        return model["head"](fp.encode_prompted(backbone.encoder, images, *streams).pooled)
    encoded = fp.encode_prompted(backbone.encoder, images, *streams, model["groups"](chosen))
    return model["head"](
        torch.cat([encoded.pooled[:, None], encoded.streams[-1]], 1).mean(1)
        if average
        else encoded.pooled
    )


@torch.no_grad()
def inference(
    model: nn.ModuleDict, backbone: Backbone, side: Side, args: Namespace
) -> tuple[Tensor, Tensor | None]:
    """Return whether each image is classified correctly, and the groups chosen by cosine."""
    chosen = model.eval()["selector"](side.queries).indices if "groups" in model else None
    correct = torch.zeros(len(side.labels))
    for images, numbers in side.split.batches(range(len(side.labels)), args.device):
        z = logits(
            model, backbone, images, None if chosen is None else chosen[numbers], args.average
        )
        correct[numbers.cpu()] = (z.argmax(1) == side.labels[numbers]).float().cpu()
    return correct, None if chosen is None else chosen.cpu()


def train_block(
    model: nn.ModuleDict,
    block: tuple[str, ...],
    backbone: Backbone,
    side: Side,
    batches: Iterator[tuple[Tensor, Tensor]],
    args: Namespace,
) -> None:
    """Train the parts of a block on batches of images and their numbers; the others are frozen."""
    decay = {part: args.weight_decay * (part in SHARED) for part in block}
    groups = [{"params": model[part].parameters(), "weight_decay": decay[part]} for part in block]
    optimizer = torch.optim.SGD(groups, lr=args.learning_rate, momentum=0.9)
    with fp.training_only(model, *(model[part] for part in block)):
        for images, numbers in batches:
            chosen, loss = None, torch.zeros((), device=args.device)
            if "groups" in block:
                queries = side.queries[numbers]
                chosen = model["selector"](queries).indices
                loss = fp.key_loss(queries, model["selector"].keys, chosen)
            z = logits(model, backbone, images, chosen, args.average)
            loss = loss + F.cross_entropy(z, side.labels[numbers])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def client_round(
    model: nn.ModuleDict,
    row: Row,
    backbone: Backbone,
    side: Side,
    client: int,
    server_round: int,
    args: Namespace,
) -> dict[str, fp.Weighted]:
    """Train all blocks of a row on a client's images; return the client's payload."""
    shard = side.shards[client]
    stream = fp.stream_generator(args.seed, server_round=server_round, client=client)
    epochs = args.epochs * 2 // len(row.blocks)  # equal numbers of steps in all rows
    steps = -(-len(shard) // args.batch_size) * epochs
    for block in row.blocks:
        batches = side.split.training(
            shard, args.device, size=args.batch_size, steps=steps, generator=stream
        )
        train_block(model, block, backbone, side, batches, args)
    counts = {"selector.keys": model["selector"].counts} if "groups" in model else {}
    return fp.collect(model, weight=len(shard), rows=counts)


def federate(
    name: str, federation: Federation, backbone: Backbone, args: Namespace
) -> report.Result:
    """Run one row of the tables."""
    row, test = ROWS[name], federation.test
    args = args if row.average is None else Namespace(**vars(args) | {"average": row.average})
    torch.manual_seed(args.seed)
    model = new_model(name, backbone, federation.num_classes, args)
    grouped, clients = "groups" in model, range(args.clients - args.unseen)
    values, usage = fp.snapshot(model), torch.zeros(args.groups)
    rules = {part: fp.ema(decay=row.momentum) for part in ("groups", "selector") if grouped}
    server = fp.update_by_name(rules)
    memory = Namespace(values=values, state=server.init(values), usage=usage)
    memory.history, memory.usages, memory.chosen = [], [], None
    for server_round in (bar := rounds(memory, args.rounds, name, args)):
        payloads = []
        draw = fp.stream_generator(args.seed, server_round=server_round, purpose="cohort")
        for client in fp.cohort(clients, size=round(args.ratio * len(clients)), generator=draw):
            fp.load_values(model.train(), memory.values)
            if grouped:
                model["selector"].start_round(memory.usage)
            payloads.append(
                client_round(model, row, backbone, federation.train, client, server_round, args)
            )
        mean = fp.weighted_mean(payloads)
        memory.values, memory.state = server.step(memory.values, mean, memory.state)
        if grouped:
            memory.usages.append(mean["selector.keys"].weight.cpu())
            memory.usage = memory.usage + memory.usages[-1]
            effective = fp.selection.selection_health(memory.usages[-1])["effective_groups"]
            bar.set_postfix(effective_groups=f"{effective:.1f}")
        fp.load_values(model, memory.values)
        correct, memory.chosen = inference(model, backbone, test, args)
        memory.history.append(torch.stack([correct[shard].mean() for shard in test.shards]))
    sizes = torch.tensor([len(shard) for shard in test.shards])
    usages = torch.stack(memory.usages) if grouped else None
    return report.Result(torch.stack(memory.history), sizes, usages, memory.chosen, memory.values)


def main() -> None:
    args = flags().parse_args()
    if args.full:
        # These rows run only for label shift, to save time.
        blocks_differ = ("shared only", "group only", "inverted order", "SGPT, averaged tokens")
        rows = {
            "label": list(ROWS),
            "feature": [name for name in ROWS if name not in blocks_differ],
        }
        for part in report.full(federate, rows, args):
            print(part, flush=True)
        return
    print(report.summary(*report.run(federate, ["FedVPT", "FedVPT-D", "SGPT"], args)))


if __name__ == "__main__":
    main()
