"""Flags, data split, evaluation, tables and pictures of the FedL2G study."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn as nn
from sklearn.manifold import TSNE
from torch import Tensor

import fedprompt as fp
from embedded.pixels import IMAGE_SIZE
from embedded.tasks import Split, Task, load_task
from embedded.zoo import GROUPS
from studies.flags import limit_threads, new_parser
from studies.memory import add_checkpoint_flag
from studies.report import mean_and_deviation, plt, save, save_ledgers, table

LAST = 5
"""Number of last rounds over which the reported accuracy is averaged."""


class Shard(NamedTuple):
    """Positions of a client's study, quiz and test images, all of the same mix of classes."""

    study: np.ndarray
    quiz: np.ndarray
    test: np.ndarray


class Run(NamedTuple):
    """Result of a row: trained clients, guides, accuracy and loss (rounds, clients), ledger."""

    clients: Sequence[nn.Module]
    guides: Tensor
    accuracy: Tensor
    losses: Tensor
    ledger: fp.Ledger

    def accuracies(self, shards: Sequence[Shard]) -> fp.metrics.Summary:
        """Summarize accuracy on the clients' own test images: last rounds, and best round.

        Every image has the same weight.
        """
        sizes = torch.tensor([len(shard.test) for shard in shards])
        history = [
            fp.metrics.pooled_local_accuracy(accuracy[None], sizes) for accuracy in self.accuracy
        ]
        return fp.metrics.last_and_best(history, last=min(LAST, len(history)))

    def kibibytes(self, direction: str) -> float:
        """Average the KiB that all clients send or receive in a round, warm-up rounds included."""
        rounds = 1 + max((entry.server_round for entry in self.ledger.entries), default=0)
        return self.ledger.total(direction=direction) / rounds / 1024


def flags(description: str) -> argparse.ArgumentParser:
    """Make a parser with all flags except the methods."""
    parser = new_parser(
        description, image_size=32, quick="two rounds on a few images, to see that it runs"
    )
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument(
        "--alpha",
        type=float,
        default=0.3,
        help="concentration of the Dirichlet split: small is uneven",
    )
    parser.add_argument("--classes-per-client", type=int, help="for a pathological split")
    parser.add_argument(
        "--participation", type=float, default=1.0, help="fraction of the clients in a round"
    )
    add_training_flags(parser)
    tiny = [name for name in GROUPS if name != "tiny"]
    parser.add_argument("--group", choices=tiny, default="HtFE8", help="networks of the clients")
    parser.add_argument("--dim", type=int, default=32, help="width of the guided features")
    parser.add_argument(
        "--project", action="store_true", help="project to that width instead of pooling"
    )
    add_checkpoint_flag(parser)
    return parser


def add_training_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of rounds, batches and the learning rate."""
    parser.add_argument("--rounds", type=int, default=15, help="rounds in which clients train")
    parser.add_argument(
        "--warm-up",
        type=int,
        default=5,
        help="number of rounds before these, in which only guides are trained",
    )
    parser.add_argument("--batch-size", type=int, default=10, help="of training, study and quiz")
    parser.add_argument(
        "--learning-rate", type=float, default=0.2, help="of the clients in the first round"
    )
    parser.add_argument(
        "--constant",
        action="store_true",
        help="constant learning rate; otherwise it decreases along a cosine",
    )


def deal(task: Task, args: argparse.Namespace) -> list[Shard]:
    """Split training and test images by the same shares, and hold back each client's quiz."""
    generator = np.random.default_rng(args.seed)
    if args.classes_per_client:
        shares = fp.data.pathological_shares(
            args.clients,
            task.num_classes,
            classes_per_client=args.classes_per_client,
            generator=generator,
        )
    else:
        shares = fp.data.dirichlet_shares(
            args.clients, task.num_classes, alpha=args.alpha, generator=generator
        )
    train, test = (
        fp.data.allocate(split.labels, shares, generator=generator)
        for split in (task.train, task.test)
    )
    shards = []
    for own, own_test in zip(train, test, strict=True):
        study, quiz = fp.data.study_quiz_split(
            task.train.labels[own], quiz_size=args.batch_size, generator=generator
        )
        shards.append(Shard(own[study], own[quiz], own_test))
    return shards


