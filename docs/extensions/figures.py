"""Role ``record``: figures in prose, computed from the records when the pages are built.

A page names a file of the records with a partition, one row or several, a column (the accuracy on
a client's test images, if none is named), and a form::

    {record}`mnist/deep-domains; Norms`                           88.4 ± 0.7
    {record}`mnist/deep-domains; Norms - FedVPT-D`                9.0 ± 1.2
    {record}`mnist/deep-domains; Norms - FedVPT-D; own; round`    9
    {record}`mnist/deep-domains; Norms; bytes_up; kB`             83 kB
    {record}`mnist/deep-domains; LoRA, rank 4 / Norms; bytes_up`  3.4

Differences are paired over the common seeds, and ``A - B beyond C - D`` is a difference of two of
them. Without a form, accuracies have their 95 % interval by Student's t. Commands trace the figures
of a page to their records, and fill in those of a page that Sphinx does not build::

    python docs/extensions/figures.py "mnist/deep-domains; Norms - FedVPT-D"
    python docs/extensions/figures.py docs/results/photographs.md
    python docs/extensions/figures.py --write README.md
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

RECORDS = Path(__file__).parents[1] / "results" / "records"
COUNTS = ("bytes_up", "bytes_down", "trained", "backward", "kept")
MINUS = " - | beyond "
ROLE = re.compile(r"\{record\}`([^`]+)`")
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


def keys(text: str) -> list[str]:
    """Return the keys of all figures of a text."""
    return [*ROLE.findall(text), *(mark[1] for mark in WRITTEN.findall(text))]


def role(
    name: str, rawtext: str, text: str, lineno: int, inliner: Any, *_: Any
) -> tuple[list[Any], list[Any]]:
    """Return the nodes of a figure, whose key appears under the pointer."""
    from docutils import nodes  # here, because the tests have no docutils

    try:
        found = figure(text)
    except (KeyError, ValueError, OSError) as error:
        message = f"the records have no figure {text!r}: {error!r}"
        problem = inliner.reporter.error(message, line=lineno)
        return [inliner.problematic(rawtext, rawtext, problem)], [problem]
    records = RECORDS / f"{text.split('/')[0]}.jsonl"
    inliner.document.settings.env.note_dependency(str(records))
    shown = found.replace("± ", "±\N{NO-BREAK SPACE}")  # a narrow cell breaks before it
    node = nodes.abbreviation(found, shown, explanation=text, classes=["record"])
    return [node], []


def setup(app: Any) -> dict[str, bool]:
    """Register the role."""
    app.add_role("record", role)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def main(arguments: Sequence[str]) -> None:
    """Fill in the figures of a page, or trace the figures of pages and keys."""
    if arguments[:1] == ["--write"]:
        for page in map(Path, arguments[1:]):
            page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
        return
    for each in arguments:
        page = each.endswith(".md")
        found = keys(Path(each).read_text(encoding="utf-8")) if page else [each]
        print("\n".join(map(trace, found)))


if __name__ == "__main__":
    main(sys.argv[1:])
