"""What our pages have beside the tables of `fedprompt.compare`."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from fedprompt.compare import intervals, tables
from fedprompt.compare.intervals import Figure
from fedprompt.compare.records import NAMED, Record, newest
from fedprompt.compare.rows import CONSTANT
from fedprompt.compare.runs import bits_of
from fedprompt.compare.tables import COSTS, WIDTH, View, percent, table
from studies.core import Task, content
from studies.papers import PaperRow

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PAIRS = content("pairs")
MINUS = " - | beyond "  # between the rows of a pair
COLORS = plt.get_cmap("Dark2").colors  # of the eight best points, in the legend


def view(found: Sequence[Record], task: Task, partition: str, folder: Path) -> View:
    """Return the table of a partition, with the bits of a folder.

    Columns that only the most frequent class has, beside earlier runs, are left out.
    """
    title = f"{task.title}, {task.partitions[partition]}"
    listed = [record for record in newest(found) if record["partition"] == partition]
    known = {name for record in listed if record["row"] != CONSTANT for name in record}
    same = {"compared": task.compared, "references": task.references}
    same["columns"] = {name: words for name, words in task.columns.items() if name in known}
    return View(title, partition, listed, bits=bits_of(folder, listed, {}), **same)


def quoted(shown: View, name: str, partition: str) -> list[str]:
    """Return a table of the paired differences that the pages quote, or nothing."""
    listed = PAIRS.get(name, {}).get(partition, ())
    pairs = {pair: re.split(MINUS, pair) for pair in listed}
    pairs = {pair: rows for pair, rows in pairs.items() if {*rows} <= {*shown.by_row}}
    columns = {}
    for column in dict.fromkeys((*shown.compared, *shown.columns)):
        gains = [_gain(shown, rows, column) for rows in pairs.values()]
        if gains and None not in gains:
            columns[column] = gains
    names = [*columns][: WIDTH - 1]
    body = [
        [pair, *(percent(columns[name][row], signed=True) for name in names)]
        for row, pair in enumerate(pairs)
    ]
    return [table(["difference", *(shown.columns[name] for name in names)], body)] if body else []


def _gain(shown: View, rows: Sequence[str], column: str) -> Figure | None:
    """Return A - B of two rows, or (A - B) - (C - D) of four, over their common seeds."""
    figures, seeds = [shown.figure(row, column) for row in rows], [*map(shown.seeds, rows)]
    common = sorted(set.intersection(*map(set, seeds)))
    if None in figures or not common:
        return None
    pairs = zip(figures, seeds, strict=True)
    first, second, *others = (each.at([*map(of.index, common)]) for each, of in pairs)
    return first - second - (others[0] - others[1]) if others else first - second


def save_all(found: Sequence[Record], name: str, task: Task, folder: Path, bits: Path) -> None:
    """Write a table, a CSV file and a figure for each partition, and the hyperparameters."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}-values.md").write_text(tables.hyperparameters(newest(found)) + "\n")
    for partition in dict.fromkeys(record["partition"] for record in found):
        shown, stem = view(found, task, partition, bits), f"{name}-{partition}"
        (folder / f"{stem}.md").write_text(f"{report(shown, task, partition)}\n")
        header, body = shown.lines()
        tables.write(folder / f"{stem}.csv", [header, *body])
        if all("bytes_up" in record for seeds in shown.by_row.values() for record in seeds):
            scatter(shown, folder / f"{stem}.png")


def report(shown: View, task: Task, partition: str) -> str:
    """Lay out a table, the differences that pages quote, and what a paper prints."""
    parts = [shown.text(), *quoted(shown, task.name, partition)]
    if listed := [row for row in task.rows(partition) if getattr(row, "figures", None)]:
        parts.append(printed(shown.found, listed))
    return "\n\n".join([*parts, *(f"- {choice}" for choice in task.choices(partition))])


def scatter(shown: View, path: Path) -> None:
    """Draw accuracy against bytes, with 95 % intervals. The best rows are in the legend.

    Rows that send the same bytes are drawn next to each other.
    """
    drawing, axes = plt.subplots(figsize=(9, 6), layout="constrained")
    points: dict[str, tuple[float, float]] = {}
    column = shown.compared[0]
    for rank, title in enumerate(shown.by_row):
        sent = max(30.0, shown.mean(title, "bytes_up") + shown.mean(title, "bytes_down"))
        while any(abs(np.log(sent / other)) < 0.02 for other, _ in points.values()):
            sent *= 1.025
        mean, half, _ = intervals.interval(shown.figure(title, column))
        points[title] = (sent, 100 * float(mean))
        error = 0 if np.isnan(half) else 100 * float(half)
        style = {"fmt": "o", "markersize": 5, "linewidth": 1}
        known = {"color": COLORS[rank], "label": title} if rank < len(COLORS) else {"color": "0.75"}
        axes.errorbar(*points[title], error, **known, **style)
    axes.set_xscale("log")
    axes.set(
        xlabel="bytes of a client and round, up and down (equal ones are spread; left: none)",
        ylabel=f"{shown.columns[column]}, %",
    )
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path, dpi=120)
    plt.close(drawing)


def printed(found: Sequence[Record], listed: Sequence[PaperRow]) -> str:
    """Return a table of our figures beside those that a paper prints, with the difference."""
    body = []
    for row in listed:
        for column, figure in row.figures.items():
            values = [record[column] for record in found if record["row"] == row.title]
            spread = f" ± {row.spread[column]}" if column in row.spread else ""
            missing = "not run" if row.method else "not in the gallery"
            ours = percent(Figure(np.array(values))) if values else missing
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
        gap: Any = np.abs(np.subtract(record[name], again.get(name, np.nan)))
        if not np.all(gap <= bound * (not same)):  # NaN is a difference, too
            found.append(f"{name} {record[name]}, now {again.get(name, 'missing')}")
    return sorted(found)


UNCOMPARED = {"task", *NAMED, "stamp", "clients", "shrink", "inputs", "commit", "version", "torch"}
UNCOMPARED |= {"processor", "date"}