def run(
    federate: Callable[..., Run], names: Sequence[str], args: argparse.Namespace
) -> tuple[Task, list[Shard], dict[str, Run]]:
    """Call `federate(name, task, shards, args)` for each name on one split of the data."""
    limit_threads(args)
    digits = {"image_size": IMAGE_SIZE, "group": "tiny"} if args.dataset == "digits" else {}
    given = vars(args) | digits
    args = argparse.Namespace(**given | ({"rounds": 2, "warm_up": 1} if args.quick else {}))
    task = load_task(args.dataset, root=args.root, seed=args.seed, image_size=args.image_size)
    if args.quick:
        task = task._replace(train=task.train.first(200), test=task.test.first(100))
    shards = deal(task, args)
    return task, shards, {name: federate(name, task, shards, args) for name in names}


def epoch(
    task: Task, indices: np.ndarray, stream: torch.Generator, args: argparse.Namespace
) -> list[tuple[Tensor, Tensor]]:
    """Yield shuffled and augmented batches of a client's images.

    A last batch of a single image is dropped: batch normalization cannot train on it.
    """
    if len(indices) == 0:
        return []
    batches = task.train.training(
        indices, args.device, size=args.batch_size, steps=None, generator=stream
    )
    return [(images, labels) for images, labels in batches if len(labels) > 1]


@torch.no_grad()
def accuracy(
    client: nn.Module, split: Split, indices: np.ndarray, args: argparse.Namespace
) -> float:
    """Measure the share of images that a client recognizes; 0 where there are none."""
    client.eval()
    correct = [
        (client(images)[1].argmax(1) == labels).sum().item()
        for images, labels in split.batches(indices, args.device)
    ]
    return sum(correct) / max(1, len(indices))


COLUMNS = (
    f"accuracy, last {LAST} rounds",
    "best round",
    "negative effect, clients",
    "of the mean loss",
    "KiB up",
    "KiB down",
)


def line(runs: Sequence[Run], shards: Sequence[Sequence[Shard]]) -> list[str]:
    """Write one method over seeds: accuracies in %, negative effects in nats, bytes of a round."""
    summaries = [run.accuracies(own) for run, own in zip(runs, shards, strict=True)]
    effects = [fp.metrics.negative_effect(run.losses).average for run in runs]
    common = [fp.metrics.negative_effect(run.losses.mean(1, keepdim=True)).average for run in runs]
    sent = [
        f"{np.mean([run.kibibytes(direction) for run in runs]):.2f}" for direction in ("up", "down")
    ]
    return [
        *(
            mean_and_deviation([getattr(summary, field) for summary in summaries])
            for field in ("last_mean", "best")
        ),
        nats(effects),
        nats(common),
        *sent,
    ]


def nats(values: Sequence[float]) -> str:
    """Write losses over seeds as mean ± standard deviation."""
    return f"{np.mean(values):.3f}" + (
        f" ± {np.std(values, ddof=1):.3f}" if len(values) > 1 else ""
    )


def formula(clients: int, classes: int, dim: int) -> float:
    """Compute FedL2G's Table 3 (down, in KiB): every client gets all guides, 4 bytes a number."""
    return clients * classes * dim * 4 / 1024


def costs(name: str, run: Run, shards: Sequence[Shard]) -> str:
    """Compare the ledger of learned guides with the formula of Table 3."""
    classes, dim = run.guides.shape
    up = [entry.num_bytes for entry in run.ledger.entries if entry.direction == "up"]
    rows = (np.mean(up) / 4 - classes) / dim
    return (
        f"{name}: {run.kibibytes('down'):.2f} KiB down a round; formula {len(shards)} x {classes} x"
        f" {dim} x 4 bytes = {formula(len(shards), classes, dim):.2f} KiB when all take part."
        " Up go the rows of the classes in the study batch,"
        f" {rows:.1f} of {classes} for each client, and {classes} flags."
    )


