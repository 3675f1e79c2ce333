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
them. Without a form, accuracies have the 95 % interval of the tables. A count is of the published
methods that gain over training alone, with a star in the tables of one or more partitions::

    <!-- count networks/few, clip/few -->16 of 36<!-- end -->
    <!-- count networks/few, clip/few; gains -->16<!-- end -->

A command traces figures, or all figures of a page, to their records::

    python docs/figures.py "mnist/deep-domains; Norms - FedVPT-D"
    python docs/figures.py docs/results/photographs.md
"""

import csv
import json
import re
import sys
from collections.abc import Callable, Sequence
from functools import cache, reduce
from operator import sub
from pathlib import Path
from typing import Any

from fedprompt.compare import records
from fedprompt.compare.intervals import Figure
from fedprompt.compare.runs import bits_of
from fedprompt.compare.tables import COSTS, View
from fedprompt.methods import METHODS

RECORDS = Path(__file__).parent / "results" / "records"
MINUS = " - | beyond "
TABLES = RECORDS.with_name("tables")
WRITTEN = re.compile(r"(<!-- (record|count) (.*?) -->).*?(<!-- end -->)")


@cache
def view(name: str, partition: str) -> View:
    """Return the table of a partition, of which each record has its line in the file."""
    text = (RECORDS / f"{name}.jsonl").read_text(encoding="utf-8")
    found = map(
        json.loads, text.splitlines()
    )  # not all are of a comparison, with values
    lines = [
        {"values": {}} | each | {"line": line} for line, each in enumerate(found, 1)
    ]
    listed = [
        record for record in records.newest(lines) if record["partition"] == partition
    ]
    columns = dict.fromkeys((name for record in listed for name in record), "")
    bits = bits_of(RECORDS / name, listed, {})
    return View(name, partition, listed, columns, ["own"], bits)


def parts(key: str) -> tuple[View, list[str], str, str, bool]:
    """Return the table of a key, its rows, column and form, and if it is a ratio."""
    place, rows, *rest = key.split("; ")
    column, form = (*rest, *("own", "")[len(rest) :])
    ratio = " / " in rows
    titles = rows.split(" / ") if ratio else re.split(MINUS, rows)
    return view(*place.split("/")), titles, column, form, ratio


def sides(key: str) -> tuple[list[int], list[Figure]]:
    """Return the seeds that all rows of a key have, and the figure of each row for them."""
    shown, titles, column, *_ = parts(key)
    seeds = [shown.seeds(title) for title in titles]
    common = [seed for seed in seeds[0] if all(seed in of for of in seeds)]
    found = [shown.figure(title, column) for title in titles]
    if None in found:
        raise KeyError(key)
    return common, [
        figure.at([of.index(seed) for seed in common])
        for figure, of in zip(found, seeds, strict=True)
    ]


def figure(key: str) -> str:
    """Return the figure that a key names."""
    _, found = sides(key)
    *_, column, form, ratio = parts(key)
    if ratio:
        one, other = (float(side.values.mean()) for side in found)
        return f"{one / other:,.{0 if form == 'round' else 1}f}"
    pairs = [reduce(sub, found[at : at + 2]) for at in range(0, len(found), 2)]
    usual = "count" if column in COSTS else "interval"
    return FORMS[form or usual](reduce(sub, pairs))


FORMS: dict[str, Callable[[Any], str]] = {
    "interval": lambda found: found.percent(),
    "signed": lambda found: found.percent(signed=True),
    "mean": lambda found: f"{100 * found.values.mean():z.1f}",
    "round": lambda found: f"{100 * found.values.mean():z.0f}",
    "count": lambda found: f"{found.values.mean():,.0f}",
    "kB": lambda found: f"{found.values.mean() / 1e3:,.0f} kB",
    "MB": lambda found: f"{found.values.mean() / 1e6:,.0f} MB",
}


def count(key: str) -> str:
    """Count the methods of the gallery that send something, and those that gain significantly."""
    places, _, form = key.partition("; ")
    titles = {entry.title for entry in METHODS.values()}
    texts = [
        (TABLES / f"{place.replace('/', '-')}.csv").read_text(encoding="utf-8")
        for place in places.split(", ")
    ]
    rows = [row for text in texts for row in csv.DictReader(text.splitlines())]
    rows = [row for row in rows if row["row"] in titles and row["bytes up"] != "0"]
    gains = [row["own mix, to local"] for row in rows]
    gains = [gain for gain in gains if gain.startswith("+") and gain.endswith("*")]
    return str(len(gains)) + ("" if form == "gains" else f" of {len(rows)}")


def trace(key: str) -> str:
    """Describe the runs behind a figure: the file, its lines, seeds, values and commits."""
    shown, titles, column, *_ = parts(key)
    lines = [f"{figure(key)}    {key}"]
    for seed in sides(key)[0]:
        found = [shown.by_row[t][shown.seeds(t).index(seed)] for t in titles]
        text = ", ".join(
            f"{run[column]} (line {run['line']}, commit {run.get('commit', 'unknown')})"
            for run in found
        )
        lines.append(f"    {shown.title}.jsonl, seed {seed}: {text}")
    return "\n".join(lines)


def filled(text: str) -> str:
    """Return a text with new figures and counts between their comments and ``<!-- end -->``."""
    made = {"record": figure, "count": count}
    return WRITTEN.sub(lambda mark: f"{mark[1]}{made[mark[2]](mark[3])}{mark[4]}", text)


def main(arguments: Sequence[str]) -> None:
    """Trace the figures of pages and keys."""
    for each in arguments:
        found = [each]
        if each.endswith(".md"):
            marks = WRITTEN.findall(Path(each).read_text(encoding="utf-8"))
            found = [key for _, kind, key, _ in marks if kind == "record"]
        print("\n".join(map(trace, found)))


if __name__ == "__main__":
    main(sys.argv[1:])
