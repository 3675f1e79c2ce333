"""Tables of means over seeds, with 95 % intervals and paired differences, from records and bits."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fedprompt.compare import intervals, measure, records
from fedprompt.compare.intervals import Figure
from fedprompt.compare.measure import Bits
from fedprompt.compare.records import Record
from fedprompt.compare.rows import ALONE, CONSTANT, TOWER
from fedprompt.compare.trials import CompareError

COSTS = {
    "bytes_up": "bytes up",
    "bytes_down": "bytes down",
    "trained": "trained",
    "backward": "backward",
    "kept": "bytes kept",
}
WIDTH = 7  # columns of a table; the others follow in further ones
FEWEST = 5  # seeds of a star or a recommendation
SAME = ("values", "inputs", "code")  # of the seeds of a row
ALONE_ONLY: Mapping[str, Sequence[str]] = {"training alone": ()}
NOTHING = (
    "On {where}, no row is shown to be better than the most frequent class, so none is "
    "recommended. Train longer or at a larger rate: see the page nothing-learns.md."
)


def balanced(column: str) -> str:
    """Return the name of the balanced accuracy beside an accuracy."""
    return measure.PAIRS.get(column, f"{column}_balanced")


@dataclass(frozen=True, eq=False)
class View:
    """One table: the rows of a partition.

    Attributes:
        title: Title.
        partition: Name of the partition in records.
        found: Records.
        columns: Words for each column, by its name in records.
        compared: Columns of the differences to the references.
        bits: Bits of runs, by the keys of their records.
        references: Titles of the rows with which others are compared, by words for them; training
            alone has no titles. Of several, it is that with as many backward passes as the row, or
            the next.
        parts: Tables of which this one has the means; then columns may be "COLUMN PARTITION".
    """

    title: str
    partition: str
    found: Sequence[Record]
    columns: Mapping[str, str]
    compared: Sequence[str]
    bits: Mapping[tuple[Any, ...], Bits] = field(default_factory=dict)
    references: Mapping[str, Sequence[str]] = field(default_factory=lambda: ALONE_ONLY)
    parts: Sequence["View"] = ()

    @cached_property
    def by_row(self) -> dict[str, list[Record]]:
        """The reported records by row, the highest of the compared column first.

        Raises:
            CompareError: If the seeds of a row have different values, inputs or code.
        """
        found: dict[str, list[Record]] = {}
        for record in sorted(self.found, key=lambda record: record["seed"]):
            if record["partition"] == self.partition and record["trial"] is None:
                seeds = found.setdefault(record["row"], [])
                if any(seeds and seeds[0].get(of) != record.get(of) for of in SAME):
                    what = f"Seeds of {record['row']!r} differ in {', '.join(SAME)}"
                    raise CompareError(f"{what}: delete the records of one choice.")
                seeds.append(record)
        column = self.compared[0]
        scores = {title: measured(seeds, column) for title, seeds in found.items()}
        order = sorted(found, key=lambda title: -np.mean(scores[title] or [-1.0]))
        return {title: found[title] for title in order}

    def seeds(self, title: str) -> list[int]:
        """Return the seeds of a row."""
        return [record["seed"] for record in self.by_row[title]]

    def mean(self, title: str, name: str) -> float:
        """Average a figure of a row over seeds; 0 if a seed lacks it."""
        values = measured(self.by_row[title], name)
        return float(np.mean(values)) if values else 0.0

    @cached_property
    def _figures(self) -> dict[tuple[str, str], Figure | None]:
        return {}

    def figure(self, title: str, column: str) -> Figure | None:
        """Return a figure of a row, or None if a seed lacks it."""
        if (title, column) not in self._figures:
            self._figures[title, column] = self._made(title, column)
        return self._figures[title, column]

    def _made(self, title: str, column: str) -> Figure | None:
        if self.parts:
            name, _, partition = column.partition(" ")
            chosen = [part for part in self.parts if part.partition == partition]
            sides = [part.figure(title, name) for part in chosen or self.parts]
            known = [side for side in sides if side is not None]
            if len(known) < len(sides):
                return None
            listed = [side.parts for side in known if side.parts is not None]
            whole = len(listed) == len(known)
            parts = np.concatenate(listed, -1) / len(known) if whole else None
            return Figure(np.mean([side.values for side in known], 0), parts)
        seeds = self.by_row[title]
        values = measured(seeds, column)
        if not values:
            return None
        if column in ("h", "h_balanced"):
            base, new = ("full", "new") if column == "h" else ("balanced", "new_balanced")
            first, second = self.figure(title, base), self.figure(title, new)
            return intervals.harmonic(first, second) if first and second else None
        contributed = self._contributions(seeds, column)
        return Figure(np.array(values), contributed)

    def _contributions(self, seeds: Sequence[Record], column: str) -> np.ndarray | None:
        """Return the contributions of test images to a figure of each seed, if there are bits."""
        bits = [self.bits.get(records.key(record)) for record in seeds]
        pairs = {balanced(name): name for name in self.columns}
        name = pairs.get(column, column)
        if any(not each or not _has(each, name) for each in bits):
            return None
        places, labels = self._images[name]
        made = []
        for each in bits:
            right, weights, _, at = measure.sides(each, name)  # type: ignore[arg-type]
            shape = (len(right), len(places))
            full = np.zeros(shape), np.zeros(shape)
            columns = np.searchsorted(places, at)
            full[0][:, columns], full[1][:, columns] = right, weights
            made.append(intervals.contributions(*full, labels if name != column else None)[1])
        return np.stack(made)

    @cached_property
    def _images(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Places and labels of the images of each figure, of all rows and seeds together."""
        found = {}
        keys = [records.key(record) for seeds in self.by_row.values() for record in seeds]
        for name in self.columns:
            known = [self.bits[key] for key in keys if _has(self.bits.get(key) or {}, name)]
            if known:
                sides = [measure.sides(each, name) for each in known]
                every, first = np.unique(np.concatenate([s[3] for s in sides]), return_index=True)
                found[name] = every, np.concatenate([side[2] for side in sides])[first]
        return found

    def difference(self, title: str, other: str, column: str) -> Figure | None:
        """Return the paired difference of two rows over their common seeds."""
        first, second = self.figure(title, column), self.figure(other, column)
        if first is None or second is None:
            return None
        seeds, others = self.seeds(title), self.seeds(other)
        common = [seed for seed in seeds if seed in others]
        if not common:
            return None
        return first.at(list(map(seeds.index, common))) - second.at(list(map(others.index, common)))

    def reference_of(self, title: str, words: str) -> str | None:
        """Return the reference of a row, or None for a reference."""
        titles, tower = self.references[words], self._is_tower(title)
        known = [
            each
            for each in self.by_row
            if each in titles
            or (not titles and each.startswith(ALONE.title) and (TOWER in each) == tower)
        ]
        if title in known or title == CONSTANT:
            return None
        known.sort(key=lambda each: self.mean(each, "backward"))
        passes = self.mean(title, "backward")
        enough = [each for each in known if self.mean(each, "backward") > passes - 0.5]
        return next(iter(enough or known[-1:]), None)

    def _is_tower(self, title: str) -> bool:
        return any(record.get("tower") for record in self.by_row[title])

    def differences(self, column: str, words: str) -> dict[str, Figure]:
        """Return the paired difference of each row to its reference."""
        pairs = {title: self.reference_of(title, words) for title in self.by_row}
        made = {t: self.difference(t, other, column) for t, other in pairs.items() if other}
        return {title: each for title, each in made.items() if each is not None}

    def above(self, column: str, titles: Sequence[str]) -> list[bool]:
        """Return which rows are better than the most frequent class, also in balanced accuracy.

        If a run does not have the balanced accuracy of the same tests, that of all test images
        takes its place.
        """
        if CONSTANT not in self.by_row:
            return [False] * len(titles)
        held = []
        pair = column if column.endswith("balanced") else balanced(column)
        for names in ([column], [pair, "balanced"]):
            sides = [[self.difference(title, CONSTANT, name) for name in names] for title in titles]
            found = [next((each for each in side if each is not None), None) for side in sides]
            known = [each for each in found if each is not None and len(each.values) >= FEWEST]
            stars = dict(zip(map(id, known), intervals.starred(known), strict=True))
            held.append([stars.get(id(e), False) and e.values.mean() > 0 for e in found])  # type: ignore[union-attr]
        return [all(each) for each in zip(*held, strict=True)]

    def starred(self, column: str, words: str) -> dict[str, str]:
        """Write the paired difference of each row to its reference.

        A star marks the differences that hold after Holm's correction for the rows of the column;
        a gain also has to hold against the most frequent class.
        """
        found = self.differences(column, words)
        tested = [title for title, each in found.items() if len(each.values) >= FEWEST]
        stars = dict(zip(tested, intervals.starred([found[t] for t in tested]), strict=True))
        better = dict(zip(tested, self.above(column, tested), strict=True))
        return {
            title: each.percent(signed=True)
            + (" *" if stars.get(title) and (each.values.mean() < 0 or better[title]) else "")
            for title, each in found.items()
        }

    def lines(self) -> tuple[list[str], list[list[str]]]:
        """Return header and rows of the table, the highest of the compared column first.

        The compared columns, their balanced ones and their differences come first, and the costs
        last, with the numbers of seeds if they differ. Empty columns are left out.
        """
        header, body = ["row"], [list(self.by_row)]
        first = [name for each in self.compared for name in (each, balanced(each))]
        for name in dict.fromkeys((*first, *self.columns)):
            if name not in self.columns:
                continue
            header.append(self.columns[name])
            figures = [self.figure(title, name) for title in self.by_row]
            body.append(["" if each is None else each.percent() for each in figures])
            for words in self.references if name in self.compared else ():
                header.append(f"{self.columns[name]}, to {words}")
                stars = self.starred(name, words)
                body.append([stars.get(title, "") for title in self.by_row])
        for name, word in COSTS.items():
            header.append(word)
            costs = [measured(seeds, name) for seeds in self.by_row.values()]
            body.append([f"{np.mean(values):,.0f}" if values else "" for values in costs])
        counts = [str(len(seeds)) for seeds in self.by_row.values()]
        if len({*counts}) > 1:
            header.append("seeds")
            body.append(counts)
        filled = [(word, cells) for word, cells in zip(header, body, strict=True) if any(cells)]
        header, body = map(list, zip(*filled, strict=True))
        return header, [list(cells) for cells in zip(*body, strict=True)]

    def notes(self) -> list[str]:
        """Return the paragraphs below the table."""
        found = []
        one = []
        for title in [title for title in self.by_row if title != CONSTANT]:
            same = [record.get("predicted") == 1 for record in self.by_row[title]]
            where = "" if all(same) else f" (in {sum(same)} of {len(same)} seeds)"
            one += [f"{title}{where}"] * any(same)
        if one:
            found.append(
                f"Models of these rows predict one class for every image: {', '.join(one)}."
            )
        used = [
            record["uses"] for seeds in self.by_row.values() for record in seeds if "uses" in record
        ]
        if used:
            low, high = np.mean(used, 0)
            found.append(
                f"In a run, an image of the smallest client is used {low:.1f} times, and an image "
                f"of the largest client {high:.1f} times."
            )
        return [*found, *self._over_seeds()]

    def _over_seeds(self) -> list[str]:
        """Say which intervals do not have the error of test images."""

        def lacks(title: str, name: str) -> bool:
            shown = self.figure(title, name)
            return shown is not None and shown.parts is None

        rows = [title for title in self.by_row if title != CONSTANT]
        if max(map(len, self.by_row.values())) < 3:
            return []  # without intervals
        known = [title for title in rows if not lacks(title, self.compared[0])]
        alone = "over seeds alone"
        if not known:
            return [f"Intervals are {alone}."]
        if len(known) < len(rows):
            return [f"Intervals are {alone}, except in and between these rows: {', '.join(known)}."]
        words = [each for name, each in self.columns.items() if any(lacks(t, name) for t in rows)]
        return [f"Intervals of these columns are {alone}: {', '.join(words)}."] if words else []

    def advice(self) -> str:
        """Recommend a row for the clients' images, and a row for one model of all test images."""
        if not {"own", "full"} <= {*self.columns} or self.compared[0] != "own":
            return ""
        if min(map(len, self.by_row.values())) < FEWEST:
            return f"With {FEWEST} seeds, the last line recommends a row."
        told = {"own": "a client's images", "full": "the images of all clients"}
        chosen = {column: self._chosen(column) for column in told}
        use = [f"{row} for {told[column]}" for column, row in chosen.items() if row]
        none = [NOTHING.format(where=told[column]) for column, row in chosen.items() if not row]
        return " ".join([*([f"**Use** {', and '.join(use)}."] if use else []), *none])

    def _chosen(self, column: str) -> str | None:
        """Return the cheapest row that is not shown to be less accurate than the best one."""
        titles = [title for title in self.by_row if title != CONSTANT]
        held = self.above(column, titles)
        titles = [title for title, each in zip(titles, held, strict=True) if each]
        if not titles:
            return None
        best = max(titles, key=lambda title: self.mean(title, column))
        for title in sorted(titles, key=lambda title: self.mean(title, "bytes_up")):
            lost = self.difference(best, title, column)
            if title == best or lost is None or _not_shown(lost):
                break
        words = next(iter(self.references), "")
        reference = self.reference_of(title, words) if words else None
        gain = reference and self.difference(title, reference, column)
        return f"{title} ({gain.percent(signed=True)} points to {words})" if gain else title

    def text(self) -> str:
        """Lay out the table with its title, and the paragraphs below it."""
        counts = sorted({len(seeds) for seeds in self.by_row.values()})
        shares = {record.get("shrink", 1) for seeds in self.by_row.values() for record in seeds}
        shrunk = "".join(f", {share:g} of the rounds and images" for share in shares - {1})
        seeds, words = " or ".join(map(str, counts)), "seed" if counts == [1] else "seeds"
        header, body = self.lines()
        sent = [header.index(COSTS["bytes_up"])] if COSTS["bytes_up"] in header else []
        first = sorted({*range(min(WIDTH - len(sent), len(header))), *sent})
        rest = [place for place in range(len(header)) if place not in first]
        further = [[0, *rest[at : at + WIDTH - 1]] for at in range(0, len(rest), WIDTH - 1)]
        parts = [
            table([header[at] for at in places], [[line[at] for at in places] for line in body])
            for places in (first, *further)
        ]
        title = f"{self.title}, {seeds} {words}{shrunk}"
        return "\n\n".join(filter(None, [title, *parts, *self.notes(), self.advice()]))


