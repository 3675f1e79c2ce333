"""Runs over one split of the data, and the tables and pictures that the studies share."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import cycle, islice
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

import fedprompt as fp
from embedded.tasks import Task, load_backbone, load_task, shards
from studies.flags import add_recipe_flags, completed, limit_threads, new_parser

matplotlib.use("Agg")
import matplotlib.pyplot as plt


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


SPREAD = ("lowest", "average", "highest", "own label mix")


class Result(NamedTuple):
    """Result of a run: numbers of images, accuracy (rounds, clients, classes), and a ledger.

    Training images are counted as (clients, classes), test images as (classes,).
    """

    holdings: np.ndarray
    num_test: Tensor
    accuracy: Tensor
    ledger: fp.Ledger

    def spread(self) -> list[float]:
        """Return lowest, average and highest client accuracy, and the average on own classes.

        All are of the last round. The first three are on the full test set, the fourth is on
        each client's own mix of classes.
        """
        last = self.accuracy[-1]
        own = [
            fp.metrics.global_accuracy(client[None], torch.as_tensor(counts))
            for client, counts in zip(last, self.holdings, strict=True)
        ]
        return [*fp.metrics.client_spread(last, self.num_test), float(np.mean(own))]

    def over_rounds(self) -> Tensor:
        """Return the accuracy of each client on the full test set, (rounds, clients)."""
        return self.accuracy @ (self.num_test / self.num_test.sum())


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
        federate: Returns accuracy (rounds, clients, classes) and a ledger.
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
    holdings = np.stack(
        [np.bincount(task.train.labels[shard], minlength=task.num_classes) for shard in split]
    )
    num_test = torch.bincount(torch.as_tensor(task.test.labels), minlength=task.num_classes)
    return {
        name: Result(holdings, num_test, *federate(name, task, backbones, split, args))
        for name in names
    }


def percent(value: float) -> str:
    """Write a share as a percentage."""
    return f"{100 * value:.1f}"


def mean_and_deviation(values: Sequence[float]) -> str:
    """Write percentages over seeds as mean ± standard deviation."""
    if len(values) == 1:
        return percent(values[0])
    return f"{100 * np.mean(values):z.1f} ± {100 * np.std(values, ddof=1):.1f}"


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Lay out rows as a Markdown table, the first column to the left, the others to the right."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = [
        [
            row[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
        ]
        for row in cells
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in (lines[0], rule, *lines[1:]))


def picture(
    path: Path,
    holdings: np.ndarray,
    histories: Mapping[str, Tensor],
    rounds: Sequence[int] | None = None,
) -> None:
    """Draw the partition, and accuracy over rounds.

    Accuracy is the mean of the clients, with a band from the lowest to the highest.

    Args:
        path: Path of the PNG file.
        holdings: Numbers of training images (clients, classes).
        histories: Accuracy in [0, 1] of each method, (rounds, clients).
        rounds: Rounds after which accuracy was measured. If None, after each round.
    """
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(10, 3.6), layout="constrained", width_ratios=(1, 1.2)
    )
    labels = np.concatenate([np.repeat(np.arange(len(row)), row) for row in holdings])
    owned = np.split(np.arange(len(labels)), holdings.sum(1).cumsum()[:-1])
    fp.plots.partition(labels, owned, axes=left)
    left.set(ylabel="training images")
    if holdings.shape[1] <= 10:
        left.legend(fontsize=6, ncols=2)
    for (name, history), style in zip(histories.items(), cycle(("-", "--", "-.")), strict=False):
        after = range(1, len(history) + 1) if rounds is None else rounds
        (line,) = right.plot(after, 100 * history.mean(1), style, label=name)
        right.fill_between(
            after, 100 * history.amin(1), 100 * history.amax(1), color=line.get_color(), alpha=0.12
        )
    right.set(
        title="accuracy on the full test set: mean, lowest and highest client",
        xlabel="round",
        ylabel="%",
    )
    right.title.set_size(10)
    right.xaxis.get_major_locator().set_params(integer=True)
    right.legend()
    save(figure, path, dpi=120)


def save(figure: Figure, path: Path, *, dpi: int) -> None:
    """Write a figure to a PNG file, and close it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)
    plt.close(figure)


def save_ledgers(ledgers: Mapping[str, fp.Ledger], out: Path) -> None:
    """Write each ledger with entries to a CSV file, named after its row."""
    out.mkdir(parents=True, exist_ok=True)
    for name, ledger in ledgers.items():
        if ledger.entries:
            ledger.to_csv(out / f"{name.replace(',', '').replace(' ', '_').lower()}.csv")


def over_seeds(results: Sequence[Result], baseline: Sequence[Result]) -> list[str]:
    """Write `Result.spread` over seeds, and the gain over a baseline with the same seed."""
    spreads, base = (np.array([result.spread() for result in runs]) for runs in (results, baseline))
    return [
        *map(mean_and_deviation, spreads.T),
        "" if results is baseline else mean_and_deviation(spreads[:, 1] - base[:, 1]),
    ]


def summary(results: Mapping[str, Result], out: Path) -> str:
    """Write the picture and the ledgers to a folder, and the tables as text."""
    first = next(iter(results.values()))
    picture(
        out / "fedhpl.png",
        first.holdings,
        {name: result.over_rounds() for name, result in results.items()},
    )
    classes = [str(label) for label in range(first.accuracy.shape[2])]
    by_class = [
        [name, *map(percent, result.accuracy[-1].mean(0).tolist())]
        for name, result in results.items()
    ]
    parts = [
        "Accuracy after the last round, % of the full test set over clients:",
        table(
            ["method", *SPREAD],
            [[name, *map(percent, result.spread())] for name, result in results.items()],
        ),
    ]
    if len(classes) <= 20:
        parts += ["\nEach class, mean over clients:", table(["method", *classes], by_class)]
    save_ledgers({name: result.ledger for name, result in results.items()}, out)
    for name, result in results.items():
        if result.ledger.entries:
            parts += [f"\n{name}: what was sent", result.ledger.table(), formula(result)]
    return "\n".join([*parts, f"\nPicture and ledgers: {out}/"])


def formula(result: Result) -> str:
    """Compare the logits in the ledger with FedHPL's Table 9.

    The table counts C class means of C logits and C counts, C (C + 1) numbers.
    """
    rounds, clients, classes = result.accuracy.shape
    numbers = classes * (classes + 1)
    sent = result.ledger.total(direction="up", name="logits")
    return (
        f"Logits up: {sent} bytes. Table 9's formula: {classes} x ({classes} + 1) = {numbers}"
        f" numbers for a client and round, {4 * numbers * rounds * clients} bytes in all"
        f" (Table 10: {clients * numbers / 1024:.2f} K numbers a round);"
        " classes without a correct logit are not sent."
    )
