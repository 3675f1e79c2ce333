"""What our pages have beside the tables of `fedprompt.compare`."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from fedprompt.compare import tables
from fedprompt.compare.problems import COSTS, Problem, Record
from fedprompt.compare.records import NAMED
from fedprompt.compare.tables import (
    WIDTH,
    gains,
    grouped,
    interval,
    mean,
    percent,
    ranked,
    table,
    vague,
)
from tasks.core import Task, content
from tasks.papers import PaperRow

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PAIRS = content("pairs")
MINUS = " - | beyond "  # between the rows of a pair
COLORS = plt.get_cmap("Dark2").colors  # of the eight best points, in the legend


def quoted(found: Sequence[Record], task: Problem, partition: str) -> list[str]:
    """Return a table of the paired differences that the pages quote, or nothing."""
    by_row, listed = grouped(found, partition), PAIRS.get(found[0]["task"], {}).get(partition, ())
    pairs = {pair: [by_row.get(row, []) for row in re.split(MINUS, pair)] for pair in listed}
    pairs = {pair: sides for pair, sides in pairs.items() if all(sides)}
    compared = [record for sides in pairs.values() for seeds in sides for record in seeds]
    names = dict.fromkeys((*task.compared, *task.columns))
    columns = {
        name: [gains(name, *sides) for sides in pairs.values()]
        for name in names
        if all(name in record for record in compared)
    }
    names = [name for name in columns if name in task.compared or not vague(name, columns[name])]
    names = names[: WIDTH - 1]
    body = [
        [pair, *(percent(columns[name][row], signed=True) for name in names)]
        for row, pair in enumerate(pairs)
    ]
    return [table(["difference", *(task.columns[name] for name in names)], body)] if body else []


def save_all(found: Sequence[Record], name: str, task: Problem, folder: Path) -> None:
    """Write a table, a CSV file and a figure for each partition, and the hyperparameters."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}-values.md").write_text(tables.hyperparameters(found) + "\n")
    for partition in dict.fromkeys(record["partition"] for record in found):
        tables.save(found, folder / f"{name}-{partition}", task, partition)
        by_row = grouped(found, partition)
        if all("bytes_up" in record for seeds in by_row.values() for record in seeds):
            scatter(by_row, task, folder / f"{name}-{partition}.png")


def scatter(by_row: Mapping[str, Sequence[Record]], task: Problem, path: Path) -> None:
    """Draw accuracy against bytes, with 95 % intervals over seeds. The best rows are in the legend.

    Rows that send the same bytes are drawn next to each other.
    """
    drawing, axes = plt.subplots(figsize=(9, 6), layout="constrained")
    points: dict[str, tuple[float, float]] = {}
    column = task.compared[0]
    for rank, (title, seeds) in enumerate(ranked(by_row, task).items()):
        sent = max(30.0, mean(seeds, "bytes_up") + mean(seeds, "bytes_down"))
        while any(abs(np.log(sent / other)) < 0.02 for other, _ in points.values()):
            sent *= 1.025
        scores = [100 * record[column] for record in seeds]
        points[title] = (sent, float(np.mean(scores)))
        error = interval(scores) if len(scores) > 2 else 0
        style = {"fmt": "o", "markersize": 5, "linewidth": 1}
        known = {"color": COLORS[rank], "label": title} if rank < len(COLORS) else {"color": "0.75"}
        axes.errorbar(*points[title], error, **known, **style)
    axes.set_xscale("log")
    axes.set(
        xlabel="bytes of a client and round, up and down (equal ones are spread; left: none)",
        ylabel=f"{task.columns[column]}, %",
    )
    axes.legend()
    save(drawing, path)


def save(figure: plt.Figure, path: Path) -> None:
    """Write a figure to a PNG file, and close it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def notes(task: Any, found: Sequence[Record], partition: str) -> list[str]:
    """Return the differences that pages quote, a recommendation, and what a paper prints."""
    parts = quoted(found, task, partition)
    if task.advice and any(record["trial"] is None for record in found):
        parts.append(task.advice(found, partition))
    if listed := [row for row in task.rows(partition) if getattr(row, "figures", None)]:
        parts.append(printed(found, listed))
    return [*parts, "\n".join(f"- {choice}" for choice in task.choices(partition))]


def printed(found: Sequence[Record], listed: Sequence[PaperRow]) -> str:
    """Return a table of our figures beside those that a paper prints, with the difference."""
    body = []
    for row in listed:
        for column, figure in row.figures.items():
            values = [record[column] for record in found if record["row"] == row.title]
            spread = f" ± {row.spread[column]}" if column in row.spread else ""
            missing = "not run" if row.method else "not in the gallery"
            ours = percent(values) if values else missing
            gap = f"{100 * np.mean(values) - figure:+.1f}" if values else ""
            body.append([row.title, column, f"{figure}{spread}", ours, gap])
    return table(["row", "column", "paper, %", "ours, %", "difference"], body)


def differences(record: Record, again: Record, task: Task) -> list[str]:
    """Describe the figures of a new run that a record has otherwise.

    They must be the same with the same processor and version of torch. Otherwise, accuracies may
    differ by the bound of the task, and bytes by 1 %: FedHPL sends logits of correct classes.
    """
    same = all(record.get(name) == again.get(name) for name in ("processor", "torch"))
    found = []
    for name in record.keys() - UNCOMPARED:
        bound = record[name] / 100 * name.startswith("bytes") if name in COSTS else task.bound
        gap = np.abs(np.subtract(record[name], again.get(name, np.nan)))
        if not np.all(gap <= bound * (not same)):  # NaN is a difference, too
            found.append(f"{name} {record[name]}, now {again.get(name, 'missing')}")
    return sorted(found)


UNCOMPARED = {*NAMED, "shrink", "inputs", "commit", "version", "torch", "processor", "date"}
