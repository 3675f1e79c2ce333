"""Tables, CSV files and figures, from records."""

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path

import matplotlib
import numpy as np
from scipy import stats

from tasks.core import COSTS, Row, Task, TaskError, content
from tasks.records import NAMED, Record

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.text import Text
from matplotlib.transforms import Bbox

WIDTH = 7  # columns of a table; the others follow in further ones
FEWEST = 5  # seeds of a star or a recommendation
WIDEST = 0.1  # half of an interval of an accuracy, beyond which a column says little
OTHERS = ("noise", "rise")  # percentages that are no accuracies
PAIRS = content("pairs")
MINUS = " - | beyond "  # between the rows of a pair
COLORS = plt.get_cmap("Dark2").colors  # of the eight points with a label


def grouped(found: Iterable[Record], partition: str) -> dict[str, list[Record]]:
    """Return the reported records of a partition by row, in the order of seeds.

    Raises:
        TaskError: If the seeds of a row have different values.
    """
    by_row: dict[str, list[Record]] = {}
    for record in sorted(found, key=lambda record: record["seed"]):
        if record["partition"] == partition and record["trial"] is None:
            seeds = by_row.setdefault(record["row"], [])
            if any(seeds and seeds[0].get(of) != record.get(of) for of in ("values", "inputs")):
                what = f"Seeds of {record['row']!r} in {partition!r} differ in values or inputs"
                raise TaskError(f"{what}: delete the records of one choice.")
            seeds.append(record)
    return by_row


def interval(values: Sequence[float]) -> float:
    """Return half of the 95 % interval of a mean, by Student's t."""
    size = len(values)
    return float(stats.t.ppf(0.975, size - 1) * np.std(values, ddof=1) / size**0.5)


def percent(values: Sequence[float], *, signed: bool = False) -> str:
    """Write the mean in percent, with its 95 % interval if there are three values or more."""
    scaled = [100 * value for value in values]
    mean = f"{np.mean(scaled):{'+' if signed else ''}z.1f}"
    return mean if len(scaled) < 3 else f"{mean} ± {interval(scaled):.1f}"


def gains(column: str, *rows: Sequence[Record]) -> list[float]:
    """Return A - B of a column over the common seeds of two rows, (A - B) - (C - D) of four."""
    values = [{record["seed"]: record[column] for record in seeds} for seeds in rows]
    common = [seed for seed in values[0] if all(seed in others for others in values)]
    signed = [*zip(values, (1, -1, -1, 1), strict=False)]
    return [sum(sign * of[seed] for of, sign in signed) for seed in common]


def differences_to(
    by_row: Mapping[str, Sequence[Record]], titles: Sequence[str], column: str
) -> list[str]:
    """Write the paired difference of each row to a reference, "" for the reference itself.

    Of several references, it is the one with as many backward passes as the row, or the next. A
    star marks the differences that hold after Holm's correction for the rows of the column.
    """
    references = sorted((by_row[title] for title in titles if title in by_row), key=passes)
    found = []
    for seeds in by_row.values():
        enough = [other for other in references if passes(other) > passes(seeds) - 0.5]
        chosen = [] if any(seeds is other for other in references) else enough or references[-1:]
        found.append(gains(column, seeds, chosen[0]) if chosen else [])
    tested = [differences for differences in found if len(differences) >= FEWEST]
    stars = iter(holm([float(stats.ttest_1samp(values, 0).pvalue) for values in tested]))
    return [
        percent(values, signed=True) + (" *" if len(values) >= FEWEST and next(stars) else "")
        if values
        else ""
        for values in found
    ]


def passes(seeds: Sequence[Record]) -> float:
    """Return the mean number of backward passes, 0 if there is none."""
    return mean(seeds, "backward") if all("backward" in record for record in seeds) else 0.0


def holm(p_values: Sequence[float], level: float = 0.05) -> list[bool]:
    """Return which hypotheses the step-down procedure of Holm (1979) rejects."""
    rejected = [False] * len(p_values)
    for rank, place in enumerate(np.argsort(p_values)):
        if not p_values[place] <= level / (len(p_values) - rank):  # it is NaN if all are equal
            break
        rejected[place] = True
    return rejected


