"""FedHPL: clients with different backbones tune prompts and teach each other by class logits.

The method is by Ma et al. (2024). Five clients with three different vision transformers hold
real handwritten digits::

    python examples/studies/fedhpl.py

With ``--full``, the study makes the table of its page. With weights and data, this command runs
the setting of the paper::

    python examples/studies/fedhpl.py \
        --backbones vit_small_patch16_224,vit_base_patch16_224,vit_large_patch16_224 --pretrained \
        --dataset cifar10 --root DIR --partition iid
"""

import sys
from pathlib import Path

# Makes `studies` and `embedded` importable.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from argparse import Namespace
from collections import defaultdict
from functools import partial

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import fedprompt as fp
from embedded.tasks import Backbone, Task
from studies import report
from studies.memory import add_checkpoint_flag, rounds, variant

ROWS = {
    "local only": (False, []),
    "FedHPL": (True, []),
    "FedHPL +P +H": (True, ["prompts", "head"]),
}
"""Whether logits are taught, and the parameters that are averaged."""


def new_client(backbone: Backbone, task: Task, args: Namespace) -> nn.ModuleDict:
    """Make the trained modules of one client; the frozen backbone is shared and not included."""
    if isinstance(backbone.encoder, nn.Module):
        prompts = fp.PadPrompts(
            backbone.image_size,
            mean=backbone.mean.flatten().tolist(),
            std=backbone.std.flatten().tolist(),
        )
    elif args.shallow:
        prompts = fp.ShallowPrompts(args.num_prompts, backbone.dim, patch_size=backbone.patch_size)
    else:
        prompts = fp.DeepPrompts(
            args.num_prompts, backbone.dim, backbone.encoder.depth, patch_size=backbone.patch_size
        )
    return nn.ModuleDict(
        {"prompts": prompts, "head": nn.Linear(backbone.dim, task.num_classes)}
    ).to(args.device)


def logits(client: nn.ModuleDict, backbone: Backbone, images: Tensor) -> Tensor:
    images = (images - backbone.mean) / backbone.std
    if isinstance(backbone.encoder, nn.Module):
        return client["head"](backbone.encoder(client["prompts"](images)))
    return client["head"](fp.encode_prompted(backbone.encoder, images, client["prompts"]()).pooled)


@torch.no_grad()
def class_logits(client, backbone, task, shard, args) -> fp.Weighted:
    """Average the logits of each class over the client's correctly classified images (Eq. 10)."""
    pieces = []
    for images, labels in task.train.batches(shard, args.device):
        z = logits(client, backbone, images)
        pieces.append(
            fp.class_means(z, labels, num_classes=task.num_classes, keep=z.argmax(1) == labels)
        )
    return fp.weighted_mean(pieces)


