"""Tables and pictures that the studies share."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def mean_and_deviation(values: Sequence[float], *, digits: int | None = None) -> str:
    """Write values over seeds as mean ± standard deviation, in percent or with some digits."""
    scale, digits = (100, 1) if digits is None else (1, digits)
    mean = f"{scale * np.mean(values):z.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {scale * np.std(values, ddof=1):.{digits}f}"


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Lay out rows as a Markdown table, the first column to the left, the others to the right."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = [
        [
            row[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
        ]
        for row in cells
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in (lines[0], rule, *lines[1:]))


def save(figure: Figure, path: Path, *, dpi: int) -> None:
    """Write a figure to a PNG file, and close it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)
    plt.close(figure)