def rows(found: Sequence[Record], task: Task, partition: str) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of a table, the highest of the compared column first.

    The compared column and its differences come first, and the costs last, with the numbers of
    seeds if they differ. Empty columns are left out, and so are vague ones that are not compared.
    """
    by_row = ranked(grouped(found, partition), task)
    header, body = ["row"], [list(by_row)]
    for name in dict.fromkeys((*task.compared, *task.columns)):
        columns = [measured(seeds, name) for seeds in by_row.values()]
        if name not in task.compared and vague(name, columns):
            continue
        header.append(task.columns[name])
        body.append([percent(values) if values else "" for values in columns])
        for word, titles in task.references.items() if name in task.compared else ():
            header.append(f"{task.columns[name]}, to {word}")
            body.append(differences_to(by_row, titles, name))
    for name, word in COSTS.items():
        header.append(word)
        every = by_row.values()
        body.append([f"{mean(seeds, name):,.0f}" if name in seeds[0] else "" for seeds in every])
    counts = [str(len(seeds)) for seeds in by_row.values()]
    if len({*counts}) > 1:
        header.append("seeds")
        body.append(counts)
    filled = [(word, cells) for word, cells in zip(header, body, strict=True) if any(cells)]
    header, body = map(list, zip(*filled, strict=True))
    return header, [list(cells) for cells in zip(*body, strict=True)]


def measured(seeds: Sequence[Record], name: str) -> list[float]:
    """Return a figure of all seeds, or nothing if one of them lacks it."""
    values = [record[name] for record in seeds if name in record]
    return values if len(values) == len(seeds) else []


def vague(name: str, columns: Iterable[Sequence[float]]) -> bool:
    """Whether most rows of a column of accuracies have an interval beyond 10 points."""
    wide = [interval(values) > WIDEST for values in columns if len(values) > 2]
    return name not in OTHERS and sum(wide) > len(wide) / 2


def ranked(by_row: Mapping[str, Sequence[Record]], task: Task) -> dict[str, Sequence[Record]]:
    """Sort rows by the mean of the compared column, the highest first."""
    column = task.compared[0]
    return dict(sorted(by_row.items(), key=lambda item: -mean(item[1], column)))


def mean(seeds: Sequence[Record], name: str) -> float:
    """Average a figure over seeds."""
    return float(np.mean([record[name] for record in seeds]))


def table(header: Sequence[str], body: Sequence[Sequence[object]]) -> str:
    """Lay out rows as a Markdown table, the first column to the left, the others to the right."""
    cells = [[str(cell) for cell in row] for row in (header, *body)]
    first, *widths = (max(map(len, column)) for column in zip(*cells, strict=True))
    rule = ["-" * first, *("-" * (width - 1) + ":" for width in widths)]
    lines = [[row[0].ljust(first), *map(str.rjust, row[1:], widths)] for row in cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in (lines[0], rule, *lines[1:]))


def titled(found: Sequence[Record], task: Task, partition: str) -> str:
    """Lay out a partition as a table with a title, which names seeds and a shrunk run."""
    by_row = grouped(found, partition)
    counts = sorted({len(seeds) for seeds in by_row.values()})
    shares = {record.get("shrink", 1) for seeds in by_row.values() for record in seeds}
    shrunk = "".join(f", {share:g} of the rounds and images" for share in shares - {1})
    seeds = " or ".join(map(str, counts))
    title = f"{task.title}, {task.partitions[partition]}, {seeds} seeds{shrunk}"
    header, body = rows(found, task, partition)
    sent = [header.index(COSTS["bytes_up"])] if COSTS["bytes_up"] in header else []
    first = sorted({*range(min(WIDTH - len(sent), len(header))), *sent})
    rest = [place for place in range(len(header)) if place not in first]
    further = [[0, *rest[at : at + WIDTH - 1]] for at in range(0, len(rest), WIDTH - 1)]
    parts = [
        table([header[at] for at in places], [[line[at] for at in places] for line in body])
        for places in (first, *further)
    ]
    return "\n\n".join([title, *parts])


def quoted(found: Sequence[Record], task: Task, partition: str) -> list[str]:
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


def hyperparameters(found: Sequence[Record]) -> str:
    """Return the table of the values of each row, and where it has them, if they are not all."""
    where = dict[tuple[str, str], dict[str, None]]()
    for record in found:
        if record["trial"] is None:
            chosen = ", ".join(f"{name} {value}" for name, value in record["values"].items())
            where.setdefault((record["row"], chosen), {})[record["partition"]] = None
    several = {row for row, chosen in where if sum(row == other for other, _ in where) > 1}
    body = [
        [f"{row} ({', '.join(partitions)})" if row in several else row, chosen]
        for (row, chosen), partitions in where.items()
    ]
    return table(["row", "hyperparameters"], body)


def save_all(found: Sequence[Record], name: str, task: Task, folder: Path) -> None:
    """Write a table, a CSV file and a figure for each partition, and the hyperparameters."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}-values.md").write_text(hyperparameters(found) + "\n")
    for partition in dict.fromkeys(record["partition"] for record in found):
        stem = folder / f"{name}-{partition}"
        header, body = rows(found, task, partition)
        stem.with_suffix(".md").write_text(report(found, task, partition) + "\n")
        with stem.with_suffix(".csv").open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([header, *body])
        by_row = grouped(found, partition)
        if all("bytes_up" in record for seeds in by_row.values() for record in seeds):
            scatter(by_row, task, stem.with_suffix(".png"))


