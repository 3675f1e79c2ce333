"""Tables of means over seeds, with 95 % intervals and paired differences, from records."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from scipy import special  # of scipy, `stats` takes seconds to import

from fedprompt.compare.experiments import harmonic_means
from fedprompt.compare.problems import COSTS, Problem, Record
from fedprompt.compare.trials import CompareError

WIDTH = 7  # columns of a table; the others follow in further ones
FEWEST = 5  # seeds of a star or a recommendation
WIDEST = 0.1  # half of an interval of an accuracy, beyond which a column says little
OTHERS = ("noise", "rise")  # percentages that are no accuracies
SAME = ("values", "inputs", "code")  # of the seeds of a row


def grouped(found: Iterable[Record], partition: str) -> dict[str, list[Record]]:
    """Return the reported records of a partition by row, in the order of seeds.

    Raises:
        CompareError: If the seeds of a row have different values, inputs or code.
    """
    by_row: dict[str, list[Record]] = {}
    for record in sorted(found, key=lambda record: record["seed"]):
        if record["partition"] == partition and record["trial"] is None:
            seeds = by_row.setdefault(record["row"], [])
            if any(seeds and seeds[0].get(of) != record.get(of) for of in SAME):
                what = f"Seeds of {record['row']!r} in {partition!r} differ in {', '.join(SAME)}"
                raise CompareError(f"{what}: delete the records of one choice.")
            seeds.append(record)
    return {row: harmonic(seeds) for row, seeds in by_row.items()}


def harmonic(seeds: Sequence[Record]) -> list[Record]:
    """Replace H of each seed by values whose mean is H of the means on base and on new classes.

    They are linear in the two accuracies (the delta method), so that means, intervals and paired
    differences of a table are of one H.
    """
    if not all("h" in record for record in seeds):
        return list(seeds)
    sides = np.array([[record["full"], record["new"]] for record in seeds])
    means = sides.mean(0)
    slopes = 2 * means[::-1] ** 2 / max(means.sum() ** 2, 1e-12)
    values = harmonic_means(*sides.T.tolist())[0] + (sides - means) @ slopes
    return [record | {"h": value} for record, value in zip(seeds, values.tolist(), strict=True)]


def interval(values: Sequence[float]) -> float:
    """Return half of the 95 % interval of a mean, by Student's t."""
    size = len(values)
    return float(special.stdtrit(size - 1, 0.975) * np.std(values, ddof=1) / size**0.5)


def p_value(values: Sequence[float]) -> float:
    """Return that of Student's two-sided test of a mean of 0; NaN if all values are 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.mean(values) / (np.std(values, ddof=1) / len(values) ** 0.5)
    return float(2 * special.stdtr(len(values) - 1, -abs(t)))


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
    found = []
    for title, seeds in by_row.items():
        other = reference_of(by_row, titles, title)
        found.append(gains(column, seeds, by_row[other]) if other else [])
    tested = [differences for differences in found if len(differences) >= FEWEST]
    stars = iter(holm([p_value(values) for values in tested]))
    return [
        percent(values, signed=True) + (" *" if len(values) >= FEWEST and next(stars) else "")
        if values
        else ""
        for values in found
    ]


def reference_of(
    by_row: Mapping[str, Sequence[Record]], titles: Sequence[str], title: str
) -> str | None:
    """Return the reference of a row with as many backward passes, or the next; None for itself."""
    known = sorted((each for each in titles if each in by_row), key=lambda of: passes(by_row[of]))
    enough = [each for each in known if passes(by_row[each]) > passes(by_row[title]) - 0.5]
    return None if title in known else next(iter(enough or known[-1:]), None)


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


def rows(
    found: Sequence[Record], problem: Problem, partition: str
) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of a table, the highest of the compared column first.

    The compared column and its differences come first, and the costs last, with the numbers of
    seeds if they differ. Empty columns are left out. Vague ones that are not compared are left out
    unless the problem keeps every column.
    """
    by_row = ranked(grouped(found, partition), problem)
    header, body = ["row"], [list(by_row)]
    for name in dict.fromkeys((*problem.compared, *problem.columns)):
        columns = [measured(seeds, name) for seeds in by_row.values()]
        if not (problem.every or name in problem.compared) and vague(name, columns):
            continue
        header.append(problem.columns[name])
        body.append([percent(values) if values else "" for values in columns])
        for word, titles in problem.references.items() if name in problem.compared else ():
            header.append(f"{problem.columns[name]}, to {word}")
            body.append(differences_to(by_row, titles, name))
    for name, word in COSTS.items():
        header.append(word)
        costs = [measured(seeds, name) for seeds in by_row.values()]
        body.append([f"{np.mean(values):,.0f}" if values else "" for values in costs])
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


