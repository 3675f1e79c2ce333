"""What our pages have beside the tables of `fedprompt.compare`."""

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from fedprompt.compare import Results
from studies.core import Row, Study, content

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PAIRS = content("pairs")
MINUS = " - | beyond "  # between the rows of a pair
WIDTH = 7  # columns of a table
COLORS = plt.get_cmap("Dark2").colors  # of the eight best points, in the legend
CONSTANT = "Most frequent class"


def view(found: Results, study: Study, partition: str) -> Any:
    """Return the table of a partition.

    Columns that only the most frequent class has, beside earlier runs, are left out.
    """
    listed = [record for record in found.found if record["partition"] == partition]
    known = {name for record in listed if record["row"] != CONSTANT for name in record}
    columns = {name: words for name, words in study.columns.items() if name in known}
    words = {**study.words, "columns": columns, "partitions": study.partitions}
    return replace(found, found=listed, **words).views()[partition]


def quoted(shown: Any, name: str, partition: str) -> list[str]:
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
        [pair, *(columns[name][row].percent(signed=True) for name in names)]
        for row, pair in enumerate(pairs)
    ]
    return [table(["difference", *(shown.columns[name] for name in names)], body)] if body else []


def _gain(shown: Any, rows: Sequence[str], column: str) -> Any:
    """Return A - B of two rows, or (A - B) - (C - D) of four, over their common seeds."""
    figures, seeds = [shown.figure(row, column) for row in rows], [*map(shown.seeds, rows)]
    common = sorted(set.intersection(*map(set, seeds)))
    if None in figures or not common:
        return None
    pairs = zip(figures, seeds, strict=True)
    first, second, *others = (each.at([*map(of.index, common)]) for each, of in pairs)
    return first - second - (others[0] - others[1]) if others else first - second


def save(found: Results, stem: str, study: Study, folder: Path) -> None:
    """Write a table, a CSV file and a figure for each partition, and the hyperparameters."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{stem}-values.md").write_text(f"{found.hyperparameters()}\n")
    for partition in dict.fromkeys(record["partition"] for record in found.found):
        shown, file = view(found, study, partition), f"{stem}-{partition}"
        (folder / f"{file}.md").write_text(f"{report(shown, stem, study, partition)}\n")
        header, body = shown.lines()
        with (folder / f"{file}.csv").open("w", newline="", encoding="utf-8") as lines:
            csv.writer(lines, lineterminator="\n").writerows([header, *body])
        if all("bytes_up" in record for seeds in shown.by_row.values() for record in seeds):
            scatter(shown, folder / f"{file}.png")


def report(shown: Any, name: str, study: Study, partition: str) -> str:
    """Lay out a table, the differences that pages quote, and what a paper prints."""
    parts = [shown.text(), *quoted(shown, re.sub("-(shrunk|defaults)$", "", name), partition)]
    if listed := [row for row in study.rows(partition) if getattr(row, "figures", None)]:
        parts.append(printed(shown, listed))
    return "\n\n".join([*parts, *(f"- {choice}" for choice in study.choices(partition))])


def scatter(shown: Any, path: Path) -> None:
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
        mean, half, _ = shown.figure(title, column).interval()
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
    drawing.savefig(path, dpi=120)
    plt.close(drawing)


def printed(shown: Any, listed: Sequence[Any]) -> str:
    """Return a table of our figures beside those that a paper prints, with the difference."""
    body = []
    for row in listed:
        for column, figure in row.figures.items():
            found = shown.figure(row.title, column) if row.title in shown.by_row else None
            spread = f" ± {row.spread[column]}" if column in row.spread else ""
            ours = "not run" if row.method else "not in the gallery"
            gap = ""
            if found is not None:
                ours, gap = found.percent(), f"{100 * found.values.mean() - figure:+.1f}"
            body.append([row.title, column, f"{figure}{spread}", ours, gap])
    return table(["row", "column", "paper, %", "ours, %", "difference"], body)


def hours(name: str, study: Study, rows: Mapping[str, Sequence[Row]], seeds: int) -> str:
    """Lay out the runs and hours of the rows of each partition."""
    body = []
    for partition, chosen in rows.items():
        spent = [study.hours(partition, row) for row in chosen]
        total = None if None in spent else sum(spent) * seeds
        body.append([partition, len(chosen), seeds * len(chosen), _short(total)])
    of = "one seed" if seeds == 1 else f"{seeds} seeds"
    found = table([name, "rows", "runs", "hours"], body)
    return f"{found}\n\nHours are arithmetic for {of}, of {study.processor}."


def _short(hours: float | None) -> str:
    if hours is None:
        return "not known"
    return f"{hours:.0f}" if hours >= 10 else f"{hours:.1f}" if hours >= 1 else f"{hours:.2f}"


def table(header: Sequence[str], body: Sequence[Sequence[object]]) -> str:
    """Lay out rows as a Markdown table, the first column to the left, the others to the right."""
    cells = [list(map(str, row)) for row in (header, *body)]
    first, *widths = (max(map(len, column)) for column in zip(*cells, strict=True))
    rule = ["-" * first, *("-" * (width - 1) + ":" for width in widths)]
    lines = [[row[0].ljust(first), *map(str.rjust, row[1:], widths)] for row in cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in (lines[0], rule, *lines[1:]))


def differences(record: dict[str, Any], again: dict[str, Any], study: Study) -> list[str]:
    """Describe the figures of a new run that a record has otherwise.

    They must be the same with the same processor and version of torch. Otherwise, accuracies may
    differ by the bound of the study, and bytes by 1 %: FedHPL sends logits of correct classes.
    """
    same = all(record.get(name) == again.get(name) for name in ("processor", "torch"))
    found = []
    for name in record.keys() - UNCOMPARED:
        bound = record[name] / 100 * name.startswith("bytes") if name in COSTS else study.bound
        gap: Any = np.abs(np.subtract(record[name], again.get(name, np.nan)))
        if not np.all(gap <= bound * (not same)):  # NaN is a difference, too
            found.append(f"{name} {record[name]}, now {again.get(name, 'missing')}")
    return sorted(found)


COSTS = {"bytes_up", "bytes_down", "trained", "backward", "kept"}
UNCOMPARED = {"task", "partition", "row", "seed", "trial", "values", "stamp", "run", "clients"}
UNCOMPARED |= {"shrink", "inputs", "commit", "version", "torch", "processor", "date"}