def client_round(
    client: nn.ModuleDict,
    backbone: Backbone,
    task: Task,
    shard: np.ndarray,
    teacher: fp.Weighted,
    k: int,
    server_round: int,
    args: Namespace,
) -> dict[str, fp.Weighted]:
    """Train client `k` for one round and return its payload.

    The payload holds logits if `args.teach`, and the parameters that `args.share` names.
    """
    optimizer = task.recipe.make_optimizer(client.parameters(), server_round / args.rounds)
    stream = fp.stream_generator(args.seed, server_round=server_round, client=k)
    for images, labels in task.train.training(
        shard, args.device, size=args.batch_size, steps=args.steps, generator=stream
    ):
        z = logits(client, backbone, images)
        loss = F.cross_entropy(z, labels) + args.gamma * fp.distillation_loss(
            z, labels, teacher, temperature=args.temperature
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    payload = {"logits": class_logits(client, backbone, task, shard, args)} if args.teach else {}
    return payload | (fp.collect(client, weight=len(shard), only=args.share) if args.share else {})


def replies(
    payloads: list[dict[str, fp.Weighted]], dims: list[int]
) -> list[dict[str, Tensor | fp.Weighted]]:
    """Make the server's message to each client.

    It holds the teacher of the client's width, and the mean of the parameters that clients of
    this width share.
    """
    taught = [payload["logits"] for payload in payloads if "logits" in payload]
    teachers = fp.heterogeneous_means(taught, dims) if taught else {}
    shared = defaultdict(list)
    for dim, payload in zip(dims, payloads, strict=True):
        shared[dim].append({name: entry for name, entry in payload.items() if name != "logits"})
    means = {
        dim: {name: mean.value for name, mean in fp.weighted_mean(payloads).items()}
        for dim, payloads in shared.items()
    }
    return [means[dim] | ({"teacher": teachers[dim]} if taught else {}) for dim in dims]


def federate(
    name: str, task: Task, backbones: list[Backbone], shards: list[np.ndarray], args: Namespace
) -> tuple[Tensor, fp.Ledger]:
    """Run one row of the table; return accuracy (rounds, clients, classes) and a ledger."""
    teach, share = ROWS[name]
    args = Namespace(**vars(args) | {"teach": teach, "share": args.share or share if teach else []})
    clients, dims, ledger = nn.ModuleList(), [backbone.dim for backbone in backbones], fp.Ledger()
    for backbone in backbones:
        torch.manual_seed(args.seed)  # the same initial weights for equal architectures
        clients.append(new_client(backbone, task, args))
    unknown = fp.Weighted(
        torch.zeros(task.num_classes, task.num_classes), torch.zeros(task.num_classes)
    )
    teachers = [fp.Weighted(*(tensor.to(args.device) for tensor in unknown)) for _ in clients]
    memory = Namespace(clients=clients, teachers=teachers, history=[], ledger=ledger)
    for server_round in rounds(memory, args.rounds, name, args):
        payloads = []
        for k, client in enumerate(clients):
            payloads.append(
                client_round(
                    client, backbones[k], task, shards[k], memory.teachers[k], k, server_round, args
                )
            )
            ledger.record(payloads[-1], direction="up", client=k, server_round=server_round)
        for k, reply in enumerate(replies(payloads, dims)):
            ledger.record(reply, direction="down", client=k, server_round=server_round)
            memory.teachers[k] = reply.pop("teacher", memory.teachers[k])
            fp.load_values(clients[k], reply)
        predict = [
            partial(logits, client, backbone)
            for client, backbone in zip(clients, backbones, strict=True)
        ]
        memory.history.append(
            torch.stack([report.class_accuracy(each, task, args.device) for each in predict])
        )
    return torch.stack(memory.history), ledger


def full(args: Namespace) -> str:
    """Run every row of the table for three seeds and ten rounds."""
    args.rounds = args.rounds or 10
    central = {"backbones": ["B"], "clients": 1, "partition": "iid", "steps": 45}
    variants = {"linear head": {"num_prompts": 0}, "VPT-shallow": {"shallow": True}, "VPT-deep": {}}
    settings = {
        "1 client, ViT-B": [
            (label, central | flags, "local only") for label, flags in variants.items()
        ],
        "5 clients, Dirichlet 0.3, ViT-S/B/L": [
            (name, {"partition": "noniid", "alpha": 0.3}, name) for name in ROWS
        ],
        "5 clients, IID, 50 images each, ViT-S/B/L": [
            (name, {"partition": "iid", "images": 50}, name) for name in ROWS
        ],
    }
    lines = []
    for setting, rows in settings.items():
        results = {
            label: [
                report.run(federate, [name], variant(args, **flags, seed=seed))[name]
                for seed in range(3)
            ]
            for label, flags, name in rows
        }
        lines += [
            [setting, label, *report.over_seeds(results[label], results[rows[0][0]])]
            for label in results
        ]
    return report.table(["setting", "method", *report.SPREAD, "gain of average"], lines)


def main() -> None:
    parser = report.flags("FedHPL")
    parser.add_argument("--temperature", type=float, default=4.5)
    parser.add_argument("--gamma", type=float, default=1.0, help="weight of the distillation loss")
    parser.add_argument("--shallow", action="store_true", help="prompts only at the first layer")
    share = {"action": "append_const", "dest": "share", "default": []}
    parser.add_argument(
        "--share-prompts",
        const="prompts",
        help="FedHPL with prompts averaged among clients of equal width (+P)",
        **share,
    )
    parser.add_argument(
        "--share-head",
        const="head",
        help="FedHPL with heads averaged among clients of equal width (+H)",
        **share,
    )
    parser.add_argument("--local", action="store_true", help="clients exchange nothing")
    add_checkpoint_flag(parser)
    args = parser.parse_args()
    if args.full:
        print(full(args))
        return
    names = ["local only"] if args.local else ["local only", "FedHPL"] if args.share else list(ROWS)
    print(report.summary(report.run(federate, names, args), args.out))


if __name__ == "__main__":
    main()
