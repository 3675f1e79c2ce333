"""Tables, CSV and figure of the study, from its records."""

import csv
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from scipy import stats

from studies.gallery import registry
from studies.gallery.registry import Method
from studies.gallery.tasks import PARTITIONS, TASKS
from studies.tables import mean_and_deviation, save, table

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Record = dict[str, Any]
ACCURACY = {"full": "all test images", "own": "own mix", "worst": "worst client"}
NEWCOMERS = {"received": "new clients", "after": "after 10 steps"}


def grouped(records: Iterable[Record], partition: str) -> dict[str, list[Record]]:
    """Return the reported records of a partition by method, in the order of seeds."""
    found: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        if record["partition"] == partition and record["trial"] is None:
            found[record["method"]].append(record)
    return {name: sorted(own, key=lambda each: each["seed"]) for name, own in found.items()}


def difference(
    own: Sequence[Record], reference: Sequence[Record] | None, *, column: str = "own"
) -> str:
    """Write the paired difference of a column with its 95 % interval, in points.

    The interval is that of Student's t over the common seeds. It is empty for the reference itself,
    and without the interval if there are fewer than five seeds.
    """
    if reference is None or own is reference:
        return ""
    other = {record["seed"]: record[column] for record in reference}
    gains = [100 * (each[column] - other[each["seed"]]) for each in own if each["seed"] in other]
    if not gains:
        return ""
    if len(gains) < 5:
        return f"{np.mean(gains):+.1f}"
    half = stats.t.ppf(0.975, len(gains) - 1) * np.std(gains, ddof=1) / len(gains) ** 0.5
    return f"{np.mean(gains):+.1f} ± {half:.1f}"


def rows(
    records: Sequence[Record], methods: Mapping[str, Method], task: str, partition: str
) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of a table, the most accurate method on own mixes first."""
    by_method, about = grouped(records, partition), TASKS[task]
    local = by_method.get(about.local)
    average = by_method.get(about.average or "")
    header = ["method", *ACCURACY.values(), "to local", "to FedAvg", *NEWCOMERS.values()]
    if about.average is None:
        header.remove("to FedAvg")
    header += ["bytes up", "bytes down", "trained", "sent", "backward", "seconds", "lines"]
    body = []
    ranked = sorted(by_method, key=lambda name: -np.mean([each["own"] for each in by_method[name]]))
    for name in ranked:
        own = by_method[name]
        gains = [difference(own, local)]
        gains += [difference(own, average)] if about.average else []
        body.append(
            [
                methods[name].title,
                *(mean_and_deviation([each[key] for each in own]) for key in ACCURACY),
                *gains,
                *(mean_and_deviation([each[key] for each in own]) for key in NEWCOMERS),
                *(f"{mean(own, key):,.0f}" for key in ("bytes_up", "bytes_down", "trained")),
                f"{mean(own, 'bytes_up') / 4:,.0f}",
                f"{mean(own, 'backward'):.0f}",
                f"{mean(own, 'seconds'):.1f}",
                str(registry.lines_of_code(methods[name].path)),
            ]
        )
    return header, body


def mean(own: Sequence[Record], key: str) -> float:
    """Average a figure over seeds."""
    return float(np.mean([each[key] for each in own]))


def report(records: Sequence[Record], methods: Mapping[str, Method], task: str) -> Iterable[str]:
    """Return a table for each partition, and one of the hyperparameters."""
    for partition in partitions(records):
        body = rows(records, methods, task, partition)
        yield f"\n{titled(records, task, partition, body)}"
    yield f"\n{hyperparameters(records, methods)}"


def partitions(records: Iterable[Record]) -> list[str]:
    """Return the partitions of the records, in the order of the study."""
    return list(dict.fromkeys(record["partition"] for record in records))


def titled(
    records: Iterable[Record], task: str, partition: str, body: tuple[list[str], list[list[str]]]
) -> str:
    """Lay out the rows of a partition as a table with a title."""
    own = grouped(records, partition).values()
    seeds = len({record["seed"] for each in own for record in each})
    return f"{task}, {PARTITIONS[partition]}, {seeds} seeds\n\n{table(*body)}"


def hyperparameters(records: Iterable[Record], methods: Mapping[str, Method]) -> str:
    """Return the table of the chosen hyperparameters."""
    values = {record["method"]: record["values"] for record in records}
    written = [
        [methods[name].title, ", ".join(f"{key} {value}" for key, value in own.items())]
        for name, own in sorted(values.items())
    ]
    return table(["method", "hyperparameters"], written)


def save_all(
    records: Sequence[Record], methods: Mapping[str, Method], task: str, folder: Path
) -> None:
    """Write a table, a CSV file and a figure for each partition, and the hyperparameters."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{task}-values.md").write_text(hyperparameters(records, methods) + "\n")
    for partition in partitions(records):
        stem = f"{task}-{partition}"
        header, body = rows(records, methods, task, partition)
        text = titled(records, task, partition, (header, body))
        (folder / f"{stem}.md").write_text(text + "\n")
        with (folder / f"{stem}.csv").open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([header, *body])
        figure(grouped(records, partition), methods, folder / f"{stem}.png")


def figure(
    by_method: Mapping[str, Sequence[Record]], methods: Mapping[str, Method], path: Path
) -> None:
    """Draw accuracy on own mixes against bytes, with standard deviations over seeds.

    Methods that send the same bytes are drawn next to each other.
    """
    drawing, axes = plt.subplots(figsize=(10, 6), layout="constrained")
    scores = {
        name: 100 * np.array([each["own"] for each in own]) for name, own in by_method.items()
    }
    ranked = sorted(by_method, key=lambda name: -scores[name].mean())
    places: list[float] = []
    for name, marker in zip(ranked, cycle("osD^v<>pXP*"), strict=False):
        sent = max(30.0, mean(by_method[name], "bytes_up") + mean(by_method[name], "bytes_down"))
        while any(abs(np.log(sent / other)) < 0.02 for other in places):
            sent *= 1.025
        places.append(sent)
        error = scores[name].std(ddof=1) if len(scores[name]) > 1 else 0
        shape = {"fmt": marker, "markersize": 5, "linewidth": 1, "label": methods[name].title}
        axes.errorbar(sent, scores[name].mean(), error, **shape)
    axes.set_xscale("log")
    axes.set(
        xlabel="bytes of a client and round, up and down (equal ones are spread; left: none)",
        ylabel="own mix, %",
    )
    drawing.legend(loc="outside right upper", fontsize=7)
    save(drawing, path, dpi=120)
