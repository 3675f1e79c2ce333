"""Tables and figures of the study of photographs, from its records."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np

from studies.gallery.registry import Method
from studies.gallery.tables import Record, difference, grouped, mean
from studies.gallery.tasks import Settings
from studies.photo import trials
from studies.photo.settings import SETTINGS, TITLES
from studies.tables import mean_and_deviation, save, table

matplotlib.use("Agg")
import matplotlib.pyplot as plt

FIGURES = {
    "full": "all test images",
    "balanced": "balanced",
    "macro_f1": "macro-F1",
    "own": "own mix",
    "worst": "worst client",
}
SHOWN = "fedvpt_d"


def text(
    records: Sequence[Record], methods: Mapping[str, Method], task: str, partition: str
) -> str:
    """Return the table of a setting, the most accurate row on all test images first."""
    by_method = grouped(records, partition)
    local = by_method.get("local")
    header = ["method", *FIGURES.values(), "own mix, to local", "balanced, to local"]
    header += ["new clients", "after 10 steps", "bytes up", "backward", "seconds", "tuned"]
    body = []
    for name in sorted(by_method, key=lambda name: -mean(by_method[name], "full")):
        own = by_method[name]
        values = ", ".join(f"{key} {value}" for key, value in own[0]["values"].items())
        body.append(
            [
                methods[name].title,
                *(mean_and_deviation([each[key] for each in own]) for key in FIGURES),
                difference(own, local),
                difference(own, local, column="balanced"),
                *(mean_and_deviation([each[key] for each in own]) for key in ("received", "after")),
                f"{mean(own, 'bytes_up'):,.0f}",
                f"{mean(own, 'backward'):.0f}",
                f"{mean(own, 'seconds'):.0f}",
                values,
            ]
        )
    seeds = len({record["seed"] for own in by_method.values() for record in own})
    title = f"{TITLES[task]}, {SETTINGS[partition].title}, {seeds} seeds"
    return f"{title}\n\n{table(header, body)}"


def save_all(
    records: Sequence[Record], methods: Mapping[str, Method], task: str, partition: str, out: Path
) -> None:
    """Write the table of a setting, and the figure of accuracy over rounds."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{task}-{partition}.md").write_text(text(records, methods, task, partition) + "\n")
    curves(grouped(records, partition), methods, out / f"{task}-{partition}.png")


def curves(
    by_method: Mapping[str, Sequence[Record]], methods: Mapping[str, Method], path: Path
) -> None:
    """Draw the accuracy on all test images over rounds, of the one seed that measures it."""
    drawing, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name in sorted(by_method, key=lambda name: -mean(by_method[name], "full")):
        for record in by_method[name]:
            if "rounds" in record:
                accuracy = 100 * np.array(record["accuracy"])
                axes.plot(record["rounds"], accuracy, marker="o", label=methods[name].title)
    axes.set(xlabel="round", ylabel="all test images, %")
    drawing.legend(loc="outside right upper", fontsize=8)
    save(drawing, path, dpi=120)


def show_cells(record: Record, settings: Settings, path: Path) -> None:
    """Draw test photographs of solar cells with their class and the predicted one.

    The license of the photographs does not allow everyone to publish the picture.

    Args:
        record: Record of a run on solar cells, with predicted classes.
        settings: Budget of the run.
        path: File of the picture.
    """
    shifted = SETTINGS[record["partition"]].shifted
    data, _, test = trials.split("solar", shifted, record["seed"], settings.num_test, False)
    labels, _ = trials.classes(data, "solar", shifted)
    names = ("functional", "defective") if shifted else data.class_names
    drawing, grid = plt.subplots(3, 8, figsize=(12, 5.5), layout="constrained")
    for axes in grid.flat:
        axes.axis("off")
    for axes, position, guess in zip(grid.flat, test, record["shown"], strict=False):
        axes.imshow(data.images[position, 0].numpy(), cmap="gray")
        guessed, truth = names[int(guess)], names[labels[position]]
        right = guessed == truth
        title = guessed if right else f"{guessed},\nis {truth}"
        axes.set_title(title, fontsize=7, color="black" if right else "tab:red")
    save(drawing, path, dpi=120)
