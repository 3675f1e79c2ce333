"""Picture of a comparison: bars with intervals, dots for clients, a line for the constant."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from fedprompt.compare import intervals
from fedprompt.compare.records import Record
from fedprompt.compare.rows import ALONE, CONSTANT
from fedprompt.compare.tables import View

BAR, REFERENCE, DOT, LINE = "#4c72b0", "#b8bec7", "#1f2d3d", "#c44e52"


def bars(views: Sequence[View], path: Path) -> None:
    """Draw the compared column and all tests of each table, the best row first, and save it."""
    sides = [(view, column) for view in views for column in _columns(view)]
    tallest = max(len(view.by_row) for view in views)
    size = 6 * len(sides), 1.2 + 0.5 * tallest
    figure = Figure(figsize=size, layout="constrained")
    every = figure.subplots(1, len(sides), squeeze=False)[0]
    for axes, (view, column) in zip(every, sides, strict=True):
        _draw(axes, view, column)
    figure.savefig(path, dpi=150)


def _columns(view: View) -> list[str]:
    return list(dict.fromkeys([view.compared[0], *({"full"} & view.columns.keys())]))


def _draw(axes: Any, view: View, column: str) -> None:
    titles = [title for title in view.by_row if title != CONSTANT]
    for place, title in enumerate(titles):
        found = view.figure(title, column)
        if found is None:
            continue
        mean, half, _ = intervals.interval(found)
        error = 100 * float(half) if len(found.values) > 2 else None
        known = [each for titles in view.references.values() for each in titles]
        alone = title in known or title.startswith(ALONE.title)
        look = {"color": REFERENCE if alone else BAR, "height": 0.6}
        axes.barh(place, 100 * float(mean), xerr=error, capsize=3, **look)
        dots = list(of_clients(view.by_row[title], column).values())
        axes.plot(dots, [place] * len(dots), "o", color=DOT, markersize=3, alpha=0.5)
    constant = view.figure(CONSTANT, column) if CONSTANT in view.by_row else None
    if constant is not None:
        axes.axvline(
            100 * constant.values.mean(), color=LINE, linestyle="--", label=CONSTANT.lower()
        )
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), frameon=False)
    axes.set_yticks(range(len(titles)), titles)
    axes.invert_yaxis()
    axes.set(xlabel=f"{view.columns[column]}, %", title=view.partition)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def of_clients(seeds: Sequence[Record], column: str) -> dict[str, float]:
    """Return the mean over seeds of each client, in percent; of its own tests where it has any."""
    found: dict[str, list[float]] = {}
    for record in seeds:
        for client, figures in record.get("clients", {}).items():
            value = figures.get(column, figures.get("own", figures.get("full")))
            if value is not None:
                found.setdefault(client, []).append(100 * value)
    return {client: sum(values) / len(values) for client, values in found.items()}
