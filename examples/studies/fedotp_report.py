"""Flags, runs over one split, tables and pictures of transport plans for studies with CLIP."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import fedprompt as fp
from embedded.clip_tasks import ClipTask, load_task
from embedded.data import DOMAINS
from studies.flags import add_recipe_flags, completed, limit_threads, new_parser
from studies.memory import add_checkpoint_flag
from studies.report import (
    SPREAD,
    Result,
    mean_and_deviation,
    percent,
    picture,
    plt,
    save,
    save_ledgers,
    table,
)

COLUMNS = ("full test", "own label mix", "full test gains", "own mix gains")


def flags(description: str) -> argparse.ArgumentParser:
    """Make a parser with the flags of a study with CLIP."""
    parser = new_parser(
        description,
        image_size=None,
        data="digits, cifar10, cifar100, or folders with train/ and test/: one for each domain",
    )
    parser.add_argument(
        "--partition",
        choices=("iid", "dirichlet", "pathological", "domain", "both"),
        default="dirichlet",
    )
    parser.add_argument(
        "--alpha",
        type=float,
        default=0.3,
        help="concentration of dirichlet and both: small is uneven",
    )
    parser.add_argument("--classes-per-client", type=int, default=2, help="of pathological")
    parser.add_argument(
        "--clients", type=int, default=5, help="domain has one for each domain, both has two"
    )
    domains = {"type": lambda names: names.split(","), "default": ["inverted"]}
    parser.add_argument("--domains", help=f"of the digits: some of {','.join(DOMAINS)}", **domains)
    parser.add_argument(
        "--smallest", type=float, default=16, help="side of the smallest digit, of 32 pixels"
    )
    parser.add_argument(
        "--largest",
        type=float,
        default=24,
        help="side of the largest digit; 32 pixels hide the clutter",
    )
    add_training_flags(parser)
    add_checkpoint_flag(parser)
    return parser


def add_training_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of training and of the model."""
    add_recipe_flags(parser)
    parser.add_argument(
        "--epochs", type=int, default=5, help="in a round, if there is no number of steps"
    )
    parser.add_argument(
        "--every",
        type=int,
        default=5,
        help="number of rounds between tests; the last round is always tested",
    )
    parser.add_argument("--num-context", type=int, default=16, help="tokens of a context")
    parser.add_argument(
        "--model", default="ViT-B-16", help="of open_clip, for other data than digits"
    )
    parser.add_argument(
        "--pretrained", help="its weights, such as openai; if not given, they are random"
    )


def prepare(args: argparse.Namespace) -> tuple[ClipTask, list[np.ndarray], argparse.Namespace]:
    """Load the task, split it over clients, and set missing flags from the task's recipe."""
    limit_threads(args)
    task = load_task(args)
    args = completed(args, task.recipe._asdict())
    if args.quick:
        args.rounds, args.steps, task = 2, 2, task._replace(test=task.test.first(100))
    return task, task.shards(args), args


class Run(NamedTuple):
    """Result of a row: clients after the last round, the tested rounds, and the measurements."""

    clients: torch.nn.ModuleList
    rounds: list[int]
    result: Result


def run(
    federate: Callable[..., tuple[torch.nn.ModuleList, dict[int, Tensor], fp.Ledger]],
    names: Sequence[str],
    args: argparse.Namespace,
) -> tuple[ClipTask, dict[str, Run]]:
    """Call `federate(name, task, shards, args)` for each name on one split of the data.

    Args:
        federate: Returns clients, accuracy (clients, cells) after some rounds, and a ledger.
        names: Names of the rows.
        args: Parsed flags; the task's recipe sets the missing ones.
    """
    task, shards, args = prepare(args)
    num_test = task.counts(task.test)
    # Cells without test images are not counted.
    holdings = np.stack([task.counts(task.train, shard) * (num_test > 0) for shard in shards])
    runs = {}
    for name in names:
        clients, history, ledger = federate(name, task, shards, args)
        runs[name] = Run(
            clients,
            list(history),
            Result(holdings, num_test, torch.stack([*history.values()]), ledger),
        )
    return task, runs


def against(runs: Sequence[Mapping[str, Run]], baseline: str) -> list[list[str]]:
    """Write the mean and deviation of `COLUMNS` over seeds for each method.

    The last two columns are differences to the baseline with the same seed.
    """
    figures = {
        name: np.array([each[name].result.spread() for each in runs])[:, [1, 3]] for name in runs[0]
    }
    lines = []
    for name, values in figures.items():
        gains = (
            ["", ""]
            if name == baseline
            else map(mean_and_deviation, (values - figures[baseline]).T)
        )
        lines.append([name, *map(mean_and_deviation, values.T), *gains])
    return lines


def summary(runs: Mapping[str, Run], out: Path) -> str:
    """Write the picture of accuracies and the ledgers to a folder, and the tables as text."""
    first = next(iter(runs.values()))
    picture(
        out / "fedotp.png",
        first.result.holdings,
        {name: each.result.over_rounds() for name, each in runs.items()},
        first.rounds,
    )
    save_ledgers({name: each.result.ledger for name, each in runs.items()}, out)
    sent = [
        [name, *(each.result.ledger.total(direction=way) for way in ("up", "down"))]
        for name, each in runs.items()
    ]
    return "\n".join(
        [
            "Accuracy after the last round, % of the full test set over clients:",
            table(
                ["method", *SPREAD],
                [[name, *map(percent, each.result.spread())] for name, each in runs.items()],
            ),
            "\nBytes sent, all clients and rounds:",
            table(["method", "up", "down"], sent),
            f"\nPictures and ledgers: {out}/",
        ]
    )


def draw_plans(
    plans: Callable[..., Mapping[float, Tensor]], task: ClipTask, result: Result, out: Path
) -> None:
    """Draw the patches that client 0 assigns to its shared and to its private context.

    One test image is of its most frequent class and one of its rarest class.

    Args:
        plans: Function called with `index=` of a test image. It returns a plan (patches, 2) for
            each mass, in units of the mass of a patch.
        task: Task that the image belongs to.
        result: Result of the run, with the classes that the client holds.
        out: Directory of the picture.
    """
    cells, held = task.cells(task.test).numpy(), result.holdings[0]
    tested = [cell for cell in np.argsort(-held, kind="stable") if cell in cells]
    figure, grid = plt.subplots(2, 7, figsize=(10, 3.2), layout="constrained")
    for axes, cell in zip(grid, (tested[0], tested[-1]), strict=True):
        index = int(np.flatnonzero(cells == cell)[0])
        image = task.look(index).float()
        name = task.names.names[int(task.test.labels[index])]
        axes[0].imshow(image.mean(0).numpy(), cmap="gray")
        axes[0].set_title(f'"{name}": {held[cell]} held', size=7)
        panels = [
            (mass, context, plan[:, context])
            for mass, plan in plans(index=index).items()
            for context in range(2)
        ]
        for axis, (mass, context, shares) in zip(axes[1:], panels, strict=True):
            shown = fp.plots.transport_plan(shares, image, axes=axis).images[1]
            shown.set_clim(0, 1)
            axis.set_title(f"{('shared', 'private')[context]}, mass {mass:g}", size=7)
    for axis in grid.flat:
        axis.set(xticks=[], yticks=[])
    figure.colorbar(shown, ax=grid, shrink=0.8).set_label("taken of each patch", size=7)
    save(figure, out / "fedotp_plans.png", dpi=100)