def _has(bits: Bits, name: str) -> bool:
    return "right" in bits and (name in ("own", "full") or f"{name}.right" in bits)


def _not_shown(lost: Figure) -> bool:
    mean, half, _ = intervals.interval(lost)
    return len(lost.values) > 1 and float(mean) <= float(half)


def measured(seeds: Sequence[Record], name: str) -> list[float]:
    """Return a figure of all seeds, or nothing if one of them lacks it."""
    values = [record[name] for record in seeds if name in record]
    return values if len(values) == len(seeds) else []


def table(header: Sequence[str], body: Sequence[Sequence[object]]) -> str:
    """Lay out rows as a Markdown table, the first column to the left, the others to the right."""
    cells = [[str(cell).replace("|", r"\|") for cell in row] for row in (header, *body)]
    first, *widths = (max(map(len, column)) for column in zip(*cells, strict=True))
    rule = ["-" * first, *("-" * (width - 1) + ":" for width in widths)]
    lines = [[row[0].ljust(first), *map(str.rjust, row[1:], widths)] for row in cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in (lines[0], rule, *lines[1:]))


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


def write(path: Path, lines: Iterable[Sequence[object]]) -> None:
    """Write a CSV file."""
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(lines)


def write_named(path: Path, listed: Sequence[Mapping[str, Any]]) -> None:
    """Write a CSV file of lines by the names of their columns, if there is a line."""
    header = dict.fromkeys(name for line in listed for name in line)
    if header:
        write(path, [[*header], *([line.get(name) for name in header] for line in listed)])
