"""Figures in prose: computed from the records, and written between comments of a page.

A page names a file of the records with a partition, one row or several, a column (the accuracy on
a client's test images, if none is named), and a form. ``python docs/write_pages.py`` writes the
figure between the comments::

    <!-- record mnist/deep-domains; Norms -->88.4 ± 0.7<!-- end -->
    <!-- record mnist/deep-domains; Norms - FedVPT-D -->9.0 ± 1.2<!-- end -->
    <!-- record mnist/deep-domains; Norms - FedVPT-D; own; round -->9<!-- end -->
    <!-- record mnist/deep-domains; Norms; bytes_up; kB -->83 kB<!-- end -->
    <!-- record mnist/deep-domains; LoRA, rank 4 / Norms; bytes_up -->3.4<!-- end -->

Differences are paired over the common seeds, and ``A - B beyond C - D`` is a difference of two of
them. Without a form, accuracies have their 95 % interval by Student's t. A command traces figures,
or all figures of a page, to their records::

    python docs/figures.py "mnist/deep-domains; Norms - FedVPT-D"
    python docs/figures.py docs/results/photographs.md
"""

import json
import re
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

RECORDS = Path(__file__).parent / "results" / "records"
COUNTS = ("bytes_up", "bytes_down", "trained", "backward", "kept")
MINUS = " - | beyond "
WRITTEN = re.compile(r"(<!-- record (.*?) -->).*?(<!-- end -->)")


@cache
def runs(name: str) -> dict[tuple[str, str], dict[int, dict[str, Any]]]:
    """Return the reported runs of a file by partition and row, and by seed."""
    found: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    with (RECORDS / f"{name}.jsonl").open(encoding="utf-8") as file:
        for line, text in enumerate(file, 1):
            run = json.loads(text) | {"line": line}
            if run["trial"] is None:
                seeds = found.setdefault((run["partition"], run["row"]), {})
                seeds[run["seed"]] = run
    return found


def parts(key: str) -> tuple[list[dict[int, dict[str, Any]]], str, str, bool]:
    """Return the runs of each row of a key, its column, its form, and if it is a ratio."""
    place, rows, *rest = key.split("; ")
    column, form = (*rest, *("own", "")[len(rest) :])
    name, partition = place.split("/")
    ratio = " / " in rows
    titles = rows.split(" / ") if ratio else re.split(MINUS, rows)
    return [runs(name)[partition, title] for title in titles], column, form, ratio


def values(key: str) -> dict[int, list[float]]:
    """Return the figures of each row of a key by seed, for the seeds that all rows have."""
    rows, column, *_ = parts(key)
    common = [seed for seed in sorted(rows[0]) if all(seed in row for row in rows)]
    return {seed: [row[seed][column] for row in rows] for seed in common}


def figure(key: str) -> str:
    """Return the figure that a key names."""
    rows, column, form, ratio = parts(key)
    by_seed = np.array([*values(key).values()], dtype=float)
    if ratio:
        one, other = by_seed.mean(0)
        return f"{one / other:,.{0 if form == 'round' else 1}f}"
    found = by_seed @ np.array([1, -1, -1, 1])[: len(rows)]
    if column in COUNTS:
        return FORMS[form or "count"](found)
    return FORMS[form or "interval"](100 * found)


def interval(found: Sequence[float], sign: str = "") -> str:
    """Write a mean with half of its 95 % interval."""
    half = stats.t.ppf(0.975, len(found) - 1) * stats.sem(found)
    return f"{np.mean(found):{sign}z.1f} ± {half:.1f}"


FORMS: dict[str, Callable[[Any], str]] = {
    "interval": interval,
    "signed": lambda found: interval(found, "+"),
    "mean": lambda found: f"{np.mean(found):z.1f}",
    "round": lambda found: f"{np.mean(found):z.0f}",
    "count": lambda found: f"{np.mean(found):,.0f}",
    "kB": lambda found: f"{np.mean(found) / 1e3:,.0f} kB",
    "MB": lambda found: f"{np.mean(found) / 1e6:,.0f} MB",
}


def trace(key: str) -> str:
    """Describe the runs behind a figure: the file, its lines, seeds, values and commits."""
    rows, column, *_ = parts(key)
    name = key.split("/")[0]
    lines = [f"{figure(key)}    {key}"]
    for seed in values(key):
        found = [row[seed] for row in rows]
        shown = ", ".join(
            f"{run[column]} (line {run['line']}, commit {run.get('commit', 'unknown')})"
            for run in found
        )
        lines.append(f"    {name}.jsonl, seed {seed}: {shown}")
    return "\n".join(lines)


def filled(text: str) -> str:
    """Return a text with new figures between ``<!-- record KEY -->`` and ``<!-- end -->``."""
    return WRITTEN.sub(lambda mark: f"{mark[1]}{figure(mark[2])}{mark[3]}", text)


def main(arguments: Sequence[str]) -> None:
    """Trace the figures of pages and keys."""
    for each in arguments:
        found = [each]
        if each.endswith(".md"):
            found = [
                mark[1]
                for mark in WRITTEN.findall(Path(each).read_text(encoding="utf-8"))
            ]
        print("\n".join(map(trace, found)))


if __name__ == "__main__":
    main(sys.argv[1:])