def ranked(by_row: Mapping[str, Sequence[Record]], problem: Problem) -> dict[str, Sequence[Record]]:
    """Sort rows by the mean of the compared column, the highest first."""
    column = problem.compared[0]
    return dict(sorted(by_row.items(), key=lambda item: -mean(item[1], column)))


def mean(seeds: Sequence[Record], name: str) -> float:
    """Average a figure over seeds."""
    return float(np.mean([record[name] for record in seeds]))


def table(header: Sequence[str], body: Sequence[Sequence[object]]) -> str:
    """Lay out rows as a Markdown table, the first column to the left, the others to the right."""
    cells = [[str(cell).replace("|", r"\|") for cell in row] for row in (header, *body)]
    first, *widths = (max(map(len, column)) for column in zip(*cells, strict=True))
    rule = ["-" * first, *("-" * (width - 1) + ":" for width in widths)]
    lines = [[row[0].ljust(first), *map(str.rjust, row[1:], widths)] for row in cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in (lines[0], rule, *lines[1:]))


def titled(found: Sequence[Record], problem: Problem, partition: str) -> str:
    """Lay out a partition as a table with a title, which names seeds and a shrunk run."""
    by_row = grouped(found, partition)
    counts = sorted({len(seeds) for seeds in by_row.values()})
    shares = {record.get("shrink", 1) for seeds in by_row.values() for record in seeds}
    shrunk = "".join(f", {share:g} of the rounds and images" for share in shares - {1})
    seeds, words = " or ".join(map(str, counts)), "seed" if counts == [1] else "seeds"
    title = f"{problem.title}, {problem.partitions[partition]}, {seeds} {words}{shrunk}"
    header, body = rows(found, problem, partition)
    sent = [header.index(COSTS["bytes_up"])] if COSTS["bytes_up"] in header else []
    first = sorted({*range(min(WIDTH - len(sent), len(header))), *sent})
    rest = [place for place in range(len(header)) if place not in first]
    further = [[0, *rest[at : at + WIDTH - 1]] for at in range(0, len(rest), WIDTH - 1)]
    parts = [
        table([header[at] for at in places], [[line[at] for at in places] for line in body])
        for places in (first, *further)
    ]
    return "\n\n".join([title, *parts])


def report(found: Sequence[Record], problem: Problem, partition: str) -> str:
    """Lay out the tables of a partition, and the paragraphs below them."""
    found = [record for record in found if record["partition"] == partition]
    parts = [titled(found, problem, partition), *problem.notes(problem, found, partition)]
    return "\n\n".join(parts).strip()


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


def save(
    found: Sequence[Record], stem: Path, problem: Problem, partition: str, below: str = ""
) -> None:
    """Write the report of a partition with a text below it, and its table as a CSV file."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    header, body = rows(found, problem, partition)
    text = f"{report(found, problem, partition)}\n\n{below}".strip()
    stem.with_name(f"{stem.name}.md").write_text(f"{text}\n", encoding="utf-8")
    write(stem.with_name(f"{stem.name}.csv"), [header, *body])


def write(path: Path, lines: Iterable[Sequence[object]]) -> None:
    """Write a CSV file."""
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(lines)