def scatter(by_row: Mapping[str, Sequence[Record]], task: Task, path: Path) -> None:
    """Draw accuracy against bytes, with 95 % intervals over seeds. The best rows have a label.

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
        color = COLORS[rank] if rank < len(COLORS) else "0.75"
        axes.errorbar(*points[title], error, color=color, **style)
    axes.set_xscale("log")
    axes.set(
        xlabel="bytes of a client and round, up and down (equal ones are spread; left: none)",
        ylabel=f"{task.columns[column]}, %",
    )
    label(axes, points)
    save(drawing, path)


def label(axes: plt.Axes, points: Mapping[str, tuple[float, float]]) -> None:
    """Write the titles of the first points near them, where no point and no other title is."""
    axes.figure.draw_without_rendering()
    places = axes.transData.transform(list(points.values()))
    taken = [Bbox.from_extents(x - 6, y - 6, x + 6, y + 6) for x, y in places]
    shifts = sorted(product((10, -10, 30, -30, 60, -60), range(-150, 151, 5)), key=np.linalg.norm)
    line = {"arrowstyle": "-", "color": "0.5", "linewidth": 0.5}
    style = {"textcoords": "offset points", "va": "center", "fontsize": 9, "arrowprops": line}
    for (title, point), color in zip(points.items(), COLORS, strict=False):
        text = axes.annotate(title, point, shifts[0], color=color, **style)
        text.set_in_layout(False)  # the axes keep their place
        for shift in shifts:
            text.set(position=shift, horizontalalignment="left" if shift[0] > 0 else "right")
            text.update_positions(axes.figure.canvas.get_renderer())
            box = Text.get_window_extent(text)  # without the line
            inside = Bbox.intersection(box, axes.bbox)
            if not box.count_overlaps(taken) and np.array_equal(inside, box):
                break
        taken.append(box)


def save(figure: plt.Figure, path: Path) -> None:
    """Write a figure to a PNG file, and close it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def report(found: Sequence[Record], task: Task, partition: str) -> str:
    """Lay out a partition, the figures of its paper, and what the paper leaves open."""
    found = [record for record in found if record["partition"] == partition]
    parts = [titled(found, task, partition), *quoted(found, task, partition)]
    if task.advice and any(record["trial"] is None for record in found):
        parts.append(task.advice(found, partition))
    if listed := [row for row in task.rows(partition) if row.figures]:
        parts.append(printed(found, listed))
    choices = "\n".join(f"- {choice}" for choice in task.choices(partition))
    return "\n\n".join([*parts, choices]).strip()


def printed(found: Sequence[Record], listed: Sequence[Row]) -> str:
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
