"""Flags, models and runs of the studies of prompts and a head on a frozen transformer."""

import argparse
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import cycle, islice
from typing import NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

import fedprompt as fp
from embedded.tasks import Backbone, Task, load_backbone, load_task, shards
from studies.flags import add_recipe_flags, completed, limit_threads, new_parser


def flags(description: str) -> argparse.ArgumentParser:
    """Make a parser with the flags of a study of prompts on images."""
    parser = new_parser(description)
    parser.add_argument(
        "--partition",
        choices=("iid", "dir", "noniid"),
        default="noniid",
        help="split of the classes over clients",
    )
    parser.add_argument(
        "--alpha", type=float, default=0.3, help="concentration of dir and noniid: small is uneven"
    )
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--images", type=int, help="maximum number of images of a client")
    add_recipe_flags(parser)
    parser.add_argument(
        "--backbones",
        default=["S", "B", "L"],
        type=lambda names: names.split(","),
        help="assigned to the clients in turn",
    )
    parser.add_argument(
        "--num-prompts",
        type=int,
        help="in each layer; 0 is a linear head; default: the task's recipe",
    )
    parser.add_argument(
        "--pretrained", action="store_true", help="download weights for timm's models"
    )
    return parser


def new_model(backbone: Backbone, num_classes: int, args: Namespace) -> nn.ModuleDict:
    """Make deep prompts and a head from the seed of the run."""
    torch.manual_seed(args.seed)
    prompts = fp.DeepPrompts(
        args.num_prompts, backbone.dim, backbone.encoder.depth, patch_size=backbone.patch_size
    )
    head = nn.Linear(backbone.dim, num_classes)
    return nn.ModuleDict({"prompts": prompts, "head": head}).to(args.device)


def logits(model: nn.Module, backbone: Backbone, images: Tensor) -> Tensor:
    """Classify images."""
    return model["head"](fp.encode_prompted(backbone.encoder, images, model["prompts"]()).pooled)


class Result(NamedTuple):
    """Numbers of test images (classes,), accuracy (rounds, classes) and a ledger of a run."""

    num_test: Tensor
    accuracy: Tensor
    ledger: fp.Ledger

    def final(self) -> float:
        """Return the accuracy on all test images after the last round."""
        return fp.metrics.global_accuracy(self.accuracy[-1:], self.num_test)


@torch.no_grad()
def class_accuracy(predict: Callable[[Tensor], Tensor], task: Task, device: torch.device) -> Tensor:
    """Measure the accuracy of logits on the test images of each class."""
    pieces = []
    for images, labels in task.test.batches(range(len(task.test.labels)), device):
        correct = (predict(images).argmax(1) == labels).float()
        pieces.append(fp.class_means(correct, labels, num_classes=task.num_classes))
    return fp.weighted_mean(pieces).value.cpu()


def run(
    federate: Callable[..., tuple[Tensor, fp.Ledger]],
    names: Sequence[str],
    args: argparse.Namespace,
) -> dict[str, Result]:
    """Call `federate(name, task, backbones, shards, args)` for each name on one split of the data.

    Args:
        federate: Returns accuracy (rounds, classes) and a ledger.
        names: Names of the rows.
        args: Parsed flags; the task's recipe sets the missing ones.
    """
    limit_threads(args)
    task = load_task(args.dataset, root=args.root, seed=args.seed, image_size=args.image_size)
    args = completed(args, task.recipe._asdict())
    if args.quick:
        args.rounds, args.steps, task = 2, 2, task._replace(test=task.test.first(100))
    load = cache(
        partial(
            load_backbone,
            pretrained=args.pretrained,
            image_size=args.image_size,
            device=args.device,
        )
    )
    backbones = [load(name) for name in islice(cycle(args.backbones), args.clients)]
    split = shards(
        task.train.labels,
        partition=args.partition,
        alpha=args.alpha,
        num_clients=args.clients,
        seed=args.seed,
        images=args.images,
    )
    num_test = torch.bincount(torch.as_tensor(task.test.labels), minlength=task.num_classes)
    return {name: Result(num_test, *federate(name, task, backbones, split, args)) for name in names}