def picture(
    path: Path, runs: Mapping[str, Run], task: Task, shards: Sequence[Shard], device: str
) -> None:
    """Draw the clients' loss over rounds (Fig. 3), and features with their guides (Fig. 4)."""
    beside = {
        name: run
        for name, run in runs.items()
        if getattr(run.clients[0], "guided", "") == "features" and run.ledger.entries
    }
    figure, axes = plt.subplots(
        1,
        1 + len(beside),
        figsize=(4.2 * (1 + len(beside)), 3.6),
        layout="constrained",
        squeeze=False,
    )
    for (name, run), style in zip(runs.items(), cycle(("-", "--", "-.", ":")), strict=False):
        axes[0, 0].plot(range(1, 1 + len(run.losses)), run.losses.mean(1), style, label=name)
    axes[0, 0].set(
        title="the clients' own loss", xlabel="round", ylabel="cross-entropy, mean over clients"
    )
    axes[0, 0].xaxis.get_major_locator().set_params(integer=True)
    axes[0, 0].legend(fontsize=7)
    for axis, (name, run) in zip(axes[0, 1:], beside.items(), strict=True):
        features, labels = guided_features(run, task, shards, device)
        points = TSNE(perplexity=min(30, (len(labels) - 1) // 3), random_state=0).fit_transform(
            torch.cat([features, run.guides.cpu()])
        )
        axis.scatter(*points[: len(labels)].T, c=labels, cmap="tab10", s=6, alpha=0.5)
        axis.scatter(
            *points[len(labels) :].T,
            c=range(len(run.guides)),
            cmap="tab10",
            s=120,
            marker="*",
            edgecolors="black",
        )
        axis.set(title=f"{name}: features and guides (stars)", xticks=[], yticks=[])
    save(figure, path, dpi=90)


@torch.no_grad()
def guided_features(
    run: Run, task: Task, shards: Sequence[Shard], device: str
) -> tuple[Tensor, Tensor]:
    """Collect the guided features of every client's own test images, with their labels."""
    pieces = []
    for client, shard in zip(run.clients, shards, strict=True):
        client.eval()
        pieces += [
            (client(images)[0].cpu(), labels.cpu())
            for images, labels in task.test.batches(shard.test, device)
        ]
    return torch.cat([features for features, _ in pieces]), torch.cat(
        [labels for _, labels in pieces]
    )


def summary(
    task: Task, shards: Sequence[Shard], runs: Mapping[str, Run], args: argparse.Namespace
) -> str:
    """Write the picture and the ledgers to a folder, and the table as text."""
    picture(args.out / "fedl2g.png", runs, task, shards, args.device)
    save_ledgers({name: run.ledger for name, run in runs.items()}, args.out)
    sizes = [len(shard.study) + len(shard.quiz) for shard in shards]
    parts = [
        f"{len(shards)} clients of {min(sizes)} to {max(sizes)} images."
        " Accuracy in % on test images of each client's own mix of classes.",
        "Negative effect: the largest rise of the training loss, guides left out, over its lowest"
        " value before; mean over clients, and",
        "of the clients' mean loss. Bytes are those of all clients in a round.",
        table(["method", *COLUMNS], [[name, *line([run], [shards])] for name, run in runs.items()]),
        "",
        *(costs(name, run, shards) for name, run in runs.items() if name.startswith("FedL2G")),
        "FedL2G's Table 3, 20 clients and 100 classes, guides of width 100 and 512:"
        f" {formula(20, 100, 100) / 1024:.3f} and"
        f" {formula(20, 100, 512) / 1024:.3f} MiB down (it prints 0.76 and 3.89).",
        f"\nPicture and ledgers: {args.out}/",
    ]
    return "\n".join(parts)
