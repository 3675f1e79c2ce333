"""The picture of a comparison: a bar for each row, with its interval, and a dot for each client."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from fedprompt.compare.problems import Problem, Record
from fedprompt.compare.tables import grouped, interval, ranked

BAR, REFERENCE, DOT = "#4c72b0", "#b8bec7", "#1f2d3d"


def bars(views: Mapping[str, tuple[Sequence[Record], Problem]], path: Path) -> None:
    """Draw the compared column of each table, the best row first, and save the picture."""
    tallest = max(len(grouped(found, name)) for name, (found, _) in views.items())
    size = 7 * len(views), 1.2 + 0.5 * tallest
    figure = Figure(figsize=size, layout="constrained")
    every = figure.subplots(1, len(views), squeeze=False)[0]
    for axes, (name, (found, problem)) in zip(every, views.items(), strict=True):
        column = problem.compared[0]
        by_row = ranked(grouped(found, name), problem)
        references = {title for titles in problem.references.values() for title in titles}
        for place, (title, seeds) in enumerate(by_row.items()):
            scores = [100 * record[column] for record in seeds]
            half = interval(scores) if len(scores) > 2 else None
            look = {"color": REFERENCE if title in references else BAR, "height": 0.6}
            axes.barh(place, float(np.mean(scores)), xerr=half, capsize=3, **look)
            dots = list(of_clients(seeds, column).values())
            axes.plot(dots, [place] * len(dots), "o", color=DOT, markersize=3, alpha=0.5)
        axes.set_yticks(range(len(by_row)), list(by_row))
        axes.invert_yaxis()
        axes.set(xlabel=f"{problem.columns[column]}, %", title=problem.partitions[name])
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
    figure.savefig(path, dpi=150)


def of_clients(seeds: Sequence[Record], column: str) -> dict[str, float]:
    """Return the mean over seeds of each client, in percent; of its own tests where it has any."""
    found: dict[str, list[float]] = {}
    for record in seeds:
        for client, figures in record.get("clients", {}).items():
            value = figures.get(column, figures.get("own", figures.get("full")))
            if value is not None:
                found.setdefault(client, []).append(100 * value)
    return {client: float(np.mean(values)) for client, values in found.items()}
